"""The rivals of ``grpo_step.py``, each in a process of its own: a step written by hand, and TRL's ``GRPOTrainer``.

``python grpo_step_rivals.py hand|trl WORK.json`` takes a step for every line on its standard input and answers with a
line of JSON. Nothing of ROLL is imported here, so that any interpreter with torch, Transformers (and TRL) can run it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from grpo_step import compute_score
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

EPSILON = 1e-6
"""Added to the standard deviation of a group's rewards."""

Answer = dict[str, Any]


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

    def run(self) -> None:
        _answer({"ready": True})
        for line in sys.stdin:
            message = json.loads(line)
            _answer(self.step(message["step"]) if "step" in message else self.check(message["rows"]))

    def step(self, number: int) -> Answer:
        watch = Stopwatch()
        with watch.phase("generate"):
            prompts = [self.tokenizer.encode(prompt) for prompt in self.work["prompts"][number]]
            completions = self.generate(prompts)
        with watch.phase("score"):
            texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
            rewards = torch.tensor([compute_score("", text, None, {}) for text in texts]).view(len(prompts), -1)
            scale = rewards.std(1, keepdim=True) + EPSILON
            advantages = ((rewards - rewards.mean(1, keepdim=True)) / scale).flatten().tolist()
        with watch.phase("train"):
            repeated = [prompt for prompt in prompts for _ in range(self.work["samples"])]
            loss, norm = self.gradient(repeated, completions, advantages)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"tokens": sum(map(len, completions)), "phases": watch.seconds, "loss": loss, "grad_norm": norm}

    def check(self, rows: list[tuple[list[int], list[int], float]]) -> Answer:
        """Loss and gradient norm of somebody else's rollout, under the present weights."""
        loss, norm = self.gradient(*map(list, zip(*rows, strict=True)))
        self.optimizer.zero_grad()
        return {"loss": loss, "grad_norm": norm}

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
            layer.take(rows)  # type: ignore[union-attr]

    def gradient(
        self, prompts: list[list[int]], completions: list[list[int]], advantages: list[float]
    ) -> tuple[float, float]:
        """The loss and the norm of its gradient, which is left clipped; right-padded, similar lengths side by side."""
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]) - len(completions[i]))
        size, num_tokens = self.work["micro_batch"], sum(map(len, completions))
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
            logits = self.model.lm_head(hidden[sampled.roll(-1, 1)])  # a token is predicted at the one before
            logprobs = -nn.functional.cross_entropy(logits, ids[sampled], reduction="none")
            # On fresh samples the old policy is the current one: the ratio is 1, and has the gradient of the log.
            ratio = (logprobs - logprobs.detach()).exp()
            surrogate = torch.minimum(ratio * gain[sampled], ratio.clamp(0.8, 1.2) * gain[sampled])
            loss = -surrogate.sum() / num_tokens
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return total, norm.item()


class Trl:
    """``GRPOTrainer`` with the settings that were fastest for it on a CPU."""

    def __init__(self, work: dict[str, Any]) -> None:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        class Steps(TrainerCallback):
            def on_step_begin(callback, *args: Any, **kwargs: Any) -> None:
                self.begin()

            def on_step_end(callback, *args: Any, **kwargs: Any) -> None:
                self.end()

        self.first = int(os.environ.get("RANK", "0")) == 0
        samples = len(work["prompts"][0]) * work["samples"] // int(os.environ.get("WORLD_SIZE", "1"))
        accumulation = samples // work["micro_batch"]
        self.trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(work["model"]),
            reward_funcs=self.rewards,
            train_dataset=Dataset.from_list([{"prompt": text} for step in work["prompts"] for text in step]),
            callbacks=[Steps()],
            args=GRPOConfig(
                output_dir=work["output"],
                use_cpu=True,
                bf16=work["bf16"],
                gradient_checkpointing=False,
                max_steps=len(work["prompts"]),
                per_device_train_batch_size=work["micro_batch"],
                gradient_accumulation_steps=accumulation,
                steps_per_generation=accumulation,
                num_generations=work["samples"],
                max_completion_length=work["new_tokens"],
                temperature=1.0,
                num_iterations=1,
                beta=0.0,
                learning_rate=work["learning_rate"],
                lr_scheduler_type="constant",
                max_grad_norm=1.0,
                shuffle_dataset=False,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                **work["trl"],
            ),
        )
        self.watch = Stopwatch()
        self.tokens = 0
        self._time("_generate_single_turn", "generate")
        self._time("_calculate_rewards", "score")

    def run(self) -> None:
        self.trainer.train()

    def begin(self) -> None:
        """Waits for the line that asks for the step."""
        if self.trainer.state.global_step == 0:
            self._say({"ready": True})
        if self.first and not sys.stdin.readline():
            os._exit(0)  # whoever asked is gone
        if dist.is_initialized():
            dist.barrier()  # the other ranks must not go ahead while another contestant is timed
        self.watch, self.tokens, self.started = Stopwatch(), 0, time.perf_counter()

    def end(self) -> None:
        """Tells of the step that has been taken."""
        phases = self.watch.seconds
        phases["train"] = time.perf_counter() - self.started - sum(phases.values())
        tokens = torch.tensor(self.tokens)
        if dist.is_initialized():
            dist.all_reduce(tokens)
        self._say({"tokens": int(tokens), "phases": phases})

    def _say(self, message: Answer) -> None:
        if self.first:
            _answer(message)

    def _time(self, method: str, phase: str) -> None:
        """Counts the trainer's own method as a phase."""
        inner = getattr(self.trainer, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.watch.phase(phase):
                return inner(*args, **kwargs)

        setattr(self.trainer, method, timed)

    def rewards(self, completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        self.tokens += sum(map(len, completion_ids))
        return [compute_score("", text, None, {}) for text in completions]


def main() -> None:
    if len(sys.argv) != 3:  # `make bench` starts every script of this folder
        print(__doc__)
        return
    kind, path = sys.argv[1:]
    work = json.loads(Path(path).read_text())
    torch.set_num_threads(work["threads"])
    (HandWritten(work) if kind == "hand" else Trl(work)).run()


def _answer(message: Answer) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
