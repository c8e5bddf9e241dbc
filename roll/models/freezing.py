"""Parts of a model by the beginnings of their names: those that take no gradient, or learn at a rate of their own."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from roll.models.heads import text_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class UnknownPartError(ValueError):
    """A prefix that no parameter of the model begins with, or prefixes that leave nothing to train."""

    def __init__(self, key: str, reason: str, expected: str) -> None:
        self.key, self.reason, self.expected = key, reason, expected
        super().__init__(f"{key}: {reason}, expected {expected}")


FREEZE, RATES = "model_args.freeze_module_prefix", "training_args.learning_rate_of"
"""The keys that name parts."""


def parts_of(model: PreTrainedModel, prefixes: Collection[str], key: str) -> dict[str, str]:
    """Names of the parameters below some prefixes, as a checkpoint of the language model has them, and by prefix.

    A prefix is a whole name of a module or parameter (``model.layers.1`` is not ``model.layers.10``); the longest
    that a name begins with counts. A tied parameter is below a prefix by each of its names. A trunk's names begin like
    those of the whole model.

    Args:
        model: a causal language model, or its trunk.
        key: of the configuration, for errors.

    Raises:
        UnknownPartError: a prefix without parameters.
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
                key,
                f"{prefix!r} is not a part of {type(model).__name__}",
                f"names of modules or parameters; the nearest: {', '.join(near)}",
            )
    found: dict[str, str] = {}
    for names in aliases.values():
        fitting = [prefix for prefix in prefixes if any(_begins(name, prefix) for name in names)]
        if fitting:
            found |= dict.fromkeys(names, max(fitting, key=len))
    return found


def frozen_parameters(model: PreTrainedModel, prefixes: Sequence[str], *, head: bool = False) -> frozenset[str]:
    """Names of the parameters below some prefixes (``parts_of``).

    Args:
        prefixes: what is frozen; nothing is without any.
        head: something on the trunk is trained whatever is frozen.

    Raises:
        UnknownPartError: a prefix without parameters, or none are left to train.
    """
    frozen = frozenset(parts_of(model, prefixes, FREEZE))
    if not head and all(whole_name(model, name) in frozen for name, _ in model.named_parameters()):
        reason = f"{', '.join(prefixes)} is all of {type(model).__name__}"
        raise UnknownPartError(FREEZE, reason, "something left to train")
    return frozen


def freeze(model: PreTrainedModel, prefixes: Sequence[str], *, head: bool = False) -> None:
    """Makes the parameters of ``frozen_parameters`` need no gradient. Arguments and errors as there."""
    frozen = frozen_parameters(model, prefixes, head=head)
    for name, parameter in model.named_parameters():
        if whole_name(model, name) in frozen:
            parameter.requires_grad_(False)


def own_rates(model: PreTrainedModel, rates: Mapping[str, float]) -> dict[str, float]:
    """Learning rates of parameters by name: those below a prefix of ``rates``.

    Raises:
        UnknownPartError: a prefix without parameters, or with none that is trained.
    """
    parts = parts_of(model, rates, RATES)
    trained = {whole_name(model, name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    if idle := sorted(rates.keys() - {parts[name] for name in parts.keys() & trained}):
        reason = f"no trained parameter of {type(model).__name__} would learn at the rate of {', '.join(idle)}"
        raise UnknownPartError(RATES, reason, "parts that are not frozen, and that longer names leave something of")
    return {name: rates[prefix] for name, prefix in parts.items()}


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


def freeze_unseen(model: PreTrainedModel) -> None:
    """Makes what stands behind the layer of a tower whose output is taken (``vision_feature_layer``) need no gradient.

    Pictures give it none, but weight decay would change it.
    """
    taken = getattr(model.config, "vision_feature_layer", None)
    if taken is None:
        return
    tower = model.base_model.get_submodule("vision_tower")
    layers = max((each for each in tower.modules() if isinstance(each, nn.ModuleList)), key=len)
    # Outputs are counted from that of the embeddings.
    ends = [index % (len(layers) + 1) for index in ([taken] if isinstance(taken, int) else taken)]
    behind = list(layers[max(ends) :])
    for part in tower.modules():
        children = list(part.children())
        place = next((n for n, child in enumerate(children) if any(each is layers for each in child.modules())), None)
        behind += [] if place is None or part is layers else children[place + 1 :]
    for module in behind:
        module.requires_grad_(False)


def whole_name(model: PreTrainedModel, name: str) -> str:
    """A parameter's name in the model with its output layer, of which this may be the trunk."""
    return f"{model.base_model_prefix}.{name}" if model.base_model is model else name


def _begins(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")
