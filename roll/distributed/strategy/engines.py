"""Engines are optional packages: which extra installs one, and what is wrong with the options it is given."""

from __future__ import annotations

import difflib
import importlib.util
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from roll.configs.obsolete import ENGINE_NAMES
from roll.configs.problems import ConfigProblem
from roll.distributed.strategy.arguments import type_problems


def ignore_renamed_collectives() -> None:
    """Silences PyTorch's warning about two old names, which are called by engines and not by who reads the warning."""
    for old in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        warnings.filterwarnings("ignore", f"`torch.distributed.{old}` is deprecated", FutureWarning)


@dataclass(frozen=True)
class EnginePackage:
    """What an engine needs to be installed."""

    module: str
    """To import, e.g. ``vllm``."""
    extra: str
    """Of this package, which installs it."""

    @property
    def installed(self) -> bool:
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # of the package that it is a part of
            return False


PACKAGES = {
    "deepspeed_train": EnginePackage("deepspeed", "deepspeed"),
    "deepspeed_infer": EnginePackage("deepspeed", "deepspeed"),
    "megatron_train": EnginePackage("megatron.core", "megatron"),
    "megatron_infer": EnginePackage("megatron.core", "megatron"),
    "vllm": EnginePackage("vllm", "vllm"),
    "sglang": EnginePackage("sglang", "sglang"),
}
"""By the name of the strategy; those that are not here need nothing but torch and Transformers."""


class MissingEngineError(ImportError):
    """The package of a strategy's engine is not installed."""


def require_engine(module: str, *, extra: str, strategy: str) -> None:
    """Checks that an engine can be imported, without importing it.

    Args:
        module: top-level name to import, e.g. ``vllm``.
        extra: the extra of this package that installs it.
        strategy: ``strategy_name`` of the role that needs it, for the message.

    Raises:
        MissingEngineError: the package is not there; says which extra to install.
    """
    if not EnginePackage(module, extra).installed:
        raise MissingEngineError(
            f"strategy {strategy}: the package {module!r} is not installed; expected: pip install 'roll-rl[{extra}]'",
            name=module,
        )


def option_problems(
    options: Mapping[str, Any],
    *,
    typed: Collection[str],
    known: Mapping[str, str],
    elsewhere: Mapping[str, str],
    arguments: str,
) -> list[ConfigProblem]:
    """Wrong keys and values of a ``strategy_config`` among those that an engine's constructor gets.

    Args:
        options: the whole section.
        typed: keys that its own class checks.
        known: arguments of the constructor and their annotations; empty when the engine is not installed.
        elsewhere: arguments that are set by other keys, and by which; also what other engines call an option.
        arguments: what they are called, for messages, e.g. ``vLLM's AsyncEngineArgs``.
    """
    extra = [key for key in options if key not in typed]
    problems = [
        ConfigProblem(key, options[key], here if here.startswith("no such key") else f"{here} instead")
        for key in extra
        if (here := elsewhere.get(key))
    ]
    for key in extra if known else ():
        if key not in known and key not in elsewhere:
            hint = advice(key, {*known, *typed} - {*elsewhere})
            problems.append(ConfigProblem(key, options[key], f"an argument of {arguments}", hint))
    return problems + type_problems({key: options[key] for key in extra if key not in elsewhere}, known)


def advice(key: str, known: Collection[str]) -> str:
    """The hint for a key that an engine does not have: where it belongs, or what it may be meant for."""
    if key in ENGINE_NAMES:
        return ENGINE_NAMES[key]
    near = difflib.get_close_matches(key, sorted(known), n=1)
    return f"did you mean {near[0]}?" if near else ""
