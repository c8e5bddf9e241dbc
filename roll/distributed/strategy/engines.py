"""Help for strategies whose engines are optional packages."""

from __future__ import annotations

import warnings

from roll.configs.engines.card import EnginePackage


def ignore_renamed_collectives() -> None:
    """Silences PyTorch's warning about two old names, which are called by engines and not by who reads the warning."""
    for old in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        warnings.filterwarnings("ignore", f"`torch.distributed.{old}` is deprecated", FutureWarning)


class MissingEngineError(ImportError):
    """The package of a strategy's engine is not installed."""


def require_engine(module: str, *, extra: str, strategy: str) -> None:
    """Checks that an engine can be imported, without importing it.

    Raises:
        MissingEngineError: the package is not there; says which extra to install.
    """
    if not EnginePackage(module, extra).installed:
        raise MissingEngineError(
            f"strategy {strategy}: the package {module!r} is not installed; expected: pip install 'roll-rl[{extra}]'",
            name=module,
        )
