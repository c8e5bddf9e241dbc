"""Models with a state in their layers, whose sequences share rows: as the model itself in float64, one by one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.data.batch import Batch
from roll.models.loading import load_causal_lm
from tests.support.choice import needs
from tests.support.families import tiny_config, tiny_model
from tests.support.pictured import plain_logprobs
from tests.support.ranks import run_ranks
from tests.support.trainers import gain_loss, make_batch, make_trainer, shares, step_and_gradient

FAMILIES = ("qwen3_next", "qwen3_5_text", "lfm2", "falcon_h1", "granitemoehybrid", "nemotron_h")
ENGINES = {"fsdp2_train": {}, "deepspeed_train": {"zero_optimization": {"stage": 1}}}


def trainer(model: Path, engine: str, strategy: dict[str, Any], rows: int, **options: Any) -> Any:
    needs(engine)
    sections = {
        "worker": {"use_sequence_packing": True, "infer_batch_size": rows},
        "training_args": {"per_device_train_batch_size": rows},
        "model_args": {"disable_gradient_checkpointing": rows == 2},
    }
    return make_trainer(model, engine, strategy, temperature=1.0, **sections, **options)


def oracle(folder: Path, batch: Batch) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Log-probabilities of the loss tokens, the loss, and its gradient."""
    model = load_causal_lm(str(folder), dtype=torch.float64)
    model.config._experts_implementation = "eager"  # grouped products know no float64
    logprobs = plain_logprobs(model, batch)[batch.loss_mask_T]
    loss = -(batch.advantages_T[batch.loss_mask_T] * logprobs).sum() / len(logprobs)
    loss.backward()
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logprobs.detach(), float(loss.detach()), gradient


@pytest.mark.parametrize(
    ("engine", "family"),
    [
        pytest.param(engine, family, marks=[] if (number + place) % 2 else [pytest.mark.slow])
        for number, engine in enumerate(ENGINES)
        for place, family in enumerate(FAMILIES)
    ],
)
def test_packed_rows_however_they_are_cut_give_what_the_model_gives_alone(tmp_path, engine, family):
    tiny_model(tiny_config(family)).save_pretrained(tmp_path)
    batch = make_batch()
    wanted, loss, gradient = oracle(tmp_path, batch)
    for rows in (2, 9):
        found = trainer(tmp_path, engine, ENGINES[engine], rows)
        logprobs = found.logprobs(batch).logprobs_T[batch.loss_mask_T]
        torch.testing.assert_close(logprobs.double(), wanted, rtol=0, atol=5e-5)
        metrics, gradients = step_and_gradient(found, batch, gain_loss)
        # Nine rows in twos leave one alone, which is compared as a padded one.
        assert found.own_forward.compared == ({"packed", "padded"} if rows == 2 else {"packed"})
        assert metrics["actor/loss"] == pytest.approx(loss, abs=2e-6)
        for name, value in gradient.items():
            wrong = (gradients[name].view_as(value).double() - value).norm() / value.norm().clamp(min=1e-3)
            assert wrong < 1e-3, name
        found.shutdown()


def rank_main(rank: int, model: Path) -> tuple[Tensor, dict[str, float]]:
    found = trainer(model, "fsdp2_train", {}, 4, rank=rank, world_size=2)
    return found.logprobs(shares(0)[rank]).logprobs_T, found.train_step(shares(0)[rank], gain_loss)


def test_ranks_that_share_weights_keep_step_though_their_rows_have_different_numbers_of_sequences(tmp_path):
    tiny_model(tiny_config("qwen3_5_text")).save_pretrained(tmp_path)
    (first, metrics), (second, _) = run_ranks(rank_main, 2, tmp_path)
    batch = make_batch()
    wanted, loss, _ = oracle(tmp_path, batch)
    found = torch.cat([first, second])
    torch.testing.assert_close(found[batch.loss_mask_T].double(), wanted, rtol=0, atol=5e-5)
    assert metrics["actor/loss"] == pytest.approx(loss, abs=2e-6)


def test_deepspeeds_stage_3_which_gathers_weights_at_each_run_of_a_layer_is_refused(tmp_path):
    tiny_model(tiny_config("lfm2")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"false with zero_optimization\.stage: 3: Lfm2ForCausalLM has layers"):
        trainer(tmp_path, "deepspeed_train", {"zero_optimization": {"stage": 3}}, 4)
