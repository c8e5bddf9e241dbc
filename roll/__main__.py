# PYTHON_ARGCOMPLETE_OK
"""The ``roll`` command: ``roll --help``. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roll import __version__
from roll.configs import SHIPPED, config_groups
from roll.extras.importers import SYSTEMS
from roll.pipeline.cli import EXIT_USAGE, finished, locate, perform, refuse
from roll.pipeline.commands import completion
from roll.pipeline.commands.arguments import add_command, add_commands
from roll.pipeline.programs import configurations
from roll.utils.registry import extra

EXAMPLES = """\
examples:
  roll train agentic_sokoban
  roll train rlvr_math max_steps=5 actor_train.training_args.learning_rate=1e-4
  roll train rlvr_math train=megatron infer=vllm
  roll train ./mine.yaml
  roll config print my_model > mine.yaml
  roll import verl run_grpo.sh -o mine.yaml
  roll generate output/rlvr_math prompts.jsonl -o answers.jsonl

completion in bash and zsh:  eval "$(register-python-argcomplete roll)"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 2 for a wrong one or a wrong configuration."""
    started = time.time()
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = command_line()
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)
    # Overrides may stand between and behind options, which argparse leaves over in a subcommand.
    options, rest = parser.parse_known_args(argv)
    refuse(parser, [word for word in rest if word.startswith("-") or not hasattr(options, "overrides")])
    if not hasattr(options, "do"):
        sys.stderr.write(options.parser.format_help())
        return EXIT_USAGE
    if hasattr(options, "overrides"):
        options.overrides = [*options.overrides, *rest]
        options.started = started
        sys.path.insert(0, os.getcwd())  # a user's own environments and rewards, as next to a start script
    return finished(lambda: int(options.do(options)))


def command_line() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="roll",
        description="Trains large language models with reinforcement learning.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(parser=parser)
    parser.add_argument("--version", action="version", version=f"roll {__version__}")
    commands = parser.add_subparsers(metavar="command")
    _add_run(commands, "train", "run a configuration")
    _add_run(commands, "validate", "check a configuration and its data; show batch sizes and placement")
    config = _group(commands, "config", "configurations: list, print")
    add_command(config, "list", "list the configurations, their pipelines and the groups to choose from", _list_configs)
    _add_run(config, "print", "show a resolved configuration, without secrets")
    _add_plan(commands)
    _add_doctor(commands)
    _add_import(commands)
    add_commands(commands)
    env = _group(commands, "env", "environments: list, check", "envs")
    add_command(env, "list", "list the values of env_type", _list_envs)
    _add_env_check(env)
    _add_template_check(_group(commands, "template", "chat templates: check"))
    add_command(
        _group(commands, "verifiers", "verifiers: list"), "list", "list the values of verifiers.name", _list_verifiers
    )
    return parser


def _group(commands: Any, name: str, text: str, *aliases: str) -> Any:
    parser = add_command(commands, name, text, None, *aliases)
    parser.set_defaults(parser=parser)
    return parser.add_subparsers(metavar="command")


def _add_run(commands: Any, action: str, text: str, do: Any = None) -> argparse.ArgumentParser:
    """A command on one configuration; ``_perform`` does it, if nothing else is given."""
    parser = add_command(commands, action, text, do or _perform)
    parser.set_defaults(action=action)
    name = parser.add_argument("config", metavar="NAME", help="a configuration of `roll config list`, or a YAML file")
    completion.completed_by(name, completion.names)
    parser.add_argument("--config-path", "--config_path", default=str(SHIPPED), help="folder to look for NAME in")
    changes = parser.add_argument(
        "overrides", nargs="*", default=(), metavar="key=value", help="changes to the configuration"
    )
    completion.completed_by(changes, completion.overrides)
    return parser


def _add_plan(commands: Any) -> None:
    """The command that estimates what a configuration needs, without running it."""
    text = "estimate placement, memory and time of a configuration, and suggest changes"
    parser = _add_run(commands, "plan", text, _plan)
    devices = parser.add_argument(
        "--devices", metavar="NAME[,key=value]", help="kind of device, such as H100 or CPU (this one's)"
    )
    completion.completed_by(devices, completion.devices)
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument(
        "--pictures", type=int, metavar="N", help="pictures of each sample (1, if the policy's model takes any)"
    )
    parser.add_argument("--write", choices=["slurm", "kuberay"], help="write a launcher for the plan instead")
    parser.add_argument("-o", "--output", metavar="FILE", help="file for the launcher (default: standard output)")


def _plan(options: argparse.Namespace) -> int:
    name, folder = locate(options.config, options.config_path)
    choices = {key: getattr(options, key) for key in ("devices", "json", "write", "output", "pictures")}
    return extra("plan").plan(name, folder, options.overrides, **choices)


def _add_doctor(commands: Any) -> None:
    """The command that checks machines."""
    text = "check this machine or a Ray cluster: versions, GPUs, limits, disks, clocks; exit code 1 if a run would fail"
    parser = add_command(commands, "doctor", text, _doctor)
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="check every machine of this running Ray cluster; or auto"
    )
    parser.add_argument("--model", metavar="FOLDER", help="also check this model's or tokenizer's chat template")
    _add_trust(parser, "--model")
    parser.add_argument("--output-dir", default="./output", metavar="FOLDER", help="folder of the runs (%(default)s)")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def _doctor(options: argparse.Namespace) -> int:
    trusts = options.trust_remote_code
    return extra("doctor").doctor(
        options.address, options.model, Path(options.output_dir), json=options.json, trusts=trusts
    )


def _add_import(commands: Any) -> None:
    """The command that reads other systems' configurations."""
    text = "convert a configuration or launch script of another system"
    parser = add_command(commands, "import", text, _import)
    parser.add_argument("system", choices=list(SYSTEMS), help="the system that it is for")
    parser.add_argument("words", nargs="+", metavar="FILE|key=value", help="its files, and overrides of its keys")
    parser.add_argument("-o", "--output", help="file to write (default: standard output)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="variables",
        metavar="NAME=value",
        help="set a variable that a launch script reads; repeatable",
    )
    parser.add_argument("--all", action="store_true", dest="everything", help="also list the keys that did not change")


def _import(options: argparse.Namespace) -> int:
    sys.path.insert(0, os.getcwd())  # a user's own rewards
    return extra("importers").run(options.system, options.words, options.output, options.variables, options.everything)


def _add_env_check(commands: Any) -> None:
    """The command that checks an environment; ``check_env`` has the defaults."""
    text = "check an environment: seeds, resets, rewards, tricks, threads, processes"
    parser = add_command(commands, "check", text, _check_env)
    name = parser.add_argument("env_type", help="an environment of `roll env list`, or package.module:Class")
    completion.completed_by(name, completion.environments)
    for option, kind, about in (
        ("--episodes", int, "episodes of each check (6)"),
        ("--max-steps", int, "most steps of an episode (32)"),
        ("--timeout", float, "time limit of a call, in seconds (30)"),
        ("--slow", float, "seconds from which a call counts as slow (1)"),
        ("--max-chars", int, "most characters of an observation (16384)"),
        ("--judge-says", str, "the judge's reply to environments that ask one (Score: 1)"),
    ):
        parser.add_argument(option, type=kind, default=argparse.SUPPRESS, help=about)
    parser.add_argument("--answer", action="append", default=[], dest="answers", help="a response to try; repeatable")
    parser.add_argument(
        "--allow", action="append", default=[], metavar="FINDING", help="accept this finding; repeatable"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="env_config")


def _check_env(options: argparse.Namespace) -> int:
    names = ("episodes", "max_steps", "timeout", "slow", "max_chars", "judge_says")
    effort = {name: getattr(options, name) for name in names if hasattr(options, name)}
    return extra("env_check").check(
        options.env_type, options.overrides, answers=options.answers, allow=options.allow, **effort
    )


def _add_template_check(commands: Any) -> None:
    text = (
        "check what a chat template rewrites and drops, and how it writes tool calls; exit code 1 if there are problems"
    )
    parser = add_command(commands, "check", text, _check_template)
    parser.add_argument("folder", metavar="FOLDER", help="folder of a tokenizer or model")
    parser.add_argument(
        "--template", default="native", help="a name, a Jinja file or Jinja text, as in data_args.template"
    )
    _add_trust(parser, "FOLDER")


def _add_trust(parser: argparse.ArgumentParser, whose: str) -> None:
    text = f"run Python files that come with {whose}, in this process (default: off)"
    parser.add_argument("--trust-remote-code", action="store_true", help=text)


def _check_template(options: argparse.Namespace) -> int:
    from roll.agentic.tools.dialects import parsers
    from roll.data.template_check import check_template
    from roll.models.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(options.folder, alone=True, trust_remote_code=options.trust_remote_code)
        report = check_template(tokenizer, options.template, parsers())
    except ValueError as error:
        sys.stderr.write(f"roll template check: {error}\n")
        return EXIT_USAGE
    sys.stdout.write(report.page())
    return 1 if report.problems else 0


def _perform(options: argparse.Namespace) -> int:
    name, folder = locate(options.config, options.config_path)
    return perform(options.action, name, folder, options.overrides, started=options.started)


def _list_configs(_: argparse.Namespace) -> int:
    rows = [(name, pipeline, comment) for name, (pipeline, comment) in configurations(SHIPPED).items()]
    groups = [f"{group}={'|'.join(choices)}" for group, choices in config_groups(SHIPPED).items()]
    sys.stdout.write(f"{_table(rows)}\nwith each of them: {' '.join(groups)}\nin {SHIPPED}\n")
    return 0


def _list_envs(_: argparse.Namespace) -> int:
    import roll.agentic.env as envs

    modules = {name: sys.modules[envs.path_of(name).partition(":")[0]] for name in envs.registered()}
    sys.stdout.write(_table([(name, _first_line(module)) for name, module in modules.items()]))
    return 0


def _list_verifiers(_: argparse.Namespace) -> int:
    from roll.rewards import VERIFIERS

    sys.stdout.write(_table([(name, _first_line(VERIFIERS.get(name))) for name in VERIFIERS.names()]))
    return 0


def _first_line(thing: object) -> str:
    return (thing.__doc__ or "").strip().partition("\n")[0]


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, a line per row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
