"""What ``fsdp2_train`` adds to plain sharding: checkpoints in shards, offloaded activations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from roll.configs.pipeline import PARTS
from roll.distributed.strategy.fsdp2 import strategy
from roll.distributed.strategy.fsdp2.strategy import Fsdp2Train
from roll.distributed.strategy.training.checkpoint import restore_checkpoint
from roll.distributed.strategy.training.module_trainer import use_liger_kernels
from roll.distributed.strategy.training.optim import ADAM_STATE, MASTER
from roll.distributed.strategy.training.tensor_files import StoredTensors
from tests.integration.test_fsdp2 import make_model, make_trainer, policy_loss
from tests.support.choice import slow_but
from tests.support.ranks import assert_near, enter_rank, leave_rank, run_ranks, wanted, whole
from tests.support.trainers import make_batch

SHARDED = {"checkpoint": "sharded"}
SHARDS = "resume/actor_train/shards"
LAYOUTS: dict[str, dict[str, Any]] = {
    "four": {},
    "groups": {"fsdp_size": 2},
    "tensor": {"tensor_parallel_size": 2},
    "whole replicas": {"fsdp_size": 1},
}
NAMES = slow_but(("groups", "tensor"), LAYOUTS)


def state_of(trainer: Fsdp2Train) -> dict[str, Tensor]:
    """All trained weights and moments, whole (collective)."""
    weights, kinds = trainer.weights, (*ADAM_STATE, MASTER)
    return {f"{name}.{kind}": whole(weights, name, kind).contiguous() for name in weights.trained for kind in kinds}


def step(trainer: Fsdp2Train, seed: int) -> float:
    batch, info = make_batch(seed=seed), trainer.info
    rows = torch.arange(batch.num_sequences).tensor_split(info.dp_size)[info.dp_rank]
    return trainer.train_step(batch.select(rows), policy_loss)["actor/loss"]


def two_main(rank: int, port: int, folder: Path, small: Path) -> None:
    enter_rank(port)
    trainer = make_trainer(small, SHARDED, rank=rank, world_size=2)
    losses = [step(trainer, seed) for seed in range(2)]
    trainer.save(folder / "two")
    saving = trainer.start_save(folder / "two-beside")
    state = state_of(trainer)
    losses.append(step(trainer, 2))
    after = state_of(trainer)
    saving.result()
    if rank == 0:
        save_file(state, folder / "state.safetensors")
        save_file(after, folder / "after.safetensors")
        (folder / "loss").write_text(str(losses[-1]))
    leave_rank()


def four_main(rank: int, port: int, folder: Path, small: Path, names: list[str]) -> None:
    enter_rank(port)
    for name in names:
        config = LAYOUTS[name]
        trainer = make_trainer(small, config | SHARDED, rank=rank, world_size=4)
        trainer.load(folder / "two")
        state = state_of(trainer)
        trainer.save(folder / f"by {name}")
        gathering = make_trainer(small, config, rank=rank, world_size=4)
        gathering.load(folder / "two")
        saving = gathering.start_save(folder / f"gathered from {name}")
        loss = step(trainer, 2)
        step(gathering, 2)
        saving.result()
        after = state_of(trainer)
        if rank == 0:
            save_file(state, folder / f"{name}-state.safetensors")
            save_file(after, folder / f"{name}-after.safetensors")
            (folder / f"{name}-loss").write_text(str(loss))
    leave_rank()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # 61 rows of the vocabulary and single numbers divide by nothing: some ranks have empty shards.
    return make_model(tmp_path_factory.mktemp("small"), tied=False)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, small: Path) -> Path:
    path = tmp_path_factory.mktemp("layouts")
    run_ranks(two_main, 2, path, small)
    run_ranks(four_main, 4, path, small, wanted(request, "name"))
    return path


@pytest.mark.parametrize("name", NAMES)
def test_shards_of_two_ranks_continue_on_four(folder, name):
    assert_near(load_file(folder / f"{name}-state.safetensors"), load_file(folder / "state.safetensors"), 0.0)
    assert_near(load_file(folder / f"{name}-after.safetensors"), load_file(folder / "after.safetensors"), 5e-6)
    assert float((folder / f"{name}-loss").read_text()) == pytest.approx(float((folder / "loss").read_text()), abs=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_saved_beside_training_is_that_of_the_start(folder, name):
    """The model's tensors are whole in the files; the optimizer's lie there as the ranks had them."""
    saved = folder / f"gathered from {name}"
    optimizer, resumed = saved / "resume/actor_train/optimizer", StoredTensors(saved / "resume/actor_train/optimizer")
    model = {
        key: tensor for file in (saved / "actor_train").glob("*.safetensors") for key, tensor in load_file(file).items()
    }
    state = load_file(folder / "state.safetensors")
    expected = {name.removeprefix("model.").removesuffix(f".{MASTER}"): tensor for name, tensor in state.items()}
    of_model = {key for key in expected if not key.endswith(ADAM_STATE)}
    assert model.keys() == of_model
    found = model | {key: resumed.get(key) for key in expected.keys() - of_model}
    assert not [key for key, tensor in expected.items() if not found[key].equal(tensor)]
    stored = [key for file in optimizer.glob("*.safetensors") for key in load_file(file)]
    assert len(list(optimizer.glob("*.safetensors"))) == 4
    assert any("@" in key for key in stored) == (name != "whole replicas")


def test_shards_written_beside_training_are_those_of_the_start(folder):
    """Tensors alone are compared: the library writes a header's metadata in an order of chance."""
    names = sorted(file.relative_to(folder / "two") for file in (folder / "two").rglob("*.safetensors"))
    assert len(names) == 3  # two of shards, and the generators' states
    for name in names:
        found, expected = load_file(folder / "two-beside" / name), load_file(folder / "two" / name)
        assert found.keys() == expected.keys()
        assert not [key for key, tensor in expected.items() if not found[key].equal(tensor)]


@pytest.mark.parametrize("source", ["two", *slow_but(("by groups", "by tensor"), [f"by {name}" for name in LAYOUTS])])
def test_shards_of_several_ranks_continue_on_one(folder, small, source):
    trainer = make_trainer(small)
    trainer.load(folder / source)
    assert trainer.optimizer_steps == 2
    assert_near(state_of(trainer), load_file(folder / "state.safetensors"), 0.0)


def test_shards_start_the_moments_anew_where_these_are_not_loaded(small, tmp_path):
    trainer = make_trainer(small, SHARDED)
    step(trainer, 0)
    trainer.save(tmp_path)
    resumed = make_trainer(small, loads=frozenset({"model", "rng"}))
    resumed.load(tmp_path)
    state, saved = state_of(resumed), state_of(trainer)
    assert all(tensor.equal(saved[name]) for name, tensor in state.items() if name.endswith(MASTER))
    assert not any(tensor.any() for name, tensor in state.items() if name.endswith(ADAM_STATE))


@pytest.mark.parametrize("parts", [PARTS, ("model", "rng")])
def test_shards_are_no_checkpoint_of_another_engine(small, tmp_path, parts):
    trainer = make_trainer(small, SHARDED)
    trainer.save(tmp_path)
    with pytest.raises(ValueError, match="it holds shards of actor_train; expected the strategy that wrote them"):
        restore_checkpoint(tmp_path, "actor_train", trainer.trained, parts)  # as other engines do


def test_shards_hold_no_pickle(folder):
    files = [file for file in (folder / "two").rglob("*") if file.is_file()]
    assert {file.suffix for file in files} <= {".safetensors", ".json"}, files
    assert len(list((folder / "two" / SHARDS).glob("shard-*.safetensors"))) == 2
    assert [path.name for path in (folder / "two").iterdir()] == ["resume"], "what others could not open is no model"


def test_missing_shards_are_refused(folder, small, tmp_path):
    import shutil

    shutil.copytree(folder / "two", tmp_path / "copy")
    next((tmp_path / "copy" / SHARDS).glob("shard-00002*")).unlink()
    with pytest.raises(ValueError, match="expected the shards of this model"):
        make_trainer(small).load(tmp_path / "copy")


def test_offloaded_activations_change_nothing(small, monkeypatch):
    monkeypatch.setattr(strategy, "MIN_BYTES", 0)
    results = []
    for offload in (False, True):
        args = {"model_args": {"disable_gradient_checkpointing": False}}
        trainer = make_trainer(small, {"activation_offload": offload}, **args)
        step(trainer, 0)
        results.append(trainer.gradient)
    assert_near(results[1], results[0], 0.0)


@pytest.mark.parametrize(
    ("config", "model_args", "message"),
    [
        ({"tensor_parallel_size": 3}, {}, "tensor_parallel_size: 3, expected a divisor of the 1 workers"),
        ({}, {"ulysses_size": 2}, "ulysses_size: 2, expected a divisor of the 1 workers"),
        ({"fsdp_size": 2, "cpu_offload": True}, {}, "fsdp_size: 2, expected a divisor of the 1 workers"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(small, config, model_args, message):
    try:
        with pytest.raises(ValueError, match=message):
            make_trainer(small, config, model_args=model_args)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_liger_kernels_need_a_gpu(small):
    with pytest.raises(ValueError, match="use_liger_kernel: true, expected false on a machine without a GPU"):
        make_trainer(small, model_args={"use_liger_kernel": True})


def test_missing_liger_kernels_name_the_extra(small, monkeypatch):
    import importlib.util

    if importlib.util.find_spec("liger_kernel") is not None:
        pytest.skip("liger-kernel is installed")
    from roll.models.loading import load_causal_lm

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ImportError, match=r"use_liger_kernel.*roll-rl\[liger\]"):
        use_liger_kernels(load_causal_lm(str(small)))
