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
    AlgorithmConfig,
    KlPenalty,
    LossAggMode,
    OverlongBufferConfig,
    PfPpoConfig,
    RewardNormalizationConfig,
)
from roll.configs.correction import (
    AggregationLevel,
    IsWeightConfig,
    TrainInferCorrectionConfig,
    TrainInferFilterConfig,
)
from roll.configs.distill import DistillLossConfig
from roll.configs.divergence import DivergenceConfig, KdObjective
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
