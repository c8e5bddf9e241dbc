"""Arguments of these commands. Imports nothing heavy: a command's module is imported when it is called."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.configs import SHIPPED
from roll.pipeline.cli import locate
from roll.pipeline.commands import completion

if TYPE_CHECKING:
    from roll.configs.data import DataArguments

MODEL = "a run's folder, a checkpoint, a model's folder, a name on the hub, or smollm2"


def add_command(
    commands: Any, name: str, text: str, do: Callable[[argparse.Namespace], int] | None = None, *aliases: str
) -> argparse.ArgumentParser:
    """Adds a command to others: its name, a line about it, and what performs it."""
    described = text[0].upper() + text[1:] + "."
    parser = commands.add_parser(name, help=text, description=described, allow_abbrev=False, aliases=aliases)
    if do is not None:
        parser.set_defaults(do=do)
    return parser  # type: ignore[no-any-return]


def add_commands(commands: Any) -> None:
    """Adds all of them to the ``roll`` command."""
    _add_eval(commands)
    _add_generate(commands)
    _add_score(commands)
    _add_chat(commands)
    _add_serve(commands)
    _add_export(commands)
    _add_explain(commands)
    _add_diagnose(commands)
    _add_watch(commands)
    _add_report(commands)
    _add_compare(commands)
    _add_verify(commands)
    _add_replay(commands)
    _add_bundle(commands)


def _add_eval(commands: Any) -> None:
    parser = add_command(commands, "eval", "evaluate a saved model on held-out data, as its run would", _eval)
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    config = parser.add_argument("--config", metavar="NAME", help="a configuration or file instead of the run's own")
    completion.completed_by(config, completion.names)
    changes = parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the configuration")
    completion.completed_by(changes, completion.overrides_of_run)


def _eval(options: argparse.Namespace) -> int:
    from roll.pipeline.commands.evaluating import run

    config = None if options.config is None else _locate(options.config)
    return run(options.model, config, options.overrides, options.started)


def _add_generate(commands: Any) -> None:
    parser = add_command(commands, "generate", "generate a saved model's responses to the prompts of files", _generate)
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument(
        "overrides",
        nargs="+",
        metavar="FILE|key=value",
        help="prompts: jsonl, json, parquet, csv, arrow, txt; key=value: keys of actor_infer (model_args.dtype=bf16)",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="JSON lines, one per row")
    parser.add_argument("--overwrite", action="store_true", help="start over, even if the file has responses")
    parser.add_argument(
        "--prompt-key", metavar="COLUMN", help="column with texts or lists of messages (messages, else prompt)"
    )
    parser.add_argument("--answer-key", metavar="COLUMN", default="answers", help="column for the responses (answers)")
    _add_images(parser)
    parser.add_argument("--chat", action="store_true", help="send texts as messages, through the chat template")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="responses per prompt (1)")
    parser.add_argument("--concurrency", type=int, default=128, metavar="N", help="requests at the same time (128)")
    _add_sampling(parser)


def _generate(options: argparse.Namespace) -> int:
    from roll.configs.problems import ConfigErrors
    from roll.pipeline.cli import EXIT_USAGE, report
    from roll.pipeline.commands.engine import generator_section
    from roll.pipeline.commands.generating import Job, run

    files, words = _files_and_words(options, "generate")
    try:
        worker, images = generator_section(options.engine, _sampling(options), words), _images(options)
    except ConfigErrors as errors:
        sys.stderr.write(report(errors, "roll generate"))
        return EXIT_USAGE
    numbers = {"-n": options.n, "--concurrency": options.concurrency, "--max-length": options.max_length}
    _refuse_below_one(options, "generate", numbers)
    job = Job(
        options.model,
        files,
        options.output,
        worker,
        num_answers=options.n,
        prompt_key=options.prompt_key,
        answer_key=options.answer_key,
        images=images,
        system=options.system,
        chats=options.chat,
        sequence_length=options.max_length,
        max_running_requests=options.concurrency,
        seed=options.seed,
        overwrite=options.overwrite,
    )
    return run(job)


def _add_images(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image-folder", metavar="DIR", help="folder of the pictures that rows name (the file's own)")
    parser.add_argument("--image-outside-folder", action="store_true", help="pictures' paths may lead out of it")
    parser.add_argument(
        "--image-urls",
        metavar="HOSTS",
        help="pictures may be at addresses of these hosts, with commas between them; any: of all public ones",
    )


def _images(options: argparse.Namespace) -> DataArguments:
    """Where pictures of rows may be.

    Raises:
        ConfigErrors: names that are none of hosts.
    """
    from roll.configs.data import DataArguments
    from roll.configs.problems import ConfigErrors

    hosts = options.image_urls
    args = DataArguments(
        video=None,
        image_folder=options.image_folder or None,
        image_outside_folder=options.image_outside_folder,
        image_urls=hosts == "any" or (hosts.split(",") if hosts is not None else False),
    )
    if problems := list(args.problems()):
        raise ConfigErrors(problems)
    return args


def _add_chat(commands: Any) -> None:
    parser = add_command(commands, "chat", "chat with a saved model in the terminal", _chat)
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    words = parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="keys of actor_infer, such as model_args.dtype=bf16"
    )
    completion.completed_by(words, completion.generator_keys)
    _add_sampling(parser, engines=False)


def _chat(options: argparse.Namespace) -> int:
    from roll.configs.problems import ConfigErrors
    from roll.pipeline.cli import EXIT_USAGE, report
    from roll.pipeline.commands.chatting import run
    from roll.pipeline.commands.engine import generator_section

    _refuse_below_one(options, "chat", {"--max-length": options.max_length})
    try:
        worker = generator_section(None, _sampling(options), options.overrides)
    except ConfigErrors as errors:
        sys.stderr.write(report(errors, "roll chat"))
        return EXIT_USAGE
    return run(options.model, worker, options.system, options.max_length, options.seed)


def _add_serve(commands: Any) -> None:
    parser = add_command(commands, "serve", "serve a saved model through OpenAI's and Anthropic's APIs", _serve)
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    words = parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="keys of actor_infer, such as model_args.dtype=bf16"
    )
    completion.completed_by(words, completion.generator_keys)
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port on 127.0.0.1; 0: any free one (8000)")
    parser.add_argument("--concurrency", type=int, default=128, metavar="N", help="responses at the same time (128)")
    parser.add_argument("--dialect", default="auto", metavar="NAME", help="how the model writes tool calls (auto)")
    _add_sampling(parser, system=False)


def _serve(options: argparse.Namespace) -> int:
    from roll.configs.problems import ConfigErrors
    from roll.pipeline.cli import EXIT_USAGE, report
    from roll.pipeline.commands.engine import generator_section
    from roll.pipeline.commands.serving import Job, run

    if not 0 <= options.port < 1 << 16:
        options.parser.error(f"serve: --port: got {options.port}, expected 0 to 65535")
    _refuse_below_one(options, "serve", {"--concurrency": options.concurrency, "--max-length": options.max_length})
    try:
        worker = generator_section(options.engine, _sampling(options), options.overrides)
    except ConfigErrors as errors:
        sys.stderr.write(report(errors, "roll serve"))
        return EXIT_USAGE
    job = Job(
        options.model,
        worker,
        port=options.port,
        dialect=options.dialect,
        sequence_length=options.max_length,
        answer_length=options.max_tokens,
        max_running_requests=options.concurrency,
        seed=options.seed,
    )
    return run(job)


def _add_sampling(parser: argparse.ArgumentParser, *, engines: bool = True, system: bool = True) -> None:
    """Options of everything that samples; ``generating_args`` has the others."""
    if engines:
        engine = parser.add_argument("--engine", metavar="NAME", help="hf_infer, vllm or sglang (hf_infer)")
        completion.completed_by(engine, completion.generators)
    if system:
        parser.add_argument("--system", type=_text, metavar="TEXT", help="system message of conversations without one")
    parser.add_argument("--temperature", type=float, help="0 is greedy (1)")
    parser.add_argument("--top-p", type=float, help="sample from the most likely tokens of this total mass (1)")
    parser.add_argument("--top-k", type=int, help="sample from this many most likely tokens; 0: all (0)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of a response (512)")
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="most tokens of prompt and response (the model's maximum, up to 8192)",
    )
    parser.add_argument("--seed", type=int, default=42, help="seed of the responses (42)")


def _text(words: str) -> str:
    """An option that is a text: not empty, and of characters alone."""
    if not words or any("\ud800" <= character <= "\udfff" for character in words):
        raise argparse.ArgumentTypeError(f"got {words!a}, expected a text")
    return words


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    named = {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
    return {**named, "max_new_tokens": options.max_tokens}


def _add_score(commands: Any) -> None:
    parser = add_command(
        commands, "score", "score responses with a configuration's rewards, or with one verifier", _score
    )
    parser.add_argument(
        "overrides",
        nargs="+",
        metavar="FILE|key=value",
        help="responses: output of `roll generate`, episodes of a run, or rows with a column of responses; "
        "key=value: of the configuration, or arguments of the verifier",
    )
    by = parser.add_mutually_exclusive_group(required=True)
    config = by.add_argument(
        "--config", metavar="NAME", help="configuration, file or run folder whose rewards are used"
    )
    completion.completed_by(config, completion.names)
    verifier = by.add_argument(
        "--verifier", metavar="NAME", help="one of `roll verifiers list`, or package.module:Class"
    )
    completion.completed_by(verifier, completion.verifiers)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="file for the rows with their scores, as JSON lines"
    )
    parser.add_argument("--summary", type=Path, metavar="FILE", help="file for the figures, as JSON")
    parser.add_argument("--answer-key", metavar="COLUMN", help="column of the responses (answers)")
    parser.add_argument(
        "--prompt-key", metavar="COLUMN", help="column of the question (messages or prompt, if there is one)"
    )
    truth = parser.add_mutually_exclusive_group()
    truth.add_argument(
        "--truth-key", metavar="COLUMN", default="solution", help="column of the reference answer (solution)"
    )
    truth.add_argument("--no-truth", action="store_true", help="there is no reference answer")
    parser.add_argument(
        "--tag-key", metavar="COLUMN", default="tag", help="column of the tag, which selects the domain (tag)"
    )
    parser.add_argument("--score-key", metavar="COLUMN", default="scores", help="column for the scores (scores)")
    _add_images(parser)
    parser.add_argument("--processes", type=int, metavar="N", help="child processes for each domain's rules")


def _score(options: argparse.Namespace) -> int:
    from roll.configs.problems import ConfigErrors
    from roll.data.questions import AnswerColumns
    from roll.pipeline.cli import EXIT_USAGE, report
    from roll.pipeline.commands.scoring import Job, rewards_of, run

    files, words = _files_and_words(options, "score")
    _refuse_below_one(options, "score", {"--processes": options.processes})
    config = None if options.config is None else _locate(options.config)
    try:
        rewards, images = rewards_of(config, options.verifier, words), _images(options)
    except ConfigErrors as errors:
        sys.stderr.write(report(errors, options.config or "roll score"))
        return EXIT_USAGE
    truth = None if options.no_truth else options.truth_key
    columns = AnswerColumns(options.answer_key, options.prompt_key, truth, options.tag_key)
    output = options.output, options.score_key, options.summary
    job = Job(files, columns, rewards, *output, options.processes, images)
    return run(job)


def _add_export(commands: Any) -> None:
    parser = add_command(
        commands, "export", "write a checkpoint's model as a folder that other programs can load", _export
    )
    parser.add_argument("model", metavar="CHECKPOINT", help="a run's folder, a checkpoint, or a model's folder")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--role", default="actor_train", metavar="NAME", help="role whose model is written (%(default)s), or critic"
    )
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], help="number format of the weights (as saved)")
    parser.add_argument("--merge-adapter", action="store_true", help="merge a LoRA adapter into its base model")
    parser.add_argument("--base", metavar="MODEL", help="the base model, if it has moved since the run began")
    parser.add_argument(
        "--max-shard-size",
        default="4GiB",
        metavar="SIZE",
        help="largest weight file, such as 500MB or 4GiB (%(default)s)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DIR if it exists")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python files that come with the model")


def _export(options: argparse.Namespace) -> int:
    from roll.pipeline.commands.exporting import Job, run

    return run(Job(**{field.name: getattr(options, field.name) for field in fields(Job)}))


def _locate(config: str) -> tuple[str, Path]:
    """Name and folder of a configuration; that of a run is in its folder."""
    saved = Path(config).expanduser() / "config.yaml"
    return locate(str(saved) if saved.is_file() else config, str(SHIPPED))


def _files_and_words(options: argparse.Namespace, command: str) -> tuple[list[str], list[str]]:
    """Files and ``key=value`` words."""
    files = [word for word in options.overrides if "=" not in word]
    if not files:
        options.parser.error(f"{command}: no file given")
    return files, [word for word in options.overrides if "=" in word]


def _refuse_below_one(options: argparse.Namespace, command: str, numbers: Mapping[str, int | None]) -> None:
    for option, value in numbers.items():
        if value is not None and value < 1:
            options.parser.error(f"{command}: {option}: got {value}, expected at least 1")


def _add_explain(commands: Any) -> None:
    parser = add_command(
        commands, "explain", "explain a key, here and in ROLL, verl, ChatLearn, MindSpeed RL", _explain
    )
    key = parser.add_argument("key", metavar="KEY", help="a key of any of them; its last parts are enough")
    completion.completed_by(key, completion.explained)


def _explain(options: argparse.Namespace) -> int:
    from roll.pipeline.commands.explaining import run

    return run(options.key)


def _add_diagnose(commands: Any) -> None:
    text = "say why a run's reward does not rise: causes with evidence and advice; exit code 1 if it does not"
    parser = add_command(commands, "diagnose", text, _diagnose)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, also of a run that is going on")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def _diagnose(options: argparse.Namespace) -> int:
    from roll.pipeline.cli import EXIT_USAGE
    from roll.report.diagnosis import diagnose
    from roll.report.record import RunRecord
    from roll.tracking.run import to_json

    try:
        found = diagnose(RunRecord.read(options.run.expanduser()))
    except ValueError as error:
        sys.stderr.write(f"roll diagnose: {error}\n")
        return EXIT_USAGE
    sys.stdout.write(to_json(found.plain(), indent=2) + "\n" if options.json else found.text())
    return 0 if found.learns else 1


def _add_watch(commands: Any) -> None:
    text = "watch a run in the terminal, from any machine that sees its folder, until it ends"
    parser = add_command(commands, "watch", text, _watch)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder; one that has ended is shown once")
    parser.add_argument("--once", action="store_true", help="show it once")
    parser.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds between two looks (2)")


def _watch(options: argparse.Namespace) -> int:
    from rich.console import Console

    from roll.pipeline.cli import EXIT_OK, EXIT_USAGE
    from roll.report.live import watch

    if not options.every > 0:
        options.parser.error(f"watch: --every: got {options.every:g}, expected more than 0")
    try:
        watch(options.run.expanduser(), Console(highlight=False), options.every, once=options.once)
    except ValueError as error:
        sys.stderr.write(f"roll watch: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:  # the way to stop watching
        pass
    return EXIT_OK


def _add_report(commands: Any) -> None:
    text = "write the page of a run anew: metrics, times, diagnosis, settings, episodes; also of one that is going on"
    parser = add_command(commands, "report", text, _report)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write (RUN/renders/index.html)")


def _report(options: argparse.Namespace) -> int:
    from roll.pipeline.cli import EXIT_USAGE
    from roll.pipeline.commands.inspecting import report

    try:
        page = report(options.run.expanduser(), options.output)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"roll report: {error}\n")
        return EXIT_USAGE
    sys.stdout.write(f"{page}\n")
    return 0


def _add_compare(commands: Any) -> None:
    text = "compare runs: settings, software, data, figures beyond the noise of seeds, and where equal runs part"
    parser = add_command(commands, "compare", text, _compare)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs; the first is the baseline")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write a page with their curves")


def _compare(options: argparse.Namespace) -> int:
    from roll.pipeline.cli import EXIT_USAGE
    from roll.pipeline.commands.inspecting import compare

    if len(options.runs) < 2:
        options.parser.error("compare: got 1 run, expected at least 2")
    try:
        text = compare([run.expanduser() for run in options.runs], options.output)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"roll compare: {error}\n")
        return EXIT_USAGE
    sys.stdout.write(text)
    return 0


def _add_verify(commands: Any) -> None:
    text = "count a run's metrics again from the rows that it wrote; exit code 1 if one differs"
    parser = add_command(commands, "verify", text, _verify)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--rollouts", type=Path, metavar="DIR", help="its rollout_dump_dir, if that has moved")


def _verify(options: argparse.Namespace) -> int:
    from roll.pipeline.cli import EXIT_USAGE
    from roll.pipeline.commands.inspecting import verify

    try:
        text, wrong = verify(options.run.expanduser(), options.rollouts and options.rollouts.expanduser())
    except (OSError, ValueError) as error:
        sys.stderr.write(f"roll verify: {error}\n")
        return EXIT_USAGE
    sys.stdout.write(text)
    return 1 if wrong else 0


def _add_replay(commands: Any) -> None:
    text = "take a step of a run again from its checkpoint and its rollouts or data, also with other settings"
    parser = add_command(commands, "replay", text, _replay)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step")
    parser.add_argument("--rollouts", type=Path, metavar="DIR", help="its rollout_dump_dir, if that has moved")
    changes = parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes: what would have been")
    completion.completed_by(changes, completion.overrides_of_run)


def _replay(options: argparse.Namespace) -> int:
    from roll.pipeline.commands.replaying import Job, run

    rollouts = options.rollouts and options.rollouts.expanduser()
    return run(Job(options.run.expanduser(), options.step, rollouts), options.overrides, options.started)


def _add_bundle(commands: Any) -> None:
    text = "pack a run's settings, logs, metrics and failed rows into one small file, without secrets"
    parser = add_command(commands, "bundle", text, _bundle)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="archive to write (RUN-bundle.zip)")
    parser.add_argument("--no-rows", action="store_true", help="without prompts and responses")


def _bundle(options: argparse.Namespace) -> int:
    from roll.pipeline.cli import EXIT_USAGE
    from roll.pipeline.commands.inspecting import bundle

    try:
        text = bundle(options.run.expanduser(), options.output, rows=not options.no_rows)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"roll bundle: {error}\n")
        return EXIT_USAGE
    sys.stdout.write(text)
    return 0
