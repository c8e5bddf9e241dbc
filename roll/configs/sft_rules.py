"""Rules between the sections of an SFT configuration (see ``roll.configs.rules``)."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.offline import OfflineConfig
from roll.configs.offline_rules import OFFLINE_RULES, datasets
from roll.configs.problems import ConfigProblem
from roll.configs.rules import Rule


def check_responses(config: OfflineConfig) -> Iterator[ConfigProblem]:
    """The column of the answer to imitate is known."""
    for path, data in datasets(config):
        if data.has_dataset and data.prompt is not None and data.response is None:
            yield ConfigProblem(f"{path}.response", None, "the column of the answer to imitate")


SFT_RULES: tuple[Rule, ...] = (*OFFLINE_RULES, check_responses)
