"""SGLang's installation, and what its processes are told. Imports neither SGLang nor torch."""

from __future__ import annotations

from roll.configs.engines.sglang import interpreter_problem
from roll.distributed.strategy import MissingEngineError, require_engine

SCORING = "ROLL_SGLANG_SCORING"
"""Environment variable of the engine's processes: the fields of a ``PromptScoring`` as JSON."""


def require_sglang(python: str | None) -> None:
    """Checks that SGLang is installed for an interpreter (``None``: this one), without starting it.

    Raises:
        MissingEngineError: it is not, or there is no such interpreter.
    """
    if python is None:
        require_engine("sglang", extra="sglang", strategy="sglang")
    elif problem := interpreter_problem(python):
        raise MissingEngineError(str(problem.under("strategy_config")))
