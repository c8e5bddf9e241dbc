"""A teacher that reads more than the policy before the policy's answer (on-policy self-distillation)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from roll.algorithms.types import TokenScores
from roll.data.batch import Batch
from roll.data.columns import IntArray
from roll.pipeline.model_cluster import Scorer


class PrivilegedTeacher:
    """Scores of the policy's answers behind prompts of the teacher's own.

    Zhao et al. 2026, *Self-Distilled Reasoner: On-Policy Self-Distillation for Large Language Models*.

    Args:
        prompt: the teacher's prompt of a rollout group, as token ids.
    """

    def __init__(self, teacher: Scorer, prompt: Callable[[int], IntArray]) -> None:
        self._teacher = teacher
        self._prompt = prompt

    def submit_logprobs(self, batch: Batch, rows: Tensor | None = None) -> Callable[[], TokenScores]:
        """The teacher's scores of the sampled tokens, where they stand in the policy's rows."""
        theirs = self.read(batch)
        wait = self._teacher.submit_logprobs(theirs, rows)
        own_K, their_K = (each.loss_mask_T.nonzero().squeeze(1) for each in (batch, theirs))

        def placed() -> TokenScores:
            found = {name: column[their_K] for name, column in wait().columns.items()}
            return TokenScores.gathered(batch.num_tokens, [own_K], [TokenScores.of(**found)])

        return placed

    def read(self, batch: Batch) -> Batch:
        """The rows as the teacher reads them: its prompt in place of what stands before the first sampled token."""
        assert batch.group_B is not None, "rollouts are groups"
        prompts = {group: torch.tensor(self._prompt(group)) for group in batch.group_B.unique().tolist()}
        lengths, tokens, masks = [], [], []
        rows = zip(
            *(column.split(batch.lengths_B.tolist()) for column in (batch.tokens_T, batch.loss_mask_T)), strict=True
        )
        for group, (own, sampled) in zip(batch.group_B.tolist(), rows, strict=True):
            prompt, cut = prompts[group], int(sampled.long().argmax())
            tokens += [prompt, own[cut:]]
            masks += [torch.zeros(len(prompt), dtype=torch.bool), sampled[cut:]]
            lengths.append(len(prompt) + len(own) - cut)
        return Batch(torch.tensor(lengths), torch.cat(tokens), torch.cat(masks), group_B=batch.group_B)
