"""docs/algorithms.md names every registered algorithm and every key of the section."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from roll.algorithms.advantages import ADVANTAGES
from roll.algorithms.policy_losses import POLICY_LOSSES
from roll.algorithms.preferences import PREFERENCE_LOSSES
from roll.algorithms.reward_models import REWARD_LOSSES
from roll.configs.algorithm import (
    AggregationLevel,
    AlgorithmConfig,
    IsWeightConfig,
    KlPenalty,
    OverlongBufferConfig,
    PfPpoConfig,
    RewardNormalizationConfig,
    TrainInferCorrectionConfig,
    TrainInferFilterConfig,
)
from roll.configs.distill import DistillLossConfig
from roll.configs.divergence import DivergenceConfig, KdObjective
from roll.configs.policy_loss import LossAggMode
from roll.configs.preference import PreferenceConfig, PreferenceLoss
from roll.configs.reward_training import RewardLossConfig
from roll.configs.teacher import OnPolicyDistillationConfig, OpdForm

DOCS = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
ELSEWHERE = {"ppo_epochs", "max_grad_norm", "l2", "critic_warmup", "enable_old_logprobs_recompute", "teacher_pretrain"}
"""Keys of the training loop and the optimizer, which state no formula."""


@pytest.mark.parametrize(
    "name",
    [
        *ADVANTAGES.names(),
        *POLICY_LOSSES.names(),
        *PREFERENCE_LOSSES.names(),
        *REWARD_LOSSES,
        *PreferenceLoss.__args__,  # type: ignore[attr-defined]
        *KdObjective.__args__,  # type: ignore[attr-defined]
        *OpdForm.__args__,  # type: ignore[attr-defined]
        *KlPenalty.__args__,  # type: ignore[attr-defined]
        *AggregationLevel.__args__,  # type: ignore[attr-defined]
        *PfPpoConfig.model_fields["reweight_method"].annotation.__args__,  # type: ignore[union-attr]
        *LossAggMode.__args__,  # type: ignore[attr-defined]
        *RewardNormalizationConfig.model_fields["method"].annotation.__args__,  # type: ignore[union-attr]
        *RewardNormalizationConfig.model_fields["grouping"].annotation.__args__,  # type: ignore[union-attr]
    ],
)
def test_registered_names_are_documented(name: str) -> None:
    assert f"`{name}`" in DOCS or f": {name}`" in DOCS


TABLES = {
    "#### Policy-gradient losses": POLICY_LOSSES.names(),
    "### Preferences": [*PREFERENCE_LOSSES.names(), *PreferenceLoss.__args__],  # type: ignore[attr-defined]
    "### Divergences from a teacher": KdObjective.__args__,  # type: ignore[attr-defined]
    "### Distillation": OpdForm.__args__,  # type: ignore[attr-defined]
    "### Reward models": REWARD_LOSSES,
}
"""The losses that the table under a heading has."""
SOURCE = re.compile(r"\b(19|20)\d\d\b|[Tt]he same")


def section(heading: str) -> str:
    """What stands under a heading, up to the next."""
    _, found, rest = f"\n{DOCS}".partition(f"\n{heading}\n")
    assert found, f"no heading {heading!r}"
    return re.split(r"\n#+ ", rest, maxsplit=1)[0]


@pytest.mark.parametrize(("heading", "name"), [(heading, name) for heading in TABLES for name in TABLES[heading]])
def test_a_loss_has_its_formula_and_its_paper(heading: str, name: str) -> None:
    rows = [row.strip("|").split(" | ") for row in section(heading).splitlines() if row.startswith("| `")]
    (cells,) = [cells for cells in rows if f"`{name}`" in cells[0]]
    assert "`" in "".join(cells[1:-1]), "a formula"
    assert SOURCE.search(cells[-1]), "a paper with its year"


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_an_estimator_has_its_formula_and_its_paper(name: str) -> None:
    (heading,) = re.findall(rf"^### .*`{name}`.*$", DOCS, re.MULTILINE)
    text = section(heading)
    assert "`" in text and SOURCE.search(text)


SECTIONS = (
    AlgorithmConfig,
    OverlongBufferConfig,
    PfPpoConfig,
    PreferenceConfig,
    DistillLossConfig,
    DivergenceConfig,
    OnPolicyDistillationConfig,
    RewardLossConfig,
    TrainInferCorrectionConfig,
    IsWeightConfig,
    TrainInferFilterConfig,
)


@pytest.mark.parametrize("key", sorted({key for section in SECTIONS for key in section.model_fields} - ELSEWHERE))
def test_keys_are_documented(key: str) -> None:
    assert re.search(rf"\b{key}\b", DOCS)
