"""The command line: configuration in, exit code out."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from roll import __version__
from roll.configs import SHIPPED
from roll.pipeline.programs import (
    AGENTIC,
    DISTILL,
    DPO,
    PROGRAMS,
    REWARD_MODEL,
    RLVR,
    SFT,
    Program,
    configurations,
    key_names,
    program_of,
)
from roll.utils.start import quick_start

if TYPE_CHECKING:
    from roll.configs.compose import Composed
    from roll.configs.pipeline import PipelineConfig
    from roll.configs.problems import ConfigErrors

__all__ = ["AGENTIC", "DISTILL", "DPO", "REWARD_MODEL", "RLVR", "SFT", "main", "perform", "refuse", "report"]

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED, EXIT_INTERRUPTED, EXIT_UNREAD = 0, 1, 2, 3, 130, 141
"""Of every command; 2 is for a wrong command line, configuration or file, 3 for a run that one of its watches stopped,
141 for output that nobody reads."""
_NO_HOME = "Could not determine home directory."
"""Words of ``Path.expanduser`` about a user who is not known; a configuration's own paths are told with their keys."""
LINE_WIDTH = 110
_FOREIGN = 3
"""Keys of another pipeline that make a configuration its own, where none is of the pipeline that was asked for."""

EXAMPLES = """\
examples:
  %(prog)s --config_name CONFIG
  %(prog)s --config_name CONFIG max_steps=5 actor_train.training_args.learning_rate=1e-4
  %(prog)s --config_name CONFIG 'actor_train.device_mapping=[0]' --print-config
  %(prog)s --config_name CONFIG train=megatron --validate-only
  %(prog)s --config_name mine --config_path ~/configs --validate-only
"""

Action = Literal["train", "validate", "print"]


def main(argv: Sequence[str] | None = None, program: Program = AGENTIC) -> int:
    """Runs a pipeline, as the start scripts do.

    Returns:
        0 when the run (or the check) succeeded, 2 for a wrong configuration and for an empty command line, otherwise
        the pipeline's own code.
    """
    started = time.time()
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser(program)
    if not argv:
        sys.stderr.write(parser.format_help())
        return EXIT_USAGE
    options, unknown = parser.parse_known_intermixed_args(argv)
    refuse(parser, unknown)
    action: Action = "print" if options.print_config else "validate" if options.validate_only else "train"
    folder = Path(os.path.expanduser(options.config_path))
    return finished(lambda: perform(action, options.config_name, folder, options.overrides, program, started))


def finished(command: Callable[[], int]) -> int:
    """Exit code of a command, which Ctrl-C and a reader who has left (``| head``) end without a traceback."""
    quick_start()
    try:
        code = command()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except RuntimeError as error:
        if str(error) != _NO_HOME:
            raise
        sys.stderr.write("a path begins with ~ and a name that no user of this machine has\n")
        return EXIT_USAGE
    except BrokenPipeError:
        try:
            sys.stdout.write("\n")
            sys.stdout.flush()
        except BrokenPipeError:  # it is this pipe; what is left in its buffer goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_UNREAD
        raise


def perform(
    action: Action,
    config_name: str,
    folder: Path,
    overrides: Sequence[str] = (),
    program: Program | None = None,
    started: float | None = None,
) -> int:
    """Runs, checks or shows a configuration.

    Args:
        action: ``train`` runs it, ``validate`` shows what it amounts to, ``print`` shows it resolved.
        overrides: ``key=value`` texts.
        program: its pipeline; the one whose sections it has, if not given.
        started: ``time.time()`` at launch; now, if not given.

    Returns:
        The exit code, see ``main``.
    """
    # Imported here: --help answers at once, and neither torch nor Ray is loaded for a configuration that is wrong.
    from roll.configs.problems import ConfigErrors
    from roll.preflight.inputs import check_inputs
    from roll.preflight.machine import check_machine
    from roll.utils.registry import extra, import_path

    started = started or time.time()
    file = folder / (config_name if config_name.endswith(".sh") else f"{config_name.removesuffix('.yaml')}.yaml")
    importers = extra("importers")
    if importers.system_of(file) not in (None, "roll"):
        sys.stderr.write(f"{config_name}: {importers.command_for(file)}\n")
        return EXIT_USAGE
    try:
        config, program = read_config(config_name, folder, overrides, program)
        lines, problems = check_inputs(config) if action == "validate" else ([], [])
        if action == "train":
            problems = list(check_machine(config))
        if problems:
            raise ConfigErrors(problems)
    except ConfigErrors as errors:
        sys.stderr.write(report(errors, config_name))
        if (advice := importers.command_for(file)) is not None:  # of ROLL, most of whose keys are ours
            sys.stderr.write(f"{config_name}: {advice}\n")
        return EXIT_USAGE
    if action == "print":
        sys.stdout.write(_yaml(config))
        return 0
    if action == "validate":
        sys.stdout.write("\n".join([f"{config_name}: valid", *_summary(config, lines)]) + "\n")
        return 0
    run = cast("Callable[[PipelineConfig, float], int]", import_path(program.run))
    return run(config, started)


def read_config(
    config_name: str, folder: Path, overrides: Sequence[str] = (), program: Program | None = None
) -> tuple[PipelineConfig, Program]:
    """A configuration that has been checked, and its pipeline; arguments as ``perform``.

    Raises:
        ConfigErrors: everything that is wrong with it.
    """
    from roll.configs.compose import compose_config
    from roll.configs.loader import load_composed
    from roll.preflight.choices import CHECKS
    from roll.utils.registry import import_path

    composed = compose_config(config_name, folder, overrides)
    program = _program_of(composed, program)
    schema = cast("type[PipelineConfig]", import_path(program.schema))
    return load_composed(schema, config_name, composed, CHECKS[schema]), program


def _program_of(composed: Composed, asked: Program | None) -> Program:
    """The pipeline of a configuration: the one that is asked for, unless the configuration is another's."""
    from roll.configs.problems import NOTHING, ConfigErrors, ConfigProblem, Words
    from roll.utils.registry import import_path

    name = program_of(composed.values)
    if name is None:
        if asked is not None:
            return asked
        sections = "; ".join(f"{', '.join(each.sections)} ({pipeline})" for pipeline, each in PROGRAMS.items())
        problem = ConfigProblem("", NOTHING, f"a section that only one pipeline has: {sections}")
        raise ConfigErrors([*composed.problems, problem])
    found = PROGRAMS[name]
    known, its = (
        set(cast("type[PipelineConfig]", import_path(each.schema)).model_fields) for each in (asked or found, found)
    )
    foreign = [key for key in composed.values if key in its - known]
    own = [key for key in composed.values if key in known - its]
    # A section that several pipelines read (rewards) says nothing alone, and one key may be a mistake.
    if not set(foreign) & set(found.sections) and (len(foreign) < _FOREIGN or own):
        return asked or found
    hint = f"it is run by examples/{found.script}, or by `roll train`, which finds the pipeline itself"
    expected = f"a configuration for {asked.script if asked else ''}; this one is {name}'s"
    raise ConfigErrors([*composed.problems, ConfigProblem("", Words(_few(foreign)), expected, hint)])


def _few(keys: Sequence[str], shown: int = 6) -> str:
    return ", ".join(keys[:shown]) + (f" and {len(keys) - shown} more" if len(keys) > shown else "")


def locate(config: str, folder: str) -> tuple[str, Path]:
    """Name and folder of a configuration.

    Args:
        config: ``./mine.yaml`` is a file, ``mine`` a name.
    """
    file = Path(os.path.expanduser(config))
    if file.suffix in (".yaml", ".yml") or (os.sep in config and file.name):
        return file.stem if file.suffix == ".yaml" else file.name, file.parent
    return config, Path(os.path.expanduser(folder))


def refuse(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Ends with code 2 where words of the command line are left over; one may be a key, given as ``--max_steps=3``."""
    if not words:
        return
    key, equals, value = words[0].lstrip("-").partition("=")
    hint = f"; a key of the configuration is given as {key}={value if equals else '…'}" if key in key_names() else ""
    parser.error(f"unrecognized arguments: {' '.join(words)}{hint}")


def report(errors: ConfigErrors, config_name: str) -> str:
    """All problems as text for a terminal, one paragraph each."""
    from roll.configs.problems import grouped, show

    count = len(errors.problems)
    lines = [f"{config_name}: {count} {'problem' if count == 1 else 'problems'} in the configuration", ""]
    for number, (problem, more) in enumerate(grouped(errors.problems), 1):
        lines.append(f"{number:3}. {problem.path or 'configuration'}")
        lines += _wrapped("got", show(problem.got))
        lines += _wrapped("expected", problem.expected)
        if problem.hint:
            lines += _wrapped("hint", problem.hint)
        if more:
            lines += _wrapped("", more)
    return "\n".join(lines) + "\n"


def _wrapped(label: str, text: str) -> list[str]:
    import textwrap

    first = f"     {label:<9}"
    return textwrap.wrap(text, LINE_WIDTH, initial_indent=first, subsequent_indent=" " * len(first)) or [first]


def _parser(program: Program) -> argparse.ArgumentParser:
    own = [name for name, (of, _) in configurations(SHIPPED).items() if PROGRAMS[of] == program]
    examples = EXAMPLES.replace("CONFIG", program.default)
    parser = argparse.ArgumentParser(
        description=f"{program.description} Every key: docs/configuration.md.",
        epilog=f"{examples}\nconfigurations in {SHIPPED}:\n  {', '.join(own)}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config_name", "--config-name", default=program.default, help="default: %(default)s")
    parser.add_argument("--config_path", "--config-path", default=str(SHIPPED), help="folder of configurations")
    parser.add_argument("--print-config", action="store_true", help="show the resolved configuration and stop")
    parser.add_argument("--validate-only", action="store_true", help="check everything, show the arithmetic and stop")
    parser.add_argument("--version", action="version", version=f"roll {__version__}")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the configuration")
    return parser


def _yaml(config: PipelineConfig) -> str:
    """The resolved configuration, secrets removed; it can be read back with ``--config_path``."""
    import yaml

    from roll.tracking.redact import redact

    return yaml.safe_dump(redact(config.model_dump(mode="json")), sort_keys=False, allow_unicode=True, width=LINE_WIDTH)


def _summary(config: PipelineConfig, inputs: Sequence[str]) -> list[str]:
    """Summary of the configuration: batch arithmetic, data and models, placement."""
    from roll.configs.batches import describe_batches
    from roll.preflight.choices import describe_options, describe_placement
    from roll.preflight.models import describe_adapter

    return [
        *describe_batches(config),
        *inputs,
        *describe_adapter(config),
        *describe_options(config),
        *describe_placement(config),
    ]
