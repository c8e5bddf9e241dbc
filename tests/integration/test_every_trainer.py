"""What holds under every trainer: damaged files are told, weights leave to the last bit, decay follows its schedule."""

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from roll.algorithms.types import LossContext, LossOutput, TokenScores
from roll.data.batch import Batch
from roll.distributed.strategy import STRATEGIES
from roll.distributed.strategy.training import tensor_files
from tests.support import harness
from tests.support.choice import installed, needs
from tests.support.harness import Layout, make_model
from tests.support.ranks import exported, run_ranks, unpacked
from tests.support.trainers import make_batch, make_context, make_trainer

# ---- a checkpoint or model folder that one rank cannot read ends the call on every rank, with that rank's message

TRAINERS: dict[str, dict[str, Any]] = {
    "fsdp2_train": {},
    "deepspeed_train": {"zero_optimization": {"stage": 3}},
    "megatron_train": {"pipeline_model_parallel_size": 2},
}
"""FSDP2 and DeepSpeed read on rank 0 alone; with Megatron's pipeline stages the damage is in what rank 1 reads."""
SECONDS = 30
"""Far below a collective's timeout (30 minutes), far above what a rank needs to say so."""


def change(file: Path, how: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(file)
    how(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def without(file: str, name: str) -> Callable[[Path], None]:
    return lambda path: change(path / file, lambda tensors: tensors.pop(name))


def widened(file: str, name: str) -> Callable[[Path], None]:
    return lambda path: change(path / file, lambda tensors: tensors.update({name: torch.cat([tensors[name]] * 2)}))


MODEL, RESUME = "actor_train/model.safetensors", "resume/actor_train"
STATE = f"{RESUME}/optimizer/state.safetensors"
NORM = "model.norm.weight"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no moment": (without(STATE, f"{NORM}.exp_avg_sq"), f"no tensor '{NORM}.exp_avg_sq'"),
    "moment of another shape": (widened(STATE, f"{NORM}.exp_avg"), "norm.weight: got .*shape"),
    "no weight": (without(MODEL, NORM), NORM),
    "half a file": (
        lambda path: (path / STATE).write_bytes((path / STATE).read_bytes()[:-100]),
        "expected a whole safetensors file",
    ),
    "weight of another shape": (widened(MODEL, NORM), "norm.weight: got .*shape"),
    "no counters": (lambda path: (path / RESUME / "trainer.json").unlink(), "no trainer.json"),
    "of an earlier version": (
        lambda path: (path / RESUME / "trainer.json").rename(path / "actor_train" / "trainer.json"),
        "trainer.json in actor_train: of an earlier version",
    ),
}


def failure(call: Callable[..., Any], *args: Any) -> dict[str, Any]:
    start, message = time.monotonic(), ""
    try:
        call(*args)
    except (ValueError, OSError) as error:
        message = str(error)
    return {"message": message, "seconds": time.monotonic() - start}


def damage_main(rank: int, folder: Path) -> dict[str, dict[str, Any]]:
    tensor_files.MIN_SHARE_BYTES = 2**20  # one file of each kind, by rank 0: the damages name it
    results = {}
    for name, options in TRAINERS.items():
        if not installed(name):
            continue
        trainer = make_trainer(folder / "model", name, options, rank=rank, world_size=2)
        trainer.save(folder / name)
        found = {}
        for number, (damage, (spoil, _)) in enumerate(DAMAGES.items()):
            copy = folder / f"{name}-{number}"
            if rank == 0:
                shutil.copytree(folder / name, copy)
                spoil(copy)
            dist.barrier()
            found[damage] = failure(trainer.load, copy)
        trainer.load(folder / name)  # the ranks still agree on what comes next
        trainer.shutdown()
        context = make_context(folder / "no-weight", name, options, rank=rank, world_size=2)
        found["model folder"] = failure(STRATEGIES.get(name)(context).setup)
        results[name] = found
    return results


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """By rank and trainer, each failure."""
    path = tmp_path_factory.mktemp("damaged")
    for name in ("model", "no-weight"):
        make_model(path / name, "qwen2_untied")
    without("model.safetensors", NORM)(path / "no-weight")
    return run_ranks(damage_main, 2, path)


@pytest.mark.parametrize("damage", [*DAMAGES, "model folder"])
@pytest.mark.parametrize("name", TRAINERS)
def test_every_rank_fails_at_once_with_the_message_of_the_one_that_did(damaged, name, damage):
    needs(name)
    message = NORM if damage == "model folder" else DAMAGES[damage][1]
    for rank in damaged:
        found = rank[name][damage]
        assert found["seconds"] < SECONDS
        assert re.search(message, found["message"]), found


# ---- weights of trained layouts on the ranks that send them: to the last bit, and nowhere else whole

BUCKET_BYTES = 10_000
LAYOUTS = [
    Layout("shard2", "fsdp2_train", 2),
    Layout("replica", "fsdp2_train", 2, {"fsdp_size": 1}),
    Layout("tp2", "fsdp2_train", 2, {"tensor_parallel_size": 2}, model="qwen2_untied"),
    Layout("shard2 experts", "fsdp2_train", 2, model="qwen3_moe"),
    Layout("tp2 experts", "fsdp2_train", 2, {"tensor_parallel_size": 2}, model="qwen3_moe"),
    Layout("zero0", "deepspeed_train", 2, {"zero_optimization": {"stage": 0}}),
    Layout("zero3", "deepspeed_train", 2, {"zero_optimization": {"stage": 3}}),
    Layout("tp2", "megatron_train", 2, {"tensor_model_parallel_size": 2}),
    Layout("pp2", "megatron_train", 2, {"pipeline_model_parallel_size": 2}, model="qwen2_untied"),
]
CUT = ("shard2", "tp2", "zero3")
"""Layouts of which no rank has any large tensor whole."""
TARGETS = ((0,), (1,), (0, 1))


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.found = max(self.found, tensor.numel())
        return result


def export_main(rank: int, layouts: list[Layout], folder: Path) -> None:
    for layout in layouts:
        trainer = harness.started(layout, folder / layout.model, rank)
        found: dict[str, Any] = {"weights": {}, "largest": {}}
        for targets in TARGETS:
            for again in range(2):  # the first time it looks up who has what
                with Largest() as largest:
                    weights = unpacked(trainer.export_weights(BUCKET_BYTES, targets, check=not again))
            found["weights"][targets], found["largest"][targets] = weights, largest.found
        torch.save(found, folder / f"{layout.id}-{rank}.pt")
        if hasattr(trainer, "shutdown"):
            trainer.shutdown()


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export")
    for kind in {layout.model for layout in LAYOUTS}:
        make_model(path / kind, kind)
    for name in filter(installed, TRAINERS):
        run_ranks(export_main, 2, [layout for layout in LAYOUTS if layout.strategy == name], path)
    return path


def found_by(layout: Layout, folder: Path) -> list[dict[str, Any]]:
    needs(layout.strategy)
    return [torch.load(folder / f"{layout.id}-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.id)
def test_the_ranks_that_send_have_the_models_weights_to_the_last_bit(layout, sent):
    expected = load_file(sent / layout.model / "model.safetensors")
    for rank, found in enumerate(found_by(layout, sent)):
        for targets in TARGETS:
            weights = found["weights"][targets]
            if rank not in targets:
                assert weights == {}
                continue
            assert weights.keys() == expected.keys()
            different = [name for name, tensor in expected.items() if not torch.equal(weights[name], tensor)]
            assert different == []
            assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.name in CUT], ids=lambda layout: layout.id)
def test_a_rank_that_serves_nobody_never_has_a_whole_tensor(layout, sent):
    """But for what its layout has whole anyway: embeddings with the tensor parallelism of FSDP2, norms."""
    expected = load_file(sent / layout.model / "model.safetensors")
    cut = [name for name in expected if layout.id != "fsdp2_train-tp2" or "proj" in name]
    largest = max(expected[name].numel() for name in cut)
    first, second = found_by(layout, sent)
    for found, targets in ((first, (1,)), (second, (0,))):
        assert found["largest"][targets] < largest, "it made a whole tensor"
    assert first["largest"][(0,)] >= largest, "the measure sees those that do"


# ---- one process

RATE = 0.1


def nothing(scores: TokenScores, batch: Batch, context: LossContext) -> LossOutput:
    """A loss of 0 without gradient: what moves is decay alone."""
    assert scores.logprobs_T is not None
    return LossOutput(0.0 * scores.logprobs_T.sum())


@pytest.mark.parametrize("name", TRAINERS)
def test_each_step_decays_by_its_own_factor(model, name):
    needs(name)
    keys = {"learning_rate": RATE, "lr_scheduler_type": "constant", "weight_decay": 0.0, "weight_decay_end": 0.4}
    trainer = make_trainer(model, name, training_args=keys, total_optimizer_steps=3)
    before = exported(trainer)
    for step, decay in enumerate((0.0, 0.2, 0.4)):
        trainer.train_step(make_batch(seed=step), nothing)
        after = exported(trainer)
        for key, tensor in after.items():
            factor = 1 - RATE * decay if tensor.ndim > 1 else 1.0
            torch.testing.assert_close(tensor, before[key] * factor, rtol=1e-5, atol=1e-7)
        before = after


@pytest.mark.parametrize("strategy", ["fsdp2_infer", "megatron_infer"])
@pytest.mark.parametrize("head", ["value", "score"])
def test_a_head_is_found_in_a_folder_at_home(strategy, head, tmp_path, monkeypatch):
    needs(strategy)
    make_model(tmp_path / "classifier", "qwen2_scores")
    monkeypatch.setenv("HOME", str(tmp_path))
    values = []
    for path in (tmp_path / "classifier", Path("~/classifier")):
        critic = make_trainer(path, strategy, head=head)
        values.append(critic.logprobs(make_batch()).values_T)
    assert values[0].any() and torch.equal(*values)
