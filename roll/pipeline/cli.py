"""The command line: configuration in, exit code out."""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from roll.configs.problems import ConfigErrors, show

if TYPE_CHECKING:
    from roll.configs.agentic import AgenticConfig

DEFAULT_CONFIG_PATH = Path(__file__).resolve().parents[2] / "examples" / "config"
EXIT_CONFIG = 2
LINE_WIDTH = 110

EXAMPLES = """\
examples:
  %(prog)s --config_name agentic_sokoban
  %(prog)s --config_name agentic_sokoban max_steps=5 actor_train.training_args.learning_rate=1e-4
  %(prog)s --config_name agentic_sokoban 'actor_train.device_mapping=list(range(0,4))' --print-config
  %(prog)s --config_name mine --config_path ~/configs --validate-only
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the agentic pipeline.

    Returns:
        0 when the run (or the check) succeeded, 2 for a wrong configuration, otherwise the pipeline's own code.
    """
    started = time.time()
    parser = _parser()
    options = parser.parse_intermixed_args(argv)
    # Imported here: --help answers at once, and neither torch nor Ray is loaded for a configuration that is wrong.
    from roll.configs.loader import load_config
    from roll.pipeline.checks import CHECKS, missing_engines

    try:
        config = load_config(options.config_name, Path(options.config_path).expanduser(), options.overrides, CHECKS)
    except ConfigErrors as errors:
        sys.stderr.write(report(errors, options.config_name))
        return EXIT_CONFIG
    if options.print_config:
        sys.stdout.write(_yaml(config))
        return 0
    if options.validate_only:
        sys.stdout.write("\n".join([f"{options.config_name}: valid", *_summary(config)]) + "\n")
        return 0
    if missing := missing_engines(config):
        sys.stderr.write(report(ConfigErrors(missing), options.config_name))
        return EXIT_CONFIG
    from roll.pipeline.agentic.launch import run_agentic

    return run_agentic(config, started)


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


def _parser() -> argparse.ArgumentParser:
    names = ", ".join(sorted(path.stem for path in DEFAULT_CONFIG_PATH.glob("agentic_*.yaml")))
    parser = argparse.ArgumentParser(
        description="Trains a language model in text environments. Every key: docs/configuration.md.",
        epilog=f"{EXAMPLES}\nconfigurations in {DEFAULT_CONFIG_PATH}:\n  {names}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config_name", "--config-name", default="agentic_sokoban", help="default: %(default)s")
    parser.add_argument(
        "--config_path", "--config-path", default=str(DEFAULT_CONFIG_PATH), help="folder of configurations"
    )
    parser.add_argument("--print-config", action="store_true", help="show the resolved configuration and stop")
    parser.add_argument("--validate-only", action="store_true", help="check everything, show the arithmetic and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the configuration")
    return parser


def _yaml(config: AgenticConfig) -> str:
    """The resolved configuration, secrets removed; it can be read back with ``--config_path``."""
    import yaml

    from roll.tracking.redact import redact

    return yaml.safe_dump(redact(config.model_dump(mode="json")), sort_keys=False, allow_unicode=True, width=LINE_WIDTH)


def _summary(config: AgenticConfig) -> list[str]:
    """What the configuration amounts to: batch arithmetic and placement."""
    from roll.configs.batches import describe_batches
    from roll.pipeline.checks import describe_placement

    return [*describe_batches(config), *describe_placement(config)]
