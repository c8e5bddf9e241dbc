"""Speed of the advantage estimators on one core, beside the same arithmetic token by token in torch and in Python.

    python benchmarks/algorithms.py [--repeats 9] [--no-loops]

GAE runs on 128 sequences of 8192 sampled tokens, GRPO on 1024 sequences in groups of 8. The time is that of
``compute_advantages``: its checks of the input and of the result are in it. Exit code 1 when GAE misses its limit, or
when a loop finds another result.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.advantages import compute_advantages
from roll.configs.algorithm import AlgorithmConfig
from roll.data.batch import Batch

GAE_LIMIT_MS = 60.0
GAE_KEYS = {"adv_estimator": "gae", "gamma": 0.99, "lambd": 0.95}
GROUP_SIZE = 8


@dataclass(frozen=True)
class Job:
    """One estimator on one batch, and how a loop would do it."""

    label: str
    batch: Batch
    config: AlgorithmConfig
    loops: dict[str, Callable[[Batch, AlgorithmConfig], Tensor]]
    limit_ms: float | None = None


def make_batch(lengths_B: Tensor) -> Batch:
    """Sequences that are sampled from the second token on, rewarded at their ends."""
    generator = torch.Generator().manual_seed(0)
    num_sequences, num_tokens = len(lengths_B), int(lengths_B.sum())
    rewards_T = torch.zeros(num_tokens)
    rewards_T[torch.cumsum(lengths_B, 0) - 1] = torch.randn(num_sequences, generator=generator)
    rows = torch.arange(num_sequences)
    batch = Batch(lengths_B, torch.zeros(num_tokens, dtype=torch.int64), torch.ones(num_tokens, dtype=torch.bool))
    mask_T = batch.positions_T > 0
    return batch.replace(
        loss_mask_T=mask_T,
        turn_T=torch.zeros(num_tokens, dtype=torch.int64),
        rewards_T=rewards_T,
        values_T=torch.randn(num_tokens, generator=generator) * mask_T,
        group_B=rows // GROUP_SIZE,
        traj_B=rows,
        turn_B=torch.zeros_like(rows),
    )


def gae_in_torch(batch: Batch, config: AlgorithmConfig) -> Tensor:
    """GAE with one step of torch for each position, all sequences side by side in a padded rectangle."""
    columns = (batch.rewards_T, batch.values_T, batch.loss_mask_T)
    rewards, values, mask = torch.zeros(len(columns), batch.num_sequences, int(batch.lengths_B.max())).double()
    for rectangle, column_T in zip((rewards, values, mask), columns, strict=True):
        assert column_T is not None
        rectangle[batch.rows_T, batch.positions_T] = column_T.double()
    advantages = torch.zeros_like(rewards)
    next_value, last = torch.zeros(len(rewards), dtype=torch.float64), torch.zeros(len(rewards), dtype=torch.float64)
    for t in range(rewards.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + config.gamma * next_value - values[:, t]
        new = delta + config.gamma * config.lambd * last
        next_value = values[:, t] * mask[:, t] + next_value * (1 - mask[:, t])
        last = new * mask[:, t] + last * (1 - mask[:, t])
        advantages[:, t] = last * mask[:, t]
    return advantages[batch.rows_T, batch.positions_T]


def gae_in_python(batch: Batch, config: AlgorithmConfig) -> Tensor:
    """GAE over lists of numbers."""
    out: list[float] = []
    columns = [column.tolist() for column in (batch.rewards_T, batch.values_T, batch.loss_mask_T) if column is not None]
    end = 0
    for length in batch.lengths_B.tolist():
        start, end = end, end + length
        advantages, next_value, last = [0.0] * length, 0.0, 0.0
        rewards, values, mask = (column[start:end] for column in columns)
        for t in range(length - 1, -1, -1):
            if mask[t]:
                last = rewards[t] + config.gamma * next_value - values[t] + config.gamma * config.lambd * last
                next_value = values[t]
                advantages[t] = last
        out += advantages
    return torch.tensor(out, dtype=torch.float64)


def grpo_in_torch(batch: Batch, config: AlgorithmConfig) -> Tensor:
    """GRPO with a dictionary of groups and a tensor for each sequence."""
    assert batch.rewards_T is not None and batch.group_B is not None
    lengths = batch.lengths_B.tolist()
    scores = [rewards.double().sum() for rewards in batch.rewards_T.split(lengths)]
    groups: dict[int, list[Tensor]] = {}
    for group, score in zip(batch.group_B.tolist(), scores, strict=True):
        groups.setdefault(group, []).append(score)
    parts = []
    masks = batch.loss_mask_T.split(lengths)
    for group, score, mask in zip(batch.group_B.tolist(), scores, masks, strict=True):
        members = torch.stack(groups[group])
        parts.append((score - members.mean()) / (members.std() + 1e-6) * mask)
    return torch.cat(parts)


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Median time of some runs, after one that does not count."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def measure(job: Job, repeats: int, with_loops: bool) -> bool:
    """Prints one job's rows; returns whether it missed its limit or a loop disagreed."""

    def vectorised() -> Tensor:
        advantages_T = compute_advantages(job.batch, job.config).advantages_T
        assert advantages_T is not None
        return advantages_T

    own_ms = median_ms(vectorised, repeats)
    missed = job.limit_ms is not None and own_ms > job.limit_ms
    limit = "" if job.limit_ms is None else f"   limit {job.limit_ms:.0f} ms{' MISSED' if missed else ''}"
    print(f"{job.label:34} {'vectorised':18} {own_ms:10.1f} ms{limit}")
    for name, loop in job.loops.items() if with_loops else ():
        loop_ms = median_ms(functools.partial(loop, job.batch, job.config), max(1, repeats // 4))
        difference = float((loop(job.batch, job.config) - vectorised().double()).abs().max())
        missed |= difference > 1e-4
        print(f"{'':34} {name:18} {loop_ms:10.1f} ms   {loop_ms / own_ms:6.1f} x, largest difference {difference:.1e}")
    return missed


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=9, help="runs of which the median counts")
    parser.add_argument("--no-loops", action="store_true", help="leave out the loops, which take most of the time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lengths_B = torch.randint(64, 1024, (1024,), generator=torch.Generator().manual_seed(1))
    jobs = [
        Job(
            "GAE, 128 x 8192 tokens",
            make_batch(torch.full((128,), 8192)),
            AlgorithmConfig.model_validate(GAE_KEYS),
            {"loop in torch": gae_in_torch, "loop in Python": gae_in_python},
            GAE_LIMIT_MS,
        ),
        Job(
            "GRPO, 1024 sequences, 64-1023 tokens",
            make_batch(lengths_B),
            AlgorithmConfig.model_validate({"adv_estimator": "grpo"}),
            {"loop in torch": grpo_in_torch},
        ),
    ]
    missed = [measure(job, args.repeats, not args.no_loops) for job in jobs]
    return int(any(missed))


if __name__ == "__main__":
    sys.exit(main())
