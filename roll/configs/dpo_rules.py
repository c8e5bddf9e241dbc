"""Rules between the sections of a configuration of preferences (see ``roll.configs.rules``)."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.dpo import DPOConfig
from roll.configs.offline_rules import OFFLINE_RULES
from roll.configs.preference import PREFERENCE_LOSSES
from roll.configs.problems import NOTHING, ConfigProblem
from roll.configs.rules import Rule


def check_reference(config: DPOConfig) -> Iterator[ConfigProblem]:
    """The reference is there where the loss asks for it, in one form, and nowhere else."""
    loss, lora = config.preference_loss, ("actor_train.model_args.lora_target",)
    if not config.uses_reference:
        expected = f"{{}} with {loss}, which compares the policy with no reference"
        if config.reference is not None:
            words = expected.format("no section")
            yield ConfigProblem("reference", "a section", words, involves=("preference_loss",))
        if config.precompute_reference:
            words = expected.format("false")
            yield ConfigProblem("precompute_reference", True, words, involves=("preference_loss",))
    elif config.uses_lora and config.reference is not None:
        expected = "no section: with lora_target the reference is the policy without its adapter"
        yield ConfigProblem("reference", "a section", expected, involves=lora)
    elif config.reference is None and not config.uses_lora and not config.precompute_reference:
        expected = f"a section with a scoring strategy, or precompute_reference: true, with {loss}"
        involved = ("preference_loss", "precompute_reference", *lora)
        yield ConfigProblem("reference", NOTHING, expected, involves=involved)
    if config.reference_dir is not None and not config.precompute_reference:
        expected = "null, or precompute_reference: true, whose folder it is"
        yield ConfigProblem("reference_dir", config.reference_dir, expected, involves=("precompute_reference",))


def check_columns(config: DPOConfig) -> Iterator[ConfigProblem]:
    """No column is named that the loss does not read, and a pair is of two."""
    columns, loss = config.preferences, config.preference_loss
    for key in columns.without(PREFERENCE_LOSSES[loss].columns):
        yield config.problem(f"preferences.{key}", f"nothing: {loss} does not read it", "preference_loss")
    if config.in_pairs and columns.chosen == columns.rejected:
        expected = "another column than preferences.chosen"
        yield ConfigProblem("preferences.rejected", columns.rejected, expected, involves=("preferences.chosen",))


DPO_RULES: tuple[Rule, ...] = (*OFFLINE_RULES, check_reference, check_columns)
