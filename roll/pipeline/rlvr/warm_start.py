"""The warm start of the tiny model on a file of demonstrations (see ``roll.pipeline.warm_start``)."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from roll.configs.data import DataArguments
from roll.configs.rlvr import RLVRConfig
from roll.data.batch import Batch
from roll.data.conversations import load_conversations
from roll.data.prompts import PromptDataset
from roll.data.renderer import ChatRenderer
from roll.pipeline.prompt_roles import PromptRoles
from roll.rollout.metrics import rollout_metrics
from roll.utils.seeding import derive_seed


def recipe(config: RLVRConfig) -> dict[str, Any]:
    """What the warm start depends on beside the model: its keys and the demonstrations themselves."""
    content = Path(config.warm_start.file_name).expanduser().read_bytes()
    return {
        "warm_start": config.warm_start.model_dump(mode="json"),
        "demonstrations": hashlib.blake2b(content, digest_size=8).hexdigest(),
    }


class FileTeacher:
    """Demonstrates with a file's answers, and measures on the training prompts (a ``Teacher``).

    Args:
        config: the run's configuration.
        renderer: renders the demonstrations as the rollouts render their prompts.
        prompts: the rollout workers, being set up.
        train: the training prompts.
    """

    min_valid = 0.0
    """The right format is part of a right answer."""

    def __init__(self, config: RLVRConfig, renderer: ChatRenderer, prompts: PromptRoles, train: PromptDataset) -> None:
        self.settings = config.warm_start
        self._renderer = renderer
        self._max_tokens = config.sequence_length
        self._prompts = prompts
        seed = derive_seed(config.seed, "warm start measurement")
        self._measuring = prompts.measuring(train, self.settings.eval_episodes, seed)

    def demonstrations(self) -> Batch:
        """The file's rows: the response and the end of the turn have loss mask 1.

        Raises:
            DataError: rows without the two columns, or longer than ``sequence_length``.
        """
        self._prompts.wait_ready()
        settings = self.settings
        columns = DataArguments(file_name=settings.file_name, prompt=settings.prompt, response=settings.response)
        return load_conversations(columns, renderer=self._renderer, max_tokens=self._max_tokens).batch

    def measure(self, num_episodes: int) -> tuple[float, float]:
        groups = self._measuring.collect(range(num_episodes), num_episodes).groups
        metrics = rollout_metrics(groups, "measured")
        return metrics["measured/success"], metrics.get("measured/valid_rate", 0.0)
