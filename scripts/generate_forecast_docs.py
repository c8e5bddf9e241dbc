"""Writes a section of docs/scaling.md: published speeds beside what `roll plan` forecasts, and steps of some sizes.

A forecast is made by the functions of `roll/extras/plan/work.py`, from the published batch size, mean and longest
length, layout and GPUs. Rows marked as calibration were used to fit the constants there; no others were.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generated import write_or_check

from roll.configs.worker import WorkerConfig
from roll.extras.plan.work import Role, Samples, rollout_time, scoring_time, sync_time, training_time
from roll.models.shapes import ModelShape
from roll.utils.gpus import GPUS

FILE = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
TITLE = "## Forecasts beside published speeds"
FACTOR = 1.5
PROMPT = 150
"""Tokens of a prompt of OpenMathInstruct-2 in its chat template, an estimate; the pages give whole lengths."""
PER_MACHINE = 8


def _sizes(kind: str, vocabulary: int, hidden: int, inner: int, layers: int, heads: int, kv: int, **more: Any) -> dict:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shape = dict(zip(names, (vocabulary, hidden, inner, layers, heads), strict=True))
    return {"model_type": kind, **shape, "num_key_value_heads": kv, "head_dim": 128, "dtype": "bfloat16", **more}


_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
_LATENT = {
    **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
    **{"n_shared_experts": 1, "first_k_dense_replace": 3},
}
MODELS = {
    "Qwen2.5-0.5B": _sizes("qwen2", 151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True) | {"head_dim": 64},
    "Qwen3-0.6B": _sizes("qwen3", 151936, 1024, 3072, 28, 16, 8, tie_word_embeddings=True),
    "Qwen3-4B": _sizes("qwen3", 151936, 2560, 9728, 36, 32, 8, tie_word_embeddings=True),
    "Llama-3.1-8B": _sizes("llama", 128256, 4096, 14336, 32, 32, 8),
    "Qwen3-32B": _sizes("qwen3", 151936, 5120, 25600, 64, 64, 8),
    "Qwen3-30B-A3B": _sizes("qwen3_moe", 151936, 2048, 6144, 48, 32, 4, moe_intermediate_size=768, **_EXPERTS),
    "Qwen3-235B-A22B": _sizes("qwen3_moe", 151936, 4096, 12288, 94, 64, 4, moe_intermediate_size=1536, **_EXPERTS),
    "DeepSeek-V3": _sizes("deepseek_v3", 129280, 7168, 18432, 61, 128, 128, **_LATENT),
}
"""As their config.json has them."""


@dataclass(frozen=True)
class Published:
    """A published speed."""

    source: str
    model: str
    gpu: str
    gpus: int
    tokens_per_s: float
    """Of each GPU."""
    longest: int
    """Tokens of a sample at most."""
    mean: int
    rows: int = 1
    batch: int = 1
    """Samples of an optimizer step."""
    generator: int = 0
    """GPUs of a generating engine; 0: only training was measured."""
    layout: tuple[int, int, int] = (1, 1, 1)
    """Tensor, context and pipeline parallel size of the trainer."""
    recomputes: bool = False
    apart: bool = False
    """Half of the GPUs generate for the next step while the others train."""
    calibrates: bool = False

    @property
    def what(self) -> str:
        if not self.generator:
            return f"training alone, {self.longest:,} tokens"
        return f"GRPO, {self.mean:,} of {self.longest:,} tokens, {'one step off' if self.apart else 'on policy'}"


NEW, OLD, PRIME, OWN = "NeMo-RL 0.6", "NeMo-RL 0.4", "prime-rl", "ROLL"
SOURCES = {
    NEW: "<https://docs.nvidia.com/nemo/rl/0.6.0/about/performance-summary.html>",
    OLD: "the same page of 0.4.0, for the models that 0.6 no longer lists",
    PRIME: "`benchmarks/results/BENCHMARKS.md` of PrimeIntellect-ai/prime-rl, 7 February 2026",
    OWN: "[running_on_gpus.md](running_on_gpus.md#what-one-gpu-has-shown), `fsdp2_train`",
}
_235B: dict[str, Any] = {"longest": 8192, "rows": 512, "batch": 512, "recomputes": True}
_V3: dict[str, Any] = {"longest": 1536, "rows": 512, "batch": 512, "recomputes": True, "layout": (1, 1, 16)}
_V3["generator"] = 32
_REST: dict[str, Any] = {"longest": 4096, "rows": 2048, "batch": 512}
_LONE: dict[str, Any] = {"recomputes": True}
ROWS = (
    Published(
        OLD, "Llama-3.1-8B", "H100", 16, 1562, mean=1060, generator=1, layout=(1, 1, 2), calibrates=True, **_REST
    ),
    Published(OLD, "Llama-3.1-8B", "H100", 16, 2161, mean=1129, generator=1, layout=(1, 1, 2), apart=True, **_REST),
    Published(OLD, "Qwen3-32B", "H100", 32, 540, mean=3206, generator=4, layout=(4, 1, 4), **_REST),
    Published(OLD, "Qwen3-32B", "H100", 64, 494, mean=3207, generator=4, layout=(4, 1, 4), apart=True, **_REST),
    Published(NEW, "Qwen3-30B-A3B", "H100", 32, 1102, mean=3203, generator=2, calibrates=True, **_REST),
    Published(NEW, "Qwen3-30B-A3B", "H100", 32, 1414, mean=3201, generator=2, layout=(1, 1, 2), apart=True, **_REST),
    Published(
        *(NEW, "Qwen3-235B-A22B", "H100", 128, 58.9),
        mean=5698,
        generator=16,
        layout=(2, 2, 8),
        calibrates=True,
        **_235B,
    ),
    Published(NEW, "Qwen3-235B-A22B", "H100", 256, 37.4, mean=5713, generator=16, layout=(2, 2, 8), **_235B),
    Published(NEW, "Qwen3-235B-A22B", "H100", 256, 58.7, mean=5721, generator=8, layout=(4, 1, 8), apart=True, **_235B),
    Published(NEW, "DeepSeek-V3", "H100", 256, 12.1, mean=701, calibrates=True, **_V3),
    Published(NEW, "DeepSeek-V3", "H100", 512, 7.24, mean=697, **_V3),
    Published(NEW, "DeepSeek-V3", "H100", 512, 12.8, mean=710, apart=True, **_V3),
    Published(PRIME, "Qwen3-0.6B", "H100", 1, 11_900, 16_384, 16_384, calibrates=True, **_LONE),
    Published(PRIME, "Qwen3-0.6B", "H100", 1, 10_150, 65_536, 65_536, **_LONE),
    Published(PRIME, "Qwen3-4B", "H100", 8, 26_030 / 8, 16_384, 16_384, rows=8, **_LONE),
    Published(PRIME, "Qwen3-4B", "H100", 8, 28_970 / 8, 65_536, 65_536, rows=8, calibrates=True, **_LONE),
    Published(PRIME, "Qwen3-4B", "H200", 8, 27_440 / 8, 16_384, 16_384, rows=8, **_LONE),
    Published(PRIME, "Qwen3-4B", "H200", 8, 29_540 / 8, 65_536, 65_536, rows=8, **_LONE),
    Published(OWN, "Qwen2.5-0.5B", "H200", 1, 52_551, 1024, 1024, rows=32),
)


DRIVER_S_PER_ROW, DRIVER_S_PER_TOKEN, DRIVER_BYTES_PER_ROW = 223e-6, 391e-9, 860
"""Measured by ``benchmarks/scale.py`` on one core."""
STEPS = tuple(
    Published("", "Qwen3-30B-A3B", "H100", gpus, 0.0, longest, longest // 2, rows, rows // 4, generator=2)
    for gpus, rows, longest in ((8, 512, 4096), (64, 4096, 4096), (512, 16_384, 8192))
)
"""Steps of ROLL that nobody has published."""


def forecast(row: Published) -> float:
    """Tokens per second of each GPU."""
    device, shape = GPUS[row.gpu], ModelShape.of(MODELS[row.model])
    if not row.generator:
        samples = Samples(row.rows, 1, row.mean - 1)
        seconds = training_time(Role("actor_train", _trainer(row, row.gpus), shape), samples, device, row.gpus).seconds
        return samples.tokens / seconds / row.gpus
    rollout, *others = phases(row)
    samples = Samples(row.rows, PROMPT, row.mean - PROMPT)
    return samples.tokens / (max(rollout, sum(others)) if row.apart else rollout + sum(others)) / row.gpus


def phases(row: Published) -> tuple[float, float, float, float]:
    """Seconds of rollout, weight update, log-probs and training."""
    device, shape = GPUS[row.gpu], ModelShape.of(MODELS[row.model])
    training = row.gpus // 2 if row.apart else row.gpus
    generating = row.gpus - training if row.apart else row.gpus
    samples = Samples(row.rows, PROMPT, row.mean - PROMPT, longest=row.longest - PROMPT)
    engine = WorkerConfig.model_validate({"model_args": {"dtype": "bf16"}, "strategy_args": {"strategy_name": "vllm"}})
    trainer, generator = Role("actor_train", _trainer(row, training), shape), Role("actor_infer", engine, shape)
    workers = generating // row.generator
    rollout = rollout_time(generator, samples, device, workers, row.generator, row.rows).seconds
    return (
        rollout,
        sync_time(trainer, device, row.gpus // PER_MACHINE).seconds,
        scoring_time(trainer, samples, device, training).seconds,
        training_time(trainer, samples, device, training).seconds,
    )


def _trainer(row: Published, gpus: int) -> WorkerConfig:
    tensor, context, stages = row.layout
    megatron = {
        "tensor_model_parallel_size": tensor,
        "context_parallel_size": context,
        "pipeline_model_parallel_size": stages,
    }
    strategy: dict[str, Any] = {"strategy_name": "megatron_train", "strategy_config": megatron}
    copies = gpus // (tensor * context * stages)
    section = {
        "world_size": gpus,
        "model_args": {"dtype": "bf16", "disable_gradient_checkpointing": not row.recomputes},
        "strategy_args": strategy if row.generator else {"strategy_name": "fsdp2_train"},
        "training_args": {"gradient_accumulation_steps": max(1, row.batch // copies)},
        "use_sequence_packing": True,
        "use_dynamic_batching_in_train": True,
        "max_tokens_per_microbatch_in_train": row.longest,
    }
    return WorkerConfig.model_validate(section)


def section() -> Iterator[str]:
    """The lines of the page."""
    ratios = {row: forecast(row) / row.tokens_per_s for row in ROWS}
    told = [ratio for row, ratio in ratios.items() if not row.calibrates]
    within = sum(1 / FACTOR <= ratio <= FACTOR for ratio in told)
    yield TITLE
    yield ""
    yield (
        f"`scripts/generate_forecast_docs.py` makes this table with the functions of `roll plan` "
        "([planning.md](planning.md#time)). "
        f"Of {len(ROWS)} published speeds {len(ROWS) - len(told)} were used to fit the constants of "
        f"`roll/extras/plan/work.py`; of the other {len(told)}, {within} are forecast within a factor of {FACTOR}. "
        "All but the last are other systems: the table shows how far the arithmetic carries, not how fast ROLL is."
    )
    yield ""
    yield "| Source | Model | GPUs | Work | Published, tokens/s per GPU | Forecast | Forecast / published | |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for row, ratio in ratios.items():
        found = row.tokens_per_s * ratio
        verdict = "calibration" if row.calibrates else "" if 1 / FACTOR <= ratio <= FACTOR else "**missed**"
        cells = (row.source, row.model, f"{row.gpus} {row.gpu}", row.what, _rate(row.tokens_per_s), _rate(found))
        yield f"| {' | '.join(cells)} | {ratio:.2f} | {verdict} |"
    yield ""
    yield "Sources: " + "; ".join(f"{name}: {where}" for name, where in SOURCES.items()) + "."
    yield ""
    yield (
        "What is assumed: prompts of 150 tokens; the rollout lasts until one answer reaches the longest length, and on "
        "average as many requests run as the mean length says; log-probs are computed once; half of the GPUs generate "
        "where rollouts are one step off; activations are recomputed for 235 billion parameters and more, and in "
        "prime-rl's rows (its option), not in the others (NeMo-RL's default). Expert parallelism is not modelled: what "
        "it costs is in the width of the experts' matrices. The constants were fitted on six rows with bounds, by "
        "random search. The forecasts are not blind: which rows calibrate, and how often log-probs and activations are "
        "computed, was settled after three attempts, in which three forecasts of steps one step off missed. Small "
        "models are forecast too slow: ROLL's own trainer, measured on one GPU, is twice as fast. Left out: NeMo-RL's "
        "row of eight steps off and its SWE row (the split of GPUs and the environments' time are "
        "not published), and the factors of asynchronous over synchronous runs of verl "
        "(2.35 to 2.67) and AReaL (2.77), which depend on how lengths are distributed."
    )


def steps() -> Iterator[str]:
    """Lines about steps of some sizes."""
    yield "### A step on 8, 64 and 512 GPUs"
    yield ""
    yield (
        "The same functions for a synchronous step of Qwen3-30B-A3B, with rows half as long as the longest on average "
        "and all roles on the same H100s, and what `benchmarks/scale.py` measures of the driver, on one core:"
    )
    yield ""
    yield "| GPUs | Rows × longest | Rollout | Weights | Log-probs | Train | Driver | Tokens/s per GPU | By driver |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in STEPS:
        tokens = row.rows * row.mean
        times = (*phases(row), row.rows * DRIVER_S_PER_ROW + tokens * DRIVER_S_PER_TOKEN)
        seconds = " | ".join(f"{each:.1f} s" for each in times)
        through = f"{row.rows * DRIVER_BYTES_PER_ROW / 1e6:.2g} MB"
        yield (
            f"| {row.gpus} | {row.rows:,} × {row.longest:,} | {seconds} | {_rate(tokens / sum(times) / row.gpus)} | "
            f"{through} |"
        )
    yield ""
    yield (
        "The last column is what passes through the driver's process. Not included: environments, rewards, start-up, "
        "checkpoints and failures. On 512 GPUs the longest row has twice as many decode steps, and an engine half as "
        "many rows to fill them with."
    )


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def page(text: str) -> str:
    """The file with the section in its place, or at its end."""
    before, found, after = text.partition(TITLE)
    others = after.split("\n## ", 1)[1:] if found else []
    return (
        before.rstrip()
        + "\n\n"
        + "\n".join([*section(), "", *steps()])
        + "\n"
        + "".join("\n## " + other for other in others)
    )


if __name__ == "__main__":
    raise SystemExit(
        write_or_check(lambda: {FILE: page(FILE.read_text() if FILE.exists() else "# Scaling\n")}, __doc__)
    )
