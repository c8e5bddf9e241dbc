"""Options of ``fsdp2_train`` on one GPU: each changes speed or memory, and the gradient only by rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.algorithms.losses import build_sft_loss
from roll.configs.worker import WorkerConfig
from roll.data.batch import Batch
from roll.distributed.strategy.base import StrategyContext
from roll.distributed.strategy.fsdp2 import strategy
from roll.distributed.strategy.fsdp2.strategy import Fsdp2Train
from roll.models.lora import LoraSpec
from roll.models.tiny import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")]
SPEC = LoraSpec(rank=4, alpha=8, targets=("q_proj", "down_proj"))


class Probed(Fsdp2Train):
    gradient: dict[str, Tensor]

    def apply_gradients(self, rate: float, norm: float) -> None:
        assert all(share.is_cuda for share in self.weights.trained.values())
        self.gradient = {name: share.grad.cpu() for name, share in self.weights.trained.items()}
        super().apply_gradients(rate, norm)


def gradient(
    path: Path, model_args: dict[str, Any], config: dict[str, Any], lora: LoraSpec | None
) -> dict[str, Tensor]:
    worker = WorkerConfig.model_validate(
        {
            "model_args": {"dtype": "fp32"} | model_args,
            "strategy_args": {"strategy_name": "fsdp2_train", "strategy_config": config},
        }
    )
    trainer = Probed(StrategyContext(worker=worker, role="actor_train", model_path=str(path), lora=lora))
    trainer.setup()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([7, 12, 9])
    mask = torch.zeros(28, dtype=torch.bool)
    mask[[5, 6, 15, 16, 17, 18, 26, 27]] = True
    tokens = torch.randint(0, 300, (28,), generator=generator)
    for _ in range(2):  # an adapter's first gradient is half zero
        trainer.train_step(Batch(lengths_B=lengths, tokens_T=tokens, loss_mask_T=mask), build_sft_loss())
    return trainer.gradient


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(path, seed=0)
    return path


@pytest.mark.parametrize("lora", [None, SPEC], ids=["all weights", "adapter"])
@pytest.mark.parametrize("option", ["activation_offload", "liger"])
def test_option_does_not_change_the_gradient(model_path, option, lora, monkeypatch):
    monkeypatch.setattr(strategy, "MIN_BYTES", 0)
    expected = gradient(model_path, {}, {}, lora)
    if option == "liger":
        pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
        found = gradient(model_path, {"use_liger_kernel": True}, {}, lora)
    else:
        found = gradient(model_path, {}, {"activation_offload": True}, lora)
        assert strategy._side_stream(torch.device("cuda", 0)) != torch.cuda.current_stream()
        assert strategy._side_stream.cache_info().hits > 0
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)
