"""Autocast reaches the experts of a mixture, and exports the device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roll.distributed.strategy.fsdp2.weights import Weights
from roll.distributed.strategy.training.optim import MASTER
from tests.support.families import tiny_config, tiny_model
from tests.support.trainers import make_batch, make_trainer, policy_loss


class Products(TorchDispatchMode):
    """Number formats of what matrix products read."""

    def __init__(self) -> None:
        super().__init__()
        self.formats: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in (name := func.overloadpacket.__name__):
            self.formats.setdefault(name, set()).update(arg.dtype for arg in args[:2])
        return func(*args, **kwargs or {})


def test_experts_of_a_lone_rank_compute_in_bf16(tmp_path):
    tiny_model(tiny_config("qwen3_moe")).save_pretrained(tmp_path)
    trainer = make_trainer(tmp_path, "fsdp2_train", {"param_dtype": "bf16"})
    with Products() as products:
        trainer.train_step(make_batch(), policy_loss)
    assert products.formats["_grouped_mm"] == {torch.bfloat16}
    assert {parameter.grad.dtype for parameter in trainer.weights.trained.values()} == {torch.float32}


@pytest.mark.parametrize(("kind", "device"), [(MASTER, "meta"), ("exp_avg", "cpu")])
def test_weights_that_stay_in_host_memory_are_made_whole_on_the_device(kind, device):
    weights: Any = SimpleNamespace(
        local={"w": torch.zeros(2)},
        device=torch.device("meta"),
        shape=lambda name: torch.Size([4]),
        _unpacked=lambda name, shape: tuple(shape),
        _regions=lambda name: [],
    )
    assert Weights.spread(weights, "w", kind, torch.bfloat16).device == torch.device(device)
