"""The command line: configuration in, exit code out."""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from roll.configs.problems import ConfigErrors, show

if TYPE_CHECKING:
    from roll.configs.rl import RLConfig

DEFAULT_CONFIG_PATH = Path(__file__).resolve().parents[2] / "examples" / "config"
EXIT_CONFIG = 2
LINE_WIDTH = 110

EXAMPLES = """\
examples:
  %(prog)s --config_name CONFIG
  %(prog)s --config_name CONFIG max_steps=5 actor_train.training_args.learning_rate=1e-4
  %(prog)s --config_name CONFIG 'actor_train.device_mapping=list(range(0,4))' --print-config
  %(prog)s --config_name mine --config_path ~/configs --validate-only
"""


@dataclass(frozen=True)
class Program:
    """One start script: which pipeline it runs. Classes and functions by path, so that none is imported too early."""

    schema: str
    """``module:class`` of its configuration."""
    run: str
    """``module:function`` that runs a checked configuration and returns the exit code."""
    description: str
    default: str
    """Name of the configuration that is run when none is named."""
    prefix: str
    """What the names of its configurations begin with."""


AGENTIC = Program(
    "roll.configs.agentic:AgenticConfig",
    "roll.pipeline.agentic.launch:run_agentic",
    "Trains a language model in text environments.",
    "agentic_sokoban",
    "agentic_",
)
RLVR = Program(
    "roll.configs.rlvr:RLVRConfig",
    "roll.pipeline.rlvr.launch:run_rlvr",
    "Trains a language model on prompts whose answers can be verified.",
    "rlvr_math",
    "rlvr_",
)


def main(argv: Sequence[str] | None = None, program: Program = AGENTIC) -> int:
    """Runs a pipeline.

    Args:
        argv: the command line; that of the process, if not given.
        program: ``AGENTIC`` or ``RLVR``.

    Returns:
        0 when the run (or the check) succeeded, 2 for a wrong configuration, otherwise the pipeline's own code.
    """
    started = time.time()
    options = _parser(program).parse_intermixed_args(argv)
    # Imported here: --help answers at once, and neither torch nor Ray is loaded for a configuration that is wrong.
    from roll.configs.loader import load_config
    from roll.preflight.choices import CHECKS
    from roll.preflight.machine import check_machine
    from roll.utils.registry import import_path

    schema = cast("type[RLConfig]", import_path(program.schema))
    folder = Path(options.config_path).expanduser()
    try:
        config = load_config(schema, options.config_name, folder, options.overrides, CHECKS[schema])
    except ConfigErrors as errors:
        sys.stderr.write(report(errors, options.config_name))
        return EXIT_CONFIG
    if options.print_config:
        sys.stdout.write(_yaml(config))
        return 0
    if options.validate_only:
        sys.stdout.write("\n".join([f"{options.config_name}: valid", *_summary(config)]) + "\n")
        return 0
    if missing := check_machine(config):
        sys.stderr.write(report(ConfigErrors(missing), options.config_name))
        return EXIT_CONFIG
    run = cast("Callable[[RLConfig, float], int]", import_path(program.run))
    return run(config, started)


def report(errors: ConfigErrors, config_name: str) -> str:
    """All problems as text for a terminal, one paragraph each."""
    count = len(errors.problems)
    lines = [f"{config_name}: {count} {'problem' if count == 1 else 'problems'} in the configuration", ""]
    for number, problem in enumerate(errors.problems, 1):
        lines.append(f"{number:3}. {problem.path or 'configuration'}")
        lines += _wrapped("seen", show(problem.seen))
        lines += _wrapped("expected", problem.expected)
        if problem.hint:
            lines += _wrapped("hint", problem.hint)
    return "\n".join(lines) + "\n"


def _wrapped(label: str, text: str) -> list[str]:
    first = f"     {label:<9}"
    return textwrap.wrap(text, LINE_WIDTH, initial_indent=first, subsequent_indent=" " * len(first)) or [first]


def _parser(program: Program) -> argparse.ArgumentParser:
    names = ", ".join(sorted(path.stem for path in DEFAULT_CONFIG_PATH.glob(f"{program.prefix}*.yaml")))
    examples = EXAMPLES.replace("CONFIG", program.default)
    parser = argparse.ArgumentParser(
        description=f"{program.description} Every key: docs/configuration.md.",
        epilog=f"{examples}\nconfigurations in {DEFAULT_CONFIG_PATH}:\n  {names}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config_name", "--config-name", default=program.default, help="default: %(default)s")
    parser.add_argument(
        "--config_path", "--config-path", default=str(DEFAULT_CONFIG_PATH), help="folder of configurations"
    )
    parser.add_argument("--print-config", action="store_true", help="show the resolved configuration and stop")
    parser.add_argument("--validate-only", action="store_true", help="check everything, show the arithmetic and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the configuration")
    return parser


def _yaml(config: RLConfig) -> str:
    """The resolved configuration, secrets removed; it can be read back with ``--config_path``."""
    import yaml

    from roll.tracking.redact import redact

    return yaml.safe_dump(redact(config.model_dump(mode="json")), sort_keys=False, allow_unicode=True, width=LINE_WIDTH)


def _summary(config: RLConfig) -> list[str]:
    """What the configuration amounts to: batch arithmetic and placement."""
    from roll.configs.batches import describe_batches
    from roll.preflight.choices import describe_files, describe_placement

    return [*describe_batches(config), *describe_files(config), *describe_placement(config)]
