"""The rivals of ``grpo_step.py``, each in a process of its own: a step written by hand, and TRL's ``GRPOTrainer``.

``python grpo_step_rivals.py hand|trl WORK.json`` answers every line on its standard input with one optimizer step and
a line of JSON. Nothing of ROLL is imported here, so that any interpreter with torch, Transformers (and TRL) can run it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

EPSILON = 1e-6
"""Added to the standard deviation of a group's rewards."""


def reward(text: str) -> float:
    """The share of even digits among a completion's characters: a rule that costs nothing."""
    return sum(text.count(digit) for digit in "02468") / max(1, len(text))


class Stopwatch:
    """Seconds by phase of one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class FixedLayer(CacheLayerMixin):
    """Keys and values of left-padded rows in memory that is allocated once; all rows are at the same column."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.used = width, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, heads, _, size = key_states.shape
        self.keys, self.values = (key_states.new_empty(rows, heads, self.width, size) for _ in range(2))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.used + key_states.shape[2]
        self.keys[:, :, self.used : end] = key_states
        self.values[:, :, self.used : end] = value_states
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def take(self, rows: Tensor) -> None:
        """Keeps the given rows, with repeats."""
        self.keys, self.values = (self._taken(memory, rows) for memory in (self.keys, self.values))

    def _taken(self, memory: Tensor, rows: Tensor) -> Tensor:
        other = memory.new_empty(len(rows), *memory.shape[1:])
        other[:, :, : self.used] = memory[rows, :, : self.used]
        return other

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.used + query_length, 0

    def get_seq_length(self) -> int:
        return self.used

    def get_max_length(self) -> int:
        return self.width


class HandWritten:
    """What one would write by hand for exactly this work."""

    COMPACT_AT = 0.9
    """Finished rows leave the batch once fewer than this share of its rows is still running."""

    def __init__(self, work: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(0)
        self.work = work
        self.tokenizer = AutoTokenizer.from_pretrained(work["model"])
        self.model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32).eval()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=work["learning_rate"], weight_decay=0.0, fused=True
        )

    def step(self, prompts: list[str]) -> dict[str, Any]:
        watch = Stopwatch()
        with watch.phase("generate"):
            prompt_ids = [self.tokenizer.encode(prompt) for prompt in prompts]
            completions = self.generate(prompt_ids)
        with watch.phase("score"):
            texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
            rewards = torch.tensor([reward(text) for text in texts]).view(len(prompts), -1)
            scale = rewards.std(1, keepdim=True) + EPSILON
            advantages = ((rewards - rewards.mean(1, keepdim=True)) / scale).flatten().tolist()
        with watch.phase("train"):
            repeated = [ids for ids in prompt_ids for _ in range(self.work["samples"])]
            loss, norm = self.train(repeated, completions, advantages)
        return {"seconds": watch.seconds, "tokens": sum(map(len, completions)), "loss": loss, "grad_norm": norm}

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """Samples the completions of every prompt: prompts are prefilled once, and all rows decode side by side."""
        new, eos = self.work["new_tokens"], self.tokenizer.eos_token_id
        width = max(map(len, prompts))
        cache = Cache(layers=[FixedLayer(width + new) for _ in range(self.model.config.num_hidden_layers)])
        pads = torch.tensor([width - len(prompt) for prompt in prompts])
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        columns = torch.arange(width + new)
        visible = (columns[None] >= pads[:, None])[:, None, None]
        causal = (columns[:width, None] >= columns[None, :width]) & visible[..., :width]
        causal |= torch.eye(width, dtype=torch.bool)  # a row that sees nothing would be NaN
        positions = (columns[None, :width] - pads[:, None]).clamp(min=0)
        mask = torch.where(causal, 0.0, -torch.inf)
        logits = self._forward(ids, positions, mask, cache)
        spread = torch.arange(len(prompts)).repeat_interleave(self.work["samples"])
        self._take(cache, spread)
        logits, pads = logits[spread], pads[spread]
        mask = torch.where(visible, 0.0, -torch.inf)[spread]
        tokens = torch.zeros(len(spread), new, dtype=torch.int64)
        rows = torch.arange(len(spread))
        running = torch.ones(len(spread), dtype=torch.bool)
        lengths = torch.full((len(spread),), new)
        for index in range(new):
            chosen = torch.multinomial(logits.softmax(-1), 1)
            tokens[rows, index] = chosen[:, 0]
            ended = running & (chosen[:, 0] == eos)
            lengths[rows[ended]] = index + 1
            running &= ~ended
            if index + 1 == new or not running.any():
                break
            if running.float().mean() < self.COMPACT_AT:
                rows, pads, chosen, mask = rows[running], pads[running], chosen[running], mask[running]
                self._take(cache, running.nonzero()[:, 0])
                running = running[running]
            position = (width + index - pads)[:, None]
            logits = self._forward(chosen, position, mask[..., : width + index + 1], cache)
        return [row[:length].tolist() for row, length in zip(tokens, lengths.tolist(), strict=True)]

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        output = self.model(
            ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        logits: Tensor = output.logits
        return logits[:, -1]

    @staticmethod
    def _take(cache: Cache, rows: Tensor) -> None:
        for layer in cache.layers:
            layer.take(rows)

    def train(self, prompts: list[list[int]], completions: list[list[int]], advantages: list[float]) -> Any:
        """One optimizer step on right-padded sequences, similar lengths side by side."""
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]) - len(completions[i]))
        size, num_tokens = self.work["hand_micro_batch"], sum(map(len, completions))
        total = 0.0
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            width = max(len(prompts[i]) + len(completions[i]) for i in rows)
            ids = torch.zeros(len(rows), width, dtype=torch.int64)
            gain = torch.zeros(len(rows), width)
            sampled = torch.zeros(len(rows), width, dtype=torch.bool)
            for row, i in enumerate(rows):
                first, last = len(prompts[i]), len(prompts[i]) + len(completions[i])
                ids[row, :last] = torch.tensor(prompts[i] + completions[i])
                gain[row, first:last] = advantages[i]
                sampled[row, first:last] = True
            hidden = self.model.model(ids, use_cache=False).last_hidden_state
            source = sampled.roll(-1, 1)
            logits = self.model.lm_head(hidden[source])
            logprobs = -nn.functional.cross_entropy(logits, ids[sampled], reduction="none")
            # On fresh samples the old policy is the current one: the ratio is 1, and has the gradient of the log.
            ratio = (logprobs - logprobs.detach()).exp()
            loss = -torch.minimum(ratio * gain[sampled], ratio.clamp(0.8, 1.2) * gain[sampled]).sum() / num_tokens
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, norm.item()


def main() -> None:
    kind, path = sys.argv[1:]
    work = json.loads(Path(path).read_text())
    torch.set_num_threads(work["threads"])
    rival: Any = {"hand": HandWritten}[kind](work)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(rival.step(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
