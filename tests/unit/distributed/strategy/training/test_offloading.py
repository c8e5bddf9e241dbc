"""What leaves a GPU and comes back is what was asked for, through pinned memory; activations to the last bit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from roll.distributed.strategy.base import States
from roll.distributed.strategy.fsdp2 import strategy
from roll.distributed.strategy.fsdp2.strategy import OffloadedActivations
from roll.distributed.strategy.training import checkpoint


def test_room_in_host_memory_is_pinned(monkeypatch):
    rooms: list[dict[str, Any]] = []

    def room(tensor: Any, **options: Any) -> Any:
        rooms.append(options)
        return SimpleNamespace(copy_=lambda source, non_blocking: ("copied", non_blocking))

    monkeypatch.setattr(checkpoint.torch, "empty_like", room)
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    assert checkpoint.to_device(on_gpu, torch.device("cpu")) == ("copied", True)
    assert rooms == [{"device": torch.device("cpu"), "pin_memory": True}]


def test_zero_2_brings_back_its_weights_alone_while_the_optimizer_stays_away():
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    from roll.distributed.strategy.deepspeed.weights import PartitionedOptimizer

    class Engine:
        """Takes out what it is told to, and brings back everything that it has noted, as DeepSpeed does."""

        def __init__(self) -> None:
            self.basic_optimizer = None
            self.optimizer = SimpleNamespace(offload_states=True, offloaded_states=set())
            self.brought: list[set[str]] = []

        def offload_states(self, include: set[Any]) -> None:
            self.optimizer.offloaded_states |= include

        def reload_states(self) -> None:
            self.brought.append({state.value for state in self.optimizer.offloaded_states})
            self.optimizer.offloaded_states.clear()

    engine = Engine()
    scorer: Any = SimpleNamespace(named_parameters=lambda: [])
    weights = PartitionedOptimizer(engine, scorer, torch.device("cpu"))
    weights.leave(States.WEIGHTS | States.OPTIMIZER)
    weights.come_back(States.WEIGHTS)
    assert engine.brought == [{"lp_params"}]
    weights.leave(States.WEIGHTS)
    weights.come_back(States.WEIGHTS | States.OPTIMIZER)
    assert engine.brought[1] == {"lp_params", "hp_params", "optim_states"}


def test_gradient_is_the_same_parameters_stay_and_each_one_fetches_the_one_before(monkeypatch):
    monkeypatch.setattr(strategy, "MIN_BYTES", 0)
    order: list[tuple[str, int]] = []
    shapes: set[tuple[int, ...]] = set()

    class Watched(strategy._Away):
        def fetch(self) -> None:
            if self._back is None:
                order.append(("fetch", self.number))
            super().fetch()

        def take(self) -> torch.Tensor:
            order.append(("take", self.number))
            shapes.add(tuple(self._host.shape))
            return super().take()

    monkeypatch.setattr(strategy, "_Away", Watched)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4), nn.LayerNorm(4))
    inputs = torch.randn(3, 8)
    expected = torch.autograd.grad(model(inputs).square().sum(), list(model.parameters()))
    with OffloadedActivations():
        loss = model(inputs).square().sum()
    found = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert {(3, 16), (3, 8)} <= shapes
    assert not shapes & {tuple(view.shape) for p in model.parameters() for view in (p, p.t() if p.ndim == 2 else p)}
    taken = [number for what, number in order if what == "take"]
    assert len(taken) == len(set(taken)) > 3
    for number in taken[:-1]:  # under way before the backward pass has the one that follows it
        assert order.index(("fetch", number - 1)) < order.index(("take", number)) or number - 1 not in taken


def test_a_tensor_comes_back_with_its_strides(monkeypatch):
    """Attention kernels of a GPU look at them: the mask's rows are padded, and a head's share may be transposed."""
    monkeypatch.setattr(strategy, "MIN_BYTES", 0)
    padded = torch.randn(2, 1, 5, 8)[..., :6].expand(2, 3, 5, 6)
    transposed = torch.randn(2, 5, 3, 4).transpose(1, 2)
    saved: list[torch.Tensor] = []

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *others):
            ctx.save_for_backward(*others)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            saved.extend(ctx.saved_tensors)
            return gradient, None, None

    leaf = torch.zeros((), requires_grad=True)
    with OffloadedActivations():
        result = Save.apply(leaf, padded, transposed)
    result.backward()
    for found, expected in zip(saved, (padded, transposed), strict=True):
        assert found.stride() == expected.stride()
        assert torch.equal(found, expected)
    assert saved[0].data_ptr() == padded.data_ptr(), "stays where it is"
    assert saved[1].data_ptr() != transposed.data_ptr()
