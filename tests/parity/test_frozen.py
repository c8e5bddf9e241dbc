"""Frozen parts, and parts with learning rates of their own: every trainer takes the steps of plain Hugging Face in
float64, and goes on from a checkpoint."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from roll.distributed.strategy.training.checkpoint import OPTIMIZER, resume_folder
from tests.support.harness import (
    FP32_BOUND,
    Layout,
    Measured,
    cases,
    check,
    make_model,
    needs,
    started,
    take_steps,
)
from tests.support.layouts_deepspeed import zero
from tests.support.layouts_megatron import PP, SP, TP
from tests.support.ranks import assert_near, exported, run_ranks

FROZEN = "model.embed_tokens,model.layers.0,model.layers.2.self_attn"
FIRST = {"freeze_module_prefix": FROZEN}
EXPERTS = {"freeze_module_prefix": "model.layers.0,model.layers.1,model.layers.3.mlp.experts"}
RATES = {"learning_rate_of": {"model.layers": 3e-4, "model.layers.3.mlp": 2e-3, "model.norm": 5e-4}}
RECOMPUTED = {"disable_gradient_checkpointing": False}


def layout(name: str, strategy: str, world_size: int, config: dict[str, Any] | None = None, **options: Any) -> Layout:
    return Layout(name, strategy, world_size, config or {}, **{"model_args": FIRST, **options})


slow = partial(layout, slow=True)
LAYOUTS = [
    layout("shards", "fsdp2_train", 2, model="qwen2_untied", model_args=FIRST | RECOMPUTED, training_args=RATES),
    layout("stage2", "deepspeed_train", 2, zero(2), training_args=RATES),
    layout("stages", "megatron_train", 2, {PP: 2}, model_args=FIRST | RECOMPUTED, training_args=RATES),
    slow("alone", "fsdp2_train", 1),
    slow("replica", "fsdp2_train", 2, {"fsdp_size": 1}, training_args=RATES),
    slow("tensor", "fsdp2_train", 2, {"tensor_parallel_size": 2}),
    slow("stage0", "deepspeed_train", 2, zero(0)),
    slow("stage3", "deepspeed_train", 2, zero(3), model="qwen2_untied", training_args=RATES),
    slow("alone", "megatron_train", 1, model_args=FIRST | RECOMPUTED),
    slow("tensor", "megatron_train", 2, {TP: 2, **SP}, model="qwen2_untied"),
    slow("distributed", "megatron_train", 2, {"use_distributed_optimizer": True}, training_args=RATES),
    slow("experts", "megatron_train", 2, {PP: 2}, model="qwen3_moe", model_args=EXPERTS),
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return Measured(LAYOUTS, tmp_path_factory)


@pytest.mark.parametrize("layout", cases(LAYOUTS))
def test_steps_are_those_of_a_model_with_frozen_parts(layout, measured):
    check(layout, measured.of(layout))


ENGINES = {"fsdp2_train": "megatron_train", "megatron_train": "fsdp2_train"}
"""Who saves, and who goes on."""


def _hand_over(rank: int, model: Path, folder: Path) -> dict[str, dict[str, Tensor]]:
    weights = {}
    for engine, other in ENGINES.items():
        first, second = (started(layout("", each, 1), model, rank) for each in (engine, other))
        take_steps(first, 0, 1)
        first.save(folder / engine)
        second.load(folder / engine)
        for name, each in ((engine, second), ("expected", first)):
            take_steps(each, 2)
            weights[name] = exported(each)
    return weights


def test_a_checkpoint_goes_on_in_another_engine(tmp_path):
    """No moments of what is frozen are kept, or missed by who reads them; the model's folder has all weights."""
    needs("megatron_train")
    model = make_model(tmp_path / "model", "qwen2")
    (weights,) = run_ranks(_hand_over, 1, model, tmp_path)
    saved = load_file(tmp_path / "fsdp2_train" / "actor_train" / "model.safetensors")
    expected = weights["expected"]
    assert saved.keys() == expected.keys() == load_file(model / "model.safetensors").keys()
    for engine in ENGINES:
        files = (resume_folder(tmp_path / engine, "actor_train") / OPTIMIZER).parent.glob("*.safetensors")
        moments = [name for file in files for name in load_file(file)]
        assert moments and not [name for name in moments if name.startswith(tuple(FROZEN.split(",")))]
        assert_near(weights[engine], expected, FP32_BOUND)


def _freeze_later(rank: int, engine: str, config: dict[str, Any], model: Path, folder: Path) -> list[Any]:
    """What was saved and what is loaded, by the number format."""
    weights = []
    for dtype in ("fp32", "bf16"):
        first = started(layout("", engine, 1, config, model_args={"dtype": dtype}), model, rank)
        take_steps(first, 0)
        first.save(folder / dtype)
        second = started(layout("", engine, 1, config, model_args={"dtype": dtype} | FIRST), model, rank)
        second.load(folder / dtype)
        weights.append((exported(first), exported(second)))
    return weights


@pytest.mark.parametrize(
    ("engine", "config"),
    [("fsdp2_train", {}), ("fsdp2_train", {"checkpoint": "sharded"}), ("deepspeed_train", {}), ("megatron_train", {})],
)
def test_what_is_frozen_from_a_checkpoint_on_is_the_checkpoints(engine, config, tmp_path):
    needs(engine)
    model = make_model(tmp_path / "model", "qwen2")
    (weights,) = run_ranks(_freeze_later, 1, engine, config, model, tmp_path)
    start = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    for expected, found in weights:
        assert not [name for name, tensor in expected.items() if not found[name].equal(tensor)]
        embedding = expected["model.embed_tokens.weight"]
        assert not start.to(embedding.dtype).equal(embedding), "it was trained before"
