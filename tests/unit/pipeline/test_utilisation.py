"""Model FLOPs against PyTorch's own counter, and the peaks of devices by their names."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from roll.configs.pipeline import PipelineConfig
from roll.data.batch import Batch
from roll.data.packing import computed_tokens
from roll.models.shapes import ModelShape, samples_flops
from roll.models.tiny import tiny_config
from roll.pipeline.profiling import PhaseTimer, Utilisation, num_devices
from roll.utils.gpus import GPUS, known_gpu
from tests.support.batches import batch_of
from tests.support.sizes import sizes

SIZES = {**sizes(509, 96, 160, 3, 4, 2), "head_dim": 24}
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
TINY = ModelShape.of(Qwen2Config(**tiny_config(4)).to_dict())
LENGTHS = (33, 7, 64)


@pytest.mark.parametrize("config", [Qwen2Config(**SIZES), Qwen3MoeConfig(**SIZES, **MIXTURE)])
@pytest.mark.parametrize("trains", [False, True])
def test_operations_are_those_that_pytorch_counts(config, trains):
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        for length in LENGTHS:
            logits = model(torch.randint(0, 509, (1, length)), use_cache=False).logits
            if trains:
                logits.sum().backward()
    squares = sum(length**2 for length in LENGTHS)
    # Eager attention computes all pairs, of which a causal model needs half.
    expected = samples_flops(ModelShape.of(config.to_dict()), sum(LENGTHS), 2 * squares, sum(LENGTHS))
    # The counter has no vectors: the embedding of the first layer has no gradient by a product either.
    assert counter.get_total_flops() == pytest.approx(expected * (3 if trains else 1), rel=0.02)


def cluster(name: str | None, *devices: tuple[int, ...]) -> Any:
    """Workers that sit on these devices, of that name."""
    return SimpleNamespace(slots=[SimpleNamespace(devices=each) for each in devices], call_rank=lambda *_: name)


def make_batch() -> Batch:
    """The last twenty tokens count."""
    return batch_of([[0] * length for length in LENGTHS], [*LENGTHS[:-1], LENGTHS[-1] - 20])


def measured(config: PipelineConfig, name: str | None, **options: Any) -> dict[str, float]:
    timer = PhaseTimer()
    trainer = cluster(name, (0,), (1,), (1, 0))
    assert num_devices(trainer) == 2
    with timer.phase("train") as span:
        Utilisation(config, trainer).trained(span, make_batch(), **options)
        span.seconds = 0.0
    return timer.step_metrics()


def test_metrics_of_a_step():
    config = PipelineConfig.model_validate({"pretrain": "tiny"})
    found = measured(config, "NVIDIA H100 80GB HBM3", passes=3)
    seconds = found["time/train"]
    assert found["tokens_per_s_per_device/train"] == pytest.approx(3 * sum(LENGTHS) / 2 / seconds)
    flops = 3 * 3 * samples_flops(TINY, sum(LENGTHS), sum(length**2 for length in LENGTHS), 20)
    assert found["tflops_per_device/train"] == pytest.approx(flops / 2 / seconds / 1e12)
    assert found["mfu/train"] == pytest.approx(flops / 2 / seconds / 67e12)  # float32


def test_tokens_of_rollouts_beside_training_are_those_of_the_time_since_the_batch_before():
    timer, used = PhaseTimer(), Utilisation(PipelineConfig.model_validate({}), cluster(None, (0,)))
    started = time.perf_counter()
    for _ in range(2):  # the second batch is there at once: it was played while the first was trained on
        with timer.phase("rollout") as span:
            used.generated(span, 1000, beside=True)
        time.sleep(0.05)
        metrics = timer.step_metrics()
    assert metrics["time/rollout"] < 0.05 and 1000 / (time.perf_counter() - started) < metrics["tokens_per_s/rollout"]
    assert metrics["tokens_per_s/rollout"] < 1000 / 0.05


def test_a_peak_that_is_not_known_is_not_guessed_and_a_step_without_the_policy_has_no_operations():
    for name in (None, "NVIDIA Z1"):
        found = measured(PipelineConfig.model_validate({}), name)
        assert "tflops_per_device/train" in found and "mfu/train" not in found
    given = PipelineConfig.model_validate({"profiler": {"peak_tflops": 0.5}})
    found = measured(given, None)
    assert found["mfu/train"] == pytest.approx(found["tflops_per_device/train"] / 0.5)
    found = measured(PipelineConfig.model_validate({}), None, counts=False)
    assert "tflops_per_device/train" not in found and "tokens_per_s_per_device/train" in found


@pytest.mark.parametrize(
    ("rows", "tokens"), [(None, sum(LENGTHS)), (torch.tensor([2, 0]), 64 + 33), (torch.empty(0, dtype=torch.int64), 0)]
)
def test_rows_that_nobody_has_scored_do_not_count(rows, tokens):
    timer = PhaseTimer()
    with timer.phase("logprobs") as span:
        Utilisation(PipelineConfig.model_validate({}), cluster(None, (0,), (1,))).scored(span, make_batch(), rows)
    found = timer.step_metrics()
    rates = {name: found[name] * found["time/logprobs"] for name in found if name.startswith("tokens_per_s")}
    expected = {"tokens_per_s/logprobs": tokens, "tokens_per_s_per_device/logprobs": tokens / 2} if tokens else {}
    assert rates == pytest.approx(expected)


def test_an_adapter_needs_no_gradients_of_the_frozen_matrices():
    def operations(args: dict[str, str]) -> float:
        found = measured(PipelineConfig.model_validate({"actor_train": {"model_args": args}}), None)
        return found["tflops_per_device/train"] * found["time/train"]

    assert operations({"lora_target": "all-linear"}) == pytest.approx(2 / 3 * operations({}))


def test_devices_are_known_by_their_names():
    kinds = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 PCIe": "H100-PCIe", "NVIDIA H20": "H20"}
    kinds |= {"NVIDIA A100-SXM4-40GB": "A100-40GB", "NVIDIA A100-SXM4-80GB": "A100", "AMD Instinct MI300X": "MI300X"}
    kinds |= {"NVIDIA L4": "L4", "NVIDIA L40S": "L40S", "NVIDIA GeForce RTX 4090": "RTX4090"}
    assert {name: known_gpu(name) for name in kinds} == {name: GPUS[kind] for name, kind in kinds.items()}
    others = ["NVIDIA L40", "NVIDIA H100 NVL", "NVIDIA GeForce RTX 4090 Laptop GPU", "Tesla V100-SXM2-16GB"]
    others += ["NVIDIA A100-SXM4-40GB MIG 3g.20gb"]
    assert [name for name in others if known_gpu(name) is not None] == []


def test_operations_of_prompts_that_were_shared_count_once():
    config = PipelineConfig.model_validate({"pretrain": "tiny"})
    prompt, own = torch.arange(40), torch.arange(8 * 10).view(8, 10) + 100
    batch = batch_of(torch.cat([prompt.expand(8, -1), own], dim=1), prompts=40)
    computed = computed_tokens([batch], sharing=True)
    assert computed == 39 + 8 * 11

    def flops(**metrics: float) -> float:
        timer = PhaseTimer()
        with timer.phase("train") as span:
            Utilisation(config, cluster("NVIDIA H100 80GB HBM3", (0,))).trained(span, batch, metrics=metrics)
            assert span.flops is not None
            return span.flops

    named = {"actor/num_tokens": 400.0, "critic/num_tokens": 400.0, "critic/computed_tokens": 1.0}
    whole = flops(**named)
    assert flops() == whole == flops(**named, **{"actor/computed_tokens": 400.0})
    squares = 8 * 50**2 - 7 * 39**2  # a prompt sees itself once, what follows sees all before it
    once = 3 * samples_flops(TINY, computed, squares, int(batch.loss_mask_T.sum()))
    assert flops(**named, **{"actor/computed_tokens": float(computed)}) == pytest.approx(once, rel=1e-9)
    half = flops(**named, **{"actor/computed_tokens": (400.0 + computed) / 2})
    assert half == pytest.approx((whole + once) / 2, rel=1e-9)
