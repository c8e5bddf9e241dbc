"""Parts of a model that take no gradient, by the beginnings of their names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from roll.models.heads import text_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class UnknownPartError(ValueError):
    """A prefix that no parameter of the model begins with, or prefixes that leave nothing to train."""

    def __init__(self, reason: str, expected: str) -> None:
        self.reason, self.expected = reason, expected
        super().__init__(f"model_args.freeze_module_prefix: {reason}, expected {expected}")


def frozen_parameters(model: PreTrainedModel, prefixes: Sequence[str], *, head: bool = False) -> frozenset[str]:
    """Names of the parameters below some prefixes, as a checkpoint of the language model has them.

    A prefix is a whole name of a module or parameter (``model.layers.1`` is not ``model.layers.10``). A tied parameter
    is frozen by each of its names. A trunk's names begin like those of the whole model.

    Args:
        model: a causal language model, or its trunk.
        prefixes: what is frozen; nothing is without any.
        head: something on the trunk is trained whatever is frozen.

    Raises:
        UnknownPartError: a prefix without parameters, or none are left to train.
    """
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(whole_name(model, name))
    known = [name for names in aliases.values() for name in names]
    for prefix in prefixes:
        if not any(_begins(name, prefix) for name in known):
            modules = sorted({name[:end] for name in known for end, sign in enumerate(name) if sign == "."})
            near = difflib.get_close_matches(prefix, modules, n=3, cutoff=0.5) or modules[:3]
            raise UnknownPartError(
                f"{prefix!r} is not a part of {type(model).__name__}",
                f"names of modules or parameters; the nearest: {', '.join(near)}",
            )
    frozen = [
        names for names in aliases.values() if any(_begins(name, prefix) for name in names for prefix in prefixes)
    ]
    if len(frozen) == len(aliases) and not head:
        raise UnknownPartError(f"{', '.join(prefixes)} is all of {type(model).__name__}", "something left to train")
    return frozenset(name for names in frozen for name in names)


def freeze(model: PreTrainedModel, prefixes: Sequence[str], *, head: bool = False) -> None:
    """Makes the parameters of ``frozen_parameters`` need no gradient. Arguments and errors as there."""
    frozen = frozen_parameters(model, prefixes, head=head)
    for name, parameter in model.named_parameters():
        if whole_name(model, name) in frozen:
            parameter.requires_grad_(False)


def freeze_towers(model: PreTrainedModel) -> None:
    """Makes what is no part of the language model need no gradient, such as a vision tower.

    Text gives it none, but weight decay would change it.
    """
    if model.config.get_text_config() is model.config:
        return
    own = {id(parameter) for module in text_modules(model) for parameter in module.parameters(recurse=False)}
    for parameter in model.parameters():
        if id(parameter) not in own:
            parameter.requires_grad_(False)


def whole_name(model: PreTrainedModel, name: str) -> str:
    """A parameter's name in the model with its output layer, of which this may be the trunk."""
    return f"{model.base_model_prefix}.{name}" if model.base_model is model else name


def _begins(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")
