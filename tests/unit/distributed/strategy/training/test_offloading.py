"""What leaves a GPU and comes back is what was asked for, through pinned memory."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll.distributed.strategy.base import States
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
