"""What supervised training must come to: plain PyTorch in float64, token by token from the text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from roll.pipeline.model_cluster import plan_optimizer_steps
from roll.utils.hashing import derive_seed

Talk: TypeAlias = Sequence[tuple[str, str]]
"""Roles and what they say."""

RATES = (5e-4, 1e-3, 1e-3 * 2 / 3, 1e-3 / 3)
"""Of the four optimizer steps that runs on given samples take: one of warm-up, then a straight line down."""


def talk(number: int) -> Talk:
    """A conversation of two turns."""
    return [("user", f"{number}?"), ("assistant", "Up" * (1 + number % 3)), ("user", "more"), ("assistant", "Down")]


def row(number: int) -> str:
    """The same as a line of a dataset."""
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in talk(number)]}) + "\n"


def learnt(
    imitator: Imitator, name: str, loss: Callable[[list[int]], Tensor], measure: Callable[[], dict[str, float]]
) -> dict[int, dict[str, float]]:
    """Held-out figures by step: the run of ``config/<name>.yaml`` in float64, without the library's training.

    Args:
        loss: of the rows with these numbers.
        measure: makes the figures of the model as it is.
    """
    optimizer = torch.optim.AdamW(imitator.model.parameters(), weight_decay=0.0)
    measured = {0: measure()}
    order = plan_optimizer_steps(10, steps_per_epoch=2, epochs=2, seed=derive_seed(7, name))
    for step, (rows, rate) in enumerate(zip(order, RATES, strict=True), start=1):
        optimizer.zero_grad()
        loss(rows.tolist()).backward()
        torch.nn.utils.clip_grad_norm_(imitator.model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        measured[step] = measure()
    return measured


class Imitator:
    """A tiny model, its tokenizer, and how likely it finds what the assistant says.

    Args:
        path: its folder.
    """

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model: Any = AutoModelForCausalLM.from_pretrained(path).double()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)

    def said(self, talk: Talk) -> tuple[list[int], list[int]]:
        """Token ids, and positions of what follows an opened assistant turn, up to its end."""
        opening = self.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
        text = "".join(f"<|im_start|>{role}\n{words}<|im_end|>\n" for role, words in talk)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        positions, speaking = [], False
        for position, token in enumerate(ids):
            if speaking:
                positions.append(position)
                speaking = token != self.tokenizer.eos_token_id
            elif ids[max(0, position - len(opening) + 1) : position + 1] == opening:
                speaking = True
        return ids, positions

    def logprobs(self, talk: Talk) -> tuple[Tensor, int]:
        """Log-probability of each token that the assistant says, and how many of them are the first choice."""
        ids, positions = self.said(talk)
        logits = self.model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        before, target = torch.tensor(positions) - 1, torch.tensor(ids)[positions]
        return logits[before, target], int((logits[before].argmax(-1) == target).sum())

    def loss(self, talks: Iterable[Talk], *, per_row: bool = False) -> Tensor:
        """Mean over all tokens, or over conversations of the mean over theirs."""
        rows = [self.logprobs(talk)[0] for talk in talks]
        return -torch.stack([row.mean() for row in rows]).mean() if per_row else -torch.cat(rows).mean()

    def accuracy(self, talks: Iterable[Talk]) -> float:
        """Share of the assistant's tokens that are the model's first choice."""
        rows = [self.logprobs(talk) for talk in talks]
        return sum(hits for _, hits in rows) / sum(len(logprobs) for logprobs, _ in rows)
