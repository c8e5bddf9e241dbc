"""Frozen parts, and parts with learning rates of their own: every trainer takes the steps of plain Hugging Face in
float64, and goes on from a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from roll.configs.engines import packages
from roll.distributed.strategy import STRATEGIES
from roll.distributed.strategy.training.checkpoint import OPTIMIZER, resume_folder
from tests.support.harness import (
    FP32_BOUND,
    MEASURES,
    Layout,
    as_row,
    make_batch,
    make_context,
    make_model,
    measure,
    policy_loss,
)
from tests.support.layouts_deepspeed import zero
from tests.support.layouts_megatron import PP, SP, TP
from tests.support.ranks import assert_near, enter_rank, exported, leave_rank, run_ranks

PACKAGES = packages()

FROZEN = "model.embed_tokens,model.layers.0,model.layers.2.self_attn"
FIRST = {"freeze_module_prefix": FROZEN}
EXPERTS = {"freeze_module_prefix": "model.layers.0,model.layers.1,model.layers.3.mlp.experts"}
RATES = {"learning_rate_of": {"model.layers": 3e-4, "model.layers.3.mlp": 2e-3, "model.norm": 5e-4}}
RECOMPUTED = {"disable_gradient_checkpointing": False}


def layout(name: str, strategy: str, world_size: int, config: dict[str, Any] | None = None, **options: Any) -> Layout:
    return Layout(name, strategy, world_size, config or {}, **{"model_args": FIRST, **options})


FAST = [
    layout("shards", "fsdp2_train", 2, model="qwen2_untied", model_args=FIRST | RECOMPUTED, training_args=RATES),
    layout("stage2", "deepspeed_train", 2, zero(2), training_args=RATES),
    layout("stages", "megatron_train", 2, {PP: 2}, model_args=FIRST | RECOMPUTED, training_args=RATES),
]
SLOW = [
    layout("alone", "fsdp2_train", 1),
    layout("replica", "fsdp2_train", 2, {"fsdp_size": 1}, training_args=RATES),
    layout("tensor", "fsdp2_train", 2, {"tensor_parallel_size": 2}),
    layout("stage0", "deepspeed_train", 2, zero(0)),
    layout("stage3", "deepspeed_train", 2, zero(3), model="qwen2_untied", model_args=FIRST, training_args=RATES),
    layout("alone", "megatron_train", 1, model_args=FIRST | RECOMPUTED),
    layout("tensor", "megatron_train", 2, {TP: 2, **SP}, model="qwen2_untied"),
    layout("distributed", "megatron_train", 2, {"use_distributed_optimizer": True}, training_args=RATES),
    layout("experts", "megatron_train", 2, {PP: 2}, model="qwen3_moe", model_args=EXPERTS),
]
LAYOUTS = [*FAST, *(pytest.param(each, marks=pytest.mark.slow, id=each.id) for each in SLOW)]


@pytest.fixture(scope="module")
def figures() -> dict[tuple[str, int, bool], Any]:
    return {}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: getattr(layout, "id", None))
def test_steps_are_those_of_a_model_with_frozen_parts(layout, figures, tmp_path_factory):
    package = PACKAGES.get(layout.strategy)
    if package is not None and not package.installed:
        pytest.skip(f"{package.module} is not installed")
    chosen = FAST if layout in FAST else SLOW
    key = (layout.strategy, layout.world_size, chosen is SLOW)
    if key not in figures:
        members = [each for each in chosen if (each.strategy, each.world_size) == key[:2]]
        figures[key] = measure(members, tmp_path_factory.mktemp("frozen"))
    found = figures[key][layout.id]
    assert not found.error, found.error
    for name in MEASURES:
        assert getattr(found, name) <= FP32_BOUND, f"{name}: {as_row(found)}"


ENGINES = {"fsdp2_train": "megatron_train", "megatron_train": "fsdp2_train"}
"""Who saves, and who goes on."""


def _hand_over(rank: int, port: int, model: Path, folder: Path) -> None:
    enter_rank(port)

    def trainer(engine: str) -> Any:
        found: Any = STRATEGIES.get(engine)(make_context(layout("", engine, 1), model, rank))
        found.setup()
        return found

    for engine, other in ENGINES.items():
        first, second = trainer(engine), trainer(other)
        for step in range(2):
            first.train_step(make_batch(step), policy_loss)
        first.save(folder / engine)
        second.load(folder / engine)
        for name, each in ((f"from-{engine}", second), ("expected", first)):
            each.train_step(make_batch(2), policy_loss)
            save_file(exported(each), folder / f"{name}.safetensors")
    leave_rank()


def test_a_checkpoint_goes_on_in_another_engine(tmp_path):
    """No moments of what is frozen are kept, or missed by who reads them; the model's folder has all weights."""
    if not PACKAGES["megatron_train"].installed:
        pytest.skip("megatron-core is not installed")
    model = make_model(tmp_path / "model", "qwen2")
    run_ranks(_hand_over, 1, model, tmp_path)
    saved = load_file(tmp_path / "fsdp2_train" / "actor_train" / "model.safetensors")
    expected = load_file(tmp_path / "expected.safetensors")
    assert saved.keys() == expected.keys() == load_file(model / "model.safetensors").keys()
    for engine in ENGINES:
        files = (resume_folder(tmp_path / engine, "actor_train") / OPTIMIZER).parent.glob("*.safetensors")
        moments = [name for file in files for name in load_file(file)]
        assert moments and not [name for name in moments if name.startswith(tuple(FROZEN.split(",")))]
        found = load_file(tmp_path / f"from-{engine}.safetensors")
        assert_near(found, expected, FP32_BOUND)


def _freeze_later(rank: int, port: int, engine: str, config: dict[str, Any], model: Path, folder: Path) -> None:
    enter_rank(port)
    for dtype in ("fp32", "bf16"):

        def trainer(dtype: str = dtype, **args: Any) -> Any:
            chosen = Layout("", engine, 1, config, model_args={"dtype": dtype, **args})
            found: Any = STRATEGIES.get(engine)(make_context(chosen, model, rank))
            found.setup()
            return found

        first = trainer()
        first.train_step(make_batch(0), policy_loss)
        first.save(folder / dtype)
        second = trainer(**FIRST)
        second.load(folder / dtype)
        for name, each in (("saved", first), ("loaded", second)):
            save_file(exported(each), folder / f"{name}-{dtype}.safetensors")
    leave_rank()


@pytest.mark.parametrize(
    ("engine", "config"),
    [("fsdp2_train", {}), ("fsdp2_train", {"checkpoint": "sharded"}), ("deepspeed_train", {}), ("megatron_train", {})],
)
def test_what_is_frozen_from_a_checkpoint_on_is_the_checkpoints(engine, config, tmp_path):
    if engine in PACKAGES and not PACKAGES[engine].installed:
        pytest.skip(f"{engine} is not installed")
    model = make_model(tmp_path / "model", "qwen2")
    run_ranks(_freeze_later, 1, engine, config, model, tmp_path)
    start = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    for dtype in ("fp32", "bf16"):
        found, expected = (load_file(tmp_path / f"{name}-{dtype}.safetensors") for name in ("loaded", "saved"))
        assert not [name for name, tensor in expected.items() if not found[name].equal(tensor)]
        embedding = expected["model.embed_tokens.weight"]
        assert not start.to(embedding.dtype).equal(embedding), "it was trained before"
