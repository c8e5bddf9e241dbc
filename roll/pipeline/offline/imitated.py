"""The data of the pipelines that learn from whole conversations."""

from __future__ import annotations

from roll.configs.data import DataArguments
from roll.configs.distill import DistillConfig
from roll.configs.offline import SFTConfig
from roll.data.conversations import Conversations, Scoring, load_conversations
from roll.data.renderer import ChatRenderer


def load_imitated(
    config: SFTConfig | DistillConfig, data: DataArguments, renderer: ChatRenderer, scoring: Scoring | None = None
) -> Conversations:
    """Reads conversations; what is learnt of them is as ``train_on`` and ``distill_on_prompt`` say.

    Raises:
        DataError: everything that is wrong in the files.
    """
    return load_conversations(
        data,
        renderer=renderer,
        max_tokens=config.sequence_length,
        overflow=config.sample_overflow,
        last_only=config.train_on == "last",
        whole=isinstance(config, DistillConfig) and config.distill_on_prompt,
        scoring=scoring,
        seed=config.seed,
    )
