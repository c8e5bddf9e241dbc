"""Supervised training against plain PyTorch in float64: the same step however conversations are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.algorithms.losses import build_sft_loss
from roll.data.batch import Batch
from roll.data.renderer import ChatRenderer
from roll.distributed.strategy.fsdp2.strategy import Fsdp2Train
from roll.models.tiny import make_tiny_model, make_tokenizer
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
        weights = self.weights
        self.gradient = {n.removeprefix("model."): weights.join(n, p.grad).clone() for n, p in weights.local.items()}
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
    return Batch.concat(
        [Batch(torch.tensor([len(ids)]), torch.from_numpy(ids), torch.from_numpy(mask)) for ids, mask in rows]
    )


def expected(path: Path, per_row: bool) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient, token by token from the text: what follows an opened assistant turn, up to its end."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(path).double(), AutoTokenizer.from_pretrained(path)
    opening = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    sums, counts = [], []
    for talk in TALKS:
        text = "".join(f"<|im_start|>{role}\n{words}<|im_end|>\n" for role, words in talk)
        ids = tokenizer.encode(text, add_special_tokens=False)
        logprobs = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        total, count, speaking = torch.zeros((), dtype=torch.float64), 0, False
        for position, token in enumerate(ids):
            if speaking:
                total, count = total - logprobs[position - 1, token], count + 1
                speaking = token != tokenizer.eos_token_id
            elif ids[max(0, position - len(opening) + 1) : position + 1] == opening:
                speaking = True
        sums.append(total)
        counts.append(count)
    if per_row:
        loss = torch.stack([total / count for total, count in zip(sums, counts, strict=True)]).mean()
    else:
        loss = torch.stack(sums).sum() / sum(counts)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_step_is_that_of_float64_however_the_conversations_are_cut(model: Path, batch: Batch, mode: Any) -> None:
    loss, gradient = expected(model, per_row=mode != "token-mean")
    for name, cutting in CUTTINGS.items():
        trainer = Probed(make_context(model, "fsdp2_train", temperature=1.0, max_grad_norm=1e9, **cutting))
        trainer.setup()
        metrics = trainer.train_step(batch, build_sft_loss(mode))
        assert metrics["sft/loss"] == pytest.approx(loss, rel=2e-6), name
        for weight, grad in gradient.items():
            ours = trainer.gradient[weight]
            torch.testing.assert_close(ours.double(), grad, rtol=2e-4, atol=2e-6)
