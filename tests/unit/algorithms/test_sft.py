"""Supervised training against plain PyTorch in float64: the same step however conversations are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.algorithms.losses import SFT_NEEDS, build_sft_loss
from roll.data.batch import Batch
from roll.data.renderer import ChatRenderer
from roll.distributed.strategy.fsdp2.strategy import Fsdp2Train
from roll.models.tiny import make_tiny_model, make_tokenizer
from tests.support.imitation import Imitator
from tests.support.trainers import make_context

TALKS = [
    [("user", "3 + 4"), ("assistant", "7")],
    [
        ("user", "Up?"),
        ("assistant", "Up"),
        ("user", "again"),
        ("assistant", "Down Down"),
        ("user", "?"),
        ("assistant", "ok"),
    ],
    [("system", "S"), ("user", "a longer question than the others"), ("assistant", "yes")],
    [("user", "a"), ("assistant", "an answer of many tokens, so that means differ")],
    [("user", "b"), ("assistant", "Left"), ("user", "c"), ("assistant", "Right")],
]
CUTTINGS: dict[str, dict[str, Any]] = {
    "one by one": {"training_args": {"per_device_train_batch_size": 1}},
    "all at once": {"training_args": {"per_device_train_batch_size": 8}},
    "by tokens": {"worker": {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 80}},
    "packed": {
        "worker": {
            "use_dynamic_batching_in_train": True,
            "max_tokens_per_microbatch_in_train": 120,
            "use_sequence_packing": True,
        }
    },
}


class Probed(Fsdp2Train):
    """Keeps the gradient of the last step, as it is before clipping."""

    gradient: dict[str, Tensor]

    def apply_gradients(self, rate: float, norm: float) -> None:
        self.gradient = {n.removeprefix("model."): p.grad.clone() for n, p in self.weights.local.items()}
        super().apply_gradients(rate, norm)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sft") / "tiny"
    make_tiny_model(path, seed=3)
    return path


@pytest.fixture(scope="module")
def batch() -> Batch:
    renderer = ChatRenderer(make_tokenizer())
    rows = [renderer.conversation([{"role": role, "content": text} for role, text in talk]) for talk in TALKS]
    lengths_B = torch.tensor([len(ids) for ids, _ in rows])
    tokens_T, mask_T = (torch.cat([torch.from_numpy(row[i]) for row in rows]) for i in range(2))
    return Batch(lengths_B, tokens_T, mask_T)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_step_is_that_of_float64_however_the_conversations_are_cut(model: Path, batch: Batch, mode: Any) -> None:
    oracle = Imitator(model)
    loss = oracle.loss(TALKS, per_row=mode != "token-mean")
    loss.backward()
    for name, cutting in CUTTINGS.items():
        options = {"temperature": 1.0, "max_grad_norm": 1e9, "needs": SFT_NEEDS, **cutting}
        trainer = Probed(make_context(model, "fsdp2_train", **options))
        trainer.setup()
        scores = trainer.logprobs(batch)
        assert scores.top1_T is not None
        assert float(scores.top1_T[batch.loss_mask_T].mean()) == pytest.approx(oracle.accuracy(TALKS)), name
        metrics = trainer.train_step(batch, build_sft_loss(mode))
        assert metrics["sft/loss"] == pytest.approx(loss.item(), rel=2e-6), name
        assert metrics["sft/token_accuracy"] == pytest.approx(oracle.accuracy(TALKS)), name
        for weight, parameter in oracle.model.named_parameters():
            ours = trainer.gradient[weight]
            torch.testing.assert_close(ours.double(), parameter.grad, rtol=2e-4, atol=2e-6)
