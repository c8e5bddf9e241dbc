"""A step on paper: seconds of its phases on 8, 64 and 512 GPUs, beside published speeds; the tables of docs/scaling.md.

Everything but the driver's cost is arithmetic from data sheets and the assumptions below; ``benchmarks/scale.py``
measures the driver's. Nothing here was fitted to the published speeds.

    python benchmarks/scale_model.py
"""

from __future__ import annotations

from dataclasses import dataclass

FLOPS, BANDWIDTH, NETWORK = 989e12, 3.35e12, 50e9
"""Of an H100, and of its share of a node's network: bf16 operations, bytes of memory, bytes, all per second."""
OF_BANDWIDTH, OF_FLOPS_SCORE, OF_FLOPS_TRAIN = 0.6, 0.2, 0.12
"""Shares of these that decoding, scoring and training reach; the latter two of a mixture of experts."""
STEP_S = 6e-3
"""Of a decoding step beside reading: launches, sums over the GPUs of an engine, sampling."""
MOST_RUNNING = 256
"""Requests of an engine at the same time."""
SCORED = 2
"""Models that score each row before it is trained: the policy and its reference."""
DRIVER_S_PER_ROW, DRIVER_S_PER_TOKEN, DRIVER_BYTES_PER_TOKEN = 90e-6, 320e-9, 61.4
"""Measured by ``benchmarks/scale.py`` on one core."""


@dataclass(frozen=True)
class Model:
    """A policy and how an engine holds it."""

    parameters: float
    active: float
    """Of them for one token."""
    cache: float
    """Bytes of keys and values of a token."""
    per_engine: int
    """GPUs of an engine."""


QWEN3_30B = Model(30.5e9, 3.3e9, 48 * 2 * 4 * 128 * 2, 2)
QWEN25_7B = Model(7.6e9, 7.6e9, 28 * 2 * 4 * 128 * 2, 1)


@dataclass(frozen=True)
class Load:
    """What a step samples."""

    rows: int
    longest: int
    """Tokens of the longest row."""
    mean: float
    """Mean length as a share of it."""

    @property
    def tokens(self) -> float:
        return self.rows * self.longest * self.mean


def decoding(model: Model, running: float, length: float) -> float:
    """Seconds of a step of an engine with so many requests of that length so far."""
    read = 2 * model.parameters + running * length * model.cache
    return read / model.per_engine / (OF_BANDWIDTH * BANDWIDTH) + STEP_S


def rollout(model: Model, load: Load, gpus: float, *, continuous: bool) -> float:
    """Seconds in which so many GPUs sample a step's rows.

    Continuous: other rows take the place of those that end. Else the engines run until the longest row has ended, with
    ever fewer requests.
    """
    engines = gpus / model.per_engine
    running = min(load.rows / engines, MOST_RUNNING)
    half = load.longest * load.mean / 2
    if continuous:
        return load.tokens / (engines * running / decoding(model, running, half))
    return load.rows / engines / running * load.longest * decoding(model, running / 2, 2 * half)


def training(model: Model, load: Load, gpus: float) -> float:
    """Seconds in which so many GPUs score and train a step's rows: 2 operations, and 8 with recomputation."""
    scores = SCORED * 2 / OF_FLOPS_SCORE
    return load.tokens * model.active * (scores + 8 / OF_FLOPS_TRAIN) / (gpus * FLOPS)


def driver(load: Load) -> float:
    return load.rows * DRIVER_S_PER_ROW + load.tokens * DRIVER_S_PER_TOKEN


def synchronous(model: Model, load: Load, gpus: int) -> tuple[float, float, float, float]:
    """Seconds of rollout, training, sending weights and the driver, one after the other on all GPUs."""
    sampled = rollout(model, load, gpus, continuous=False)
    return sampled, training(model, load, gpus), 2 * model.parameters / NETWORK, driver(load)


def asynchronous(model: Model, load: Load, gpus: int) -> tuple[float, float]:
    """Seconds of a step with the best share of the GPUs for sampling, and that share."""
    sends = 2 * model.parameters / NETWORK

    def seconds(sampling: float) -> float:
        trains = training(model, load, gpus - sampling) + driver(load)
        return max(rollout(model, load, sampling, continuous=True), trains) + sends

    shares = [eighths / 8 for eighths in range(1, 8)]
    return min((seconds(share * gpus), share) for share in shares)


def main() -> None:
    """Prints both tables."""
    print(
        "| GPUs | rows × longest | rollout | score, train | weights | driver | step | tokens/s per GPU | driver's GB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for gpus, rows, longest in ((8, 512, 4_096), (64, 4_096, 4_096), (512, 16_384, 8_192)):
        load = Load(rows, longest, 0.5)
        parts = synchronous(QWEN3_30B, load, gpus)
        rate, through = load.tokens / sum(parts) / gpus, load.tokens * DRIVER_BYTES_PER_TOKEN / 1e9
        figures = " | ".join(f"{part:.1f} s" for part in (*parts, sum(parts)))
        print(f"| {gpus} | {rows:,} × {longest:,} | {figures} | {rate:,.0f} | {through:.1f} |")
    print("\n| setting | figure | published | here |\n|---|---|---|---|")
    load = Load(2_048, 4_096, 0.5)
    step = sum(synchronous(QWEN3_30B, load, 32))
    behind, _ = asynchronous(QWEN3_30B, load, 32)
    for what, published, seconds in (("on policy", 1_102, step), ("one step off", 1_414, behind)):
        here = load.tokens / seconds / 32
        print(f"| Qwen3-30B-A3B, 32 H100, 4k, {what} | tokens/s per GPU | {published:,} | {here:,.0f} |")
    load = Load(8_192, 28_672, 0.25)
    step = sum(synchronous(QWEN25_7B, load, 128))
    behind, share = asynchronous(QWEN25_7B, load, 128)
    print(
        f"| 7B, 128 GPUs, 28k | asynchronous over synchronous | 2.35–2.77 | {step / behind:.2f} ({share:.0%} sample) |"
    )


if __name__ == "__main__":
    main()
