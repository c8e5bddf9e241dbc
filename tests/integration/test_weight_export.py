"""Weights of trained layouts on the ranks that send them: to the last bit, and nowhere else whole."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from roll.configs.engines import packages
from roll.distributed.strategy import STRATEGIES
from tests.support.harness import Layout, make_context, make_model
from tests.support.ranks import enter_rank, run_ranks, unpacked

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


def rank_main(rank: int, port: int, layouts: list[Layout], folder: Path) -> None:
    enter_rank(port)
    for layout in layouts:
        trainer: Any = STRATEGIES.get(layout.strategy)(make_context(layout, folder / layout.model, rank))
        trainer.setup()
        found: dict[str, Any] = {"weights": {}, "largest": {}}
        for targets in TARGETS:
            for again in range(2):  # the first time it looks up who has what
                with Largest() as largest:
                    weights = unpacked(trainer.export_weights(BUCKET_BYTES, targets, check=not again))
            found["weights"][targets], found["largest"][targets] = weights, largest.found
        torch.save(found, folder / f"{layout.id}-{rank}.pt")
        if hasattr(trainer, "shutdown"):
            trainer.shutdown()
    torch.distributed.barrier()
    os._exit(0)  # torch's threads sometimes abort the interpreter's own end


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export")
    for kind in {layout.model for layout in LAYOUTS}:
        make_model(path / kind, kind)
    by_engine: dict[str, list[Layout]] = {}
    for layout in LAYOUTS:
        if layout.strategy not in packages() or packages()[layout.strategy].installed:
            by_engine.setdefault(layout.strategy, []).append(layout)
    for layouts in by_engine.values():
        run_ranks(rank_main, 2, layouts, path)
    return path


def found_by(layout: Layout, folder: Path) -> list[dict[str, Any]]:
    files = [folder / f"{layout.id}-{rank}.pt" for rank in range(2)]
    if not files[0].exists():
        pytest.skip(f"{layout.strategy}: its package is not installed")
    return [torch.load(file, weights_only=False) for file in files]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.id)
def test_the_ranks_that_send_have_the_models_weights_to_the_last_bit(layout, folder):
    expected = load_file(folder / layout.model / "model.safetensors")
    for rank, found in enumerate(found_by(layout, folder)):
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
def test_a_rank_that_serves_nobody_never_has_a_whole_tensor(layout, folder):
    """But for what its layout has whole anyway: embeddings with the tensor parallelism of FSDP2, norms."""
    expected = load_file(folder / layout.model / "model.safetensors")
    cut = [name for name in expected if layout.id != "fsdp2_train-tp2" or "proj" in name]
    largest = max(expected[name].numel() for name in cut)
    first, second = found_by(layout, folder)
    for found, targets in ((first, (1,)), (second, (0,))):
        assert found["largest"][targets] < largest, "it made a whole tensor"
    assert first["largest"][(0,)] >= largest, "the measure sees those that do"
