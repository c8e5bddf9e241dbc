"""The warm start of the tiny model on a file of demonstrations (see ``roll.pipeline.warm_start``)."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roll.configs.rlvr import RLVRConfig
from roll.data.batch import Batch
from roll.data.prompt_files import DataError, Problems, read_rows
from roll.data.prompts import PromptDataset
from roll.data.renderer import ChatRenderer
from roll.pipeline.rlvr.prompt_roles import PromptRoles
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
        self._prompts = prompts
        seed = derive_seed(config.seed, "warm start measurement")
        self._measuring = prompts.measuring(train, self.settings.eval_episodes, seed)

    def demonstrations(self) -> Batch:
        """The file's rows: the response and the end of the turn have loss mask 1.

        Raises:
            DataError: rows without the two columns.
        """
        self._prompts.wait_ready()
        return demonstration_batch(
            self.settings.file_name, self.settings.prompt, self.settings.response, self._renderer
        )

    def measure(self, num_episodes: int) -> tuple[float, float]:
        groups = self._measuring.collect(range(num_episodes), num_episodes).groups
        metrics = rollout_metrics(groups, "measured")
        return metrics["measured/success"], metrics.get("measured/valid_rate", 0.0)


def demonstration_batch(file_name: str, prompt: str, response: str, renderer: ChatRenderer) -> Batch:
    """Rows of a file as a batch for supervised learning.

    Args:
        file_name: any format that ``data_args.file_name`` takes.
        prompt: column of the question.
        response: column of the answer to imitate.
        renderer: messages to token ids.

    Raises:
        DataError: a row lacks a column, or holds something else than text there.
    """
    problems = Problems()
    eos = renderer.tokenizer.eos_token_id
    lengths, tokens, mask = [], [], []
    for row in read_rows([file_name], problems):
        question, answer = row.values.get(prompt), row.values.get(response)
        if not isinstance(question, str) or not isinstance(answer, str):
            problems.add(row.place, f"expected text in the columns {prompt!r} and {response!r}")
            continue
        prompt_ids = renderer.prompt([{"role": "user", "content": question}])
        answer_ids = np.asarray([*renderer.tokenizer.encode(answer, add_special_tokens=False), eos], dtype=np.int64)
        lengths.append(len(prompt_ids) + len(answer_ids))
        tokens += [prompt_ids, answer_ids]
        mask += [np.zeros(len(prompt_ids), dtype=bool), np.ones(len(answer_ids), dtype=bool)]
    problems.raise_any()
    if not lengths:
        raise DataError([f"{file_name}: no demonstrations"])
    return Batch(
        lengths_B=torch.tensor(lengths, dtype=torch.int64),
        tokens_T=torch.from_numpy(np.concatenate(tokens)),
        loss_mask_T=torch.from_numpy(np.concatenate(mask)),
    )
