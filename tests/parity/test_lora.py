"""LoRA in ``fsdp2_train``: the steps of plain peft in float64, for every layout, and folders that peft reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import (
    ENTROPY_COEF,
    MAX_GRAD_NORM,
    TEMPERATURE,
    TOTAL_STEPS,
    TRAINING,
    Layout,
    make_batch,
    make_context,
    make_model,
    policy_loss,
)
from ranks import assert_near, enter_rank, leave_rank, run_ranks, unpacked
from safetensors.torch import load_file, save_file
from torch import Tensor

from roll.configs.worker import WorkerConfig
from roll.distributed.strategy.base import LoraSpec
from roll.distributed.strategy.fsdp2.strategy import Fsdp2Train
from roll.distributed.strategy.optim import learning_rate
from roll.models.loading import load_causal_lm
from roll.models.lora import ADAPTER_FILE, adapter_dropout, inject_adapter

pytest.importorskip("peft", reason="peft is not installed")

SPEC = LoraSpec(rank=3, alpha=8, targets=("q_proj", "v_proj", "down_proj"))
LAYOUTS = {
    "alone": Layout("alone", "fsdp2_train", 1),
    "replica": Layout("replica", "fsdp2_train", 2, {"fsdp_size": 1}),
    "shards": Layout("shards", "fsdp2_train", 2, {"checkpoint": "sharded"}),
    "sequences": Layout("sequences", "fsdp2_train", 2, model_args={"ulysses_size": 2}),
    "recomputed": Layout("recomputed", "fsdp2_train", 2, model_args={"disable_gradient_checkpointing": False}),
    "bf16": Layout("bf16", "fsdp2_train", 2, model_args={"dtype": "bf16"}),
}
NUM_STEPS = 3


def make_trainer(layout: Layout, model: Path, rank: int, spec: LoraSpec = SPEC) -> Fsdp2Train:
    trainer = Fsdp2Train(replace(make_context(layout, model, rank), lora=spec))
    trainer.setup()
    return trainer


def train(trainer: Fsdp2Train, steps: range) -> list[dict[str, float]]:
    info, metrics = trainer.info, []
    for step in steps:
        batch = make_batch(step)
        metrics.append(trainer.train_step(batch.select(batch.split(info.dp_size)[info.dp_rank]), policy_loss))
    return metrics


def scores(trainer: Fsdp2Train, adapter: bool) -> Tensor:
    """Of the whole batch, whatever the rank's share is."""
    batch = make_batch(0)
    return trainer.logprobs(batch, adapter=adapter).logprobs_T


def run(name: str, model: Path, folder: Path, rank: int) -> None:
    trainer = make_trainer(LAYOUTS[name], model, rank)
    result = {"start": unpacked(trainer.export_adapter(500)), "base": unpacked(trainer.export_weights(5000))}
    losses = train(trainer, range(2))
    trainer.save(folder / f"{name}-checkpoint")
    losses += train(trainer, range(2, NUM_STEPS))
    result["end"] = unpacked(trainer.export_adapter(10_000))
    result["scores"] = {"on": scores(trainer, True), "off": scores(trainer, False)}
    trainer.load(folder / f"{name}-checkpoint")
    train(trainer, range(2, NUM_STEPS))
    result["resumed"] = unpacked(trainer.export_adapter(10_000))
    if rank == 0:
        flat = {f"{part}/{key}": tensor for part, tensors in result.items() for key, tensor in tensors.items()}
        save_file(flat, folder / f"{name}.safetensors")
        (folder / f"{name}.json").write_text(json.dumps(losses))


def rank_main(rank: int, port: int, model: Path, folder: Path) -> None:
    enter_rank(port)
    for name, layout in LAYOUTS.items():
        if layout.world_size == 2:
            run(name, model, folder, rank)
    leave_rank()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("lora") / "model", "qwen2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    path = tmp_path_factory.mktemp("runs")
    run("alone", model, path, 0)
    run_ranks(rank_main, 2, model, path)
    return path


def part(folder: Path, name: str, key: str) -> dict[str, Tensor]:
    tensors = load_file(folder / f"{name}.safetensors")
    return {k.removeprefix(f"{key}/"): v for k, v in tensors.items() if k.startswith(f"{key}/")}


def peft_model(model: Path, adapter: dict[str, Tensor]) -> Any:
    """Plain peft in float64."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    config = LoraConfig(r=SPEC.rank, lora_alpha=SPEC.alpha, target_modules=list(SPEC.targets), lora_dropout=0.0)
    found = get_peft_model(load_causal_lm(str(model)), config).double()
    report = set_peft_model_state_dict(found, adapter)
    assert not report.unexpected_keys
    return found.double().eval()


def peft_logprobs(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the loss tokens, one sequence at a time."""
    logprobs, entropies = [], []
    for row in range(batch.num_sequences):
        one = batch.select([row])
        all_logprobs = (model(one.tokens_T[None], use_cache=False).logits[0].double() / TEMPERATURE).log_softmax(-1)
        for position in one.loss_mask_T.nonzero().flatten().tolist():
            p = all_logprobs[position - 1]
            logprobs.append(p[one.tokens_T[position]])
            entropies.append(-(p.exp() * p).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.fixture(scope="module")
def oracle(folder: Path, model: Path) -> dict[str, Any]:
    trained = peft_model(model, part(folder, "alone", "start"))
    parameters = [p for p in trained.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1.0, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.1)
    args = WorkerConfig.model_validate({"training_args": TRAINING}).training_args
    losses, norms = [], []
    for step in range(NUM_STEPS):
        batch = make_batch(step)
        logprobs, entropies = peft_logprobs(trained, batch)
        loss = -(batch.advantages_T[batch.loss_mask_T] * logprobs + ENTROPY_COEF * entropies).mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step, TOTAL_STEPS)
        optimizer.step()
        losses.append(loss.item())
    from peft import get_peft_model_state_dict

    with torch.no_grad():
        after = peft_logprobs(trained, make_batch(0))[0]
        with trained.disable_adapter():
            before = peft_logprobs(trained, make_batch(0))[0]
    adapter = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(trained).items()}
    return {"losses": losses, "norms": norms, "adapter": adapter, "on": after, "off": before}


@pytest.mark.parametrize("name", LAYOUTS)
def test_adapter_learns_as_plain_peft_does(folder: Path, oracle: dict[str, Any], name: str) -> None:
    bf16 = name == "bf16"
    assert_near(part(folder, name, "start"), part(folder, "alone", "start"), 0.0)
    assert_near(part(folder, name, "end"), oracle["adapter"], 3e-3 if bf16 else 5e-6)
    metrics = json.loads((folder / f"{name}.json").read_text())
    for step, found in enumerate(metrics):
        assert found["actor/loss"] == pytest.approx(oracle["losses"][step], abs=0.02 if bf16 else 2e-6)
        assert found["actor/grad_norm"] == pytest.approx(oracle["norms"][step], rel=0.05 if bf16 else 2e-6)


@pytest.mark.parametrize("name", LAYOUTS)
def test_scores_with_the_adapter_off_are_the_base_models(folder: Path, oracle: dict[str, Any], name: str) -> None:
    found, mask = part(folder, name, "scores"), make_batch(0).loss_mask_T
    for key in ("on", "off"):
        torch.testing.assert_close(
            found[key][mask].double(), oracle[key], rtol=0, atol=0.06 if name == "bf16" else 5e-6
        )
    assert (found["on"] - found["off"]).abs().max() > 1e-3


@pytest.mark.parametrize("name", LAYOUTS)
def test_resumed_adapter_equals_the_uninterrupted_one_bit_for_bit(folder: Path, name: str) -> None:
    assert_near(part(folder, name, "resumed"), part(folder, name, "end"), 0.0)


def test_base_weights_leave_under_plain_names_unchanged(folder: Path, model: Path) -> None:
    for name in ("alone", "shards"):
        expected = {n: t for n, t in load_causal_lm(str(model)).state_dict().items() if n != "lm_head.weight"}
        assert_near(part(folder, name, "base"), expected, 0.0)


@pytest.mark.parametrize("name", ["replica", "shards"])
def test_checkpoint_of_two_ranks_continues_on_one(folder: Path, model: Path, oracle: dict[str, Any], name: str) -> None:
    trainer = make_trainer(LAYOUTS["alone"], model, 0)
    trainer.load(folder / f"{name}-checkpoint")
    train(trainer, range(2, NUM_STEPS))
    assert_near(unpacked(trainer.export_adapter(10_000)), oracle["adapter"], 5e-6)


def test_checkpoint_is_a_folder_that_peft_loads(folder: Path, model: Path) -> None:
    from peft import PeftModel

    checkpoint = folder / "replica-checkpoint"
    assert not list(checkpoint.glob("model*.safetensors")), "the frozen weights are not written again"
    assert not [f for f in checkpoint.rglob("*") if f.suffix in (".pt", ".bin", ".metadata", ".distcp")]
    loaded = PeftModel.from_pretrained(load_causal_lm(str(model)), checkpoint)
    trainer = make_trainer(LAYOUTS["alone"], model, 0)
    trainer.load(checkpoint)
    with torch.no_grad():
        expected, _ = peft_logprobs(loaded.eval(), make_batch(0))
    found = scores(trainer, True)[make_batch(0).loss_mask_T]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-6)
    assert set(load_file(checkpoint / ADAPTER_FILE)) == set(part(folder, "replica", "start"))


def test_all_linear_means_all_but_the_output_layer(model: Path) -> None:
    trainer = make_trainer(LAYOUTS["alone"], model, 0, replace(SPEC, targets=("all-linear",)))
    names = {name.split(".lora_")[0].rpartition(".")[2] for name in unpacked(trainer.export_adapter(10_000))}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_dropout_acts_in_training_only(model: Path) -> None:
    trainer = make_trainer(LAYOUTS["alone"], model, 0, replace(SPEC, dropout=0.5))
    scorer = trainer.weights.scorer
    assert not any(module.training for module in scorer.model.modules())
    train(trainer, range(1))
    assert torch.equal(scores(trainer, True), scores(trainer, True))
    ids = make_batch(0).tokens_T[None, :12].to(scorer.device)
    with torch.no_grad(), adapter_dropout(scorer):
        first, second = (scorer.model(ids).logits for _ in range(2))
    assert not torch.equal(first, second)
    assert not any(module.training for module in scorer.model.modules())


def test_unknown_target_is_refused_with_the_nearest_names(model: Path) -> None:
    with pytest.raises(ValueError, match=r"lora_target: 'qproj' matches no linear layer.*the nearest: q_proj"):
        inject_adapter(load_causal_lm(str(model)), replace(SPEC, targets=("v_proj", "qproj")))


def test_what_has_no_adapter_says_so(model: Path) -> None:
    trainer = Fsdp2Train(make_context(LAYOUTS["alone"], model, 0))
    trainer.setup()
    with pytest.raises(ValueError, match="no LoRA adapter to export"):
        trainer.export_adapter(1000)
    with pytest.raises(ValueError, match="no LoRA adapter to leave out"):
        trainer.logprobs(make_batch(0), adapter=False)
    layout = replace(LAYOUTS["alone"], strategy_config={"tensor_parallel_size": 2})
    with pytest.raises(ValueError, match="tensor_parallel_size: 2, expected 1 with lora_target"):
        Fsdp2Train(replace(make_context(layout, model, 0), lora=SPEC))._load(
            Fsdp2Train(make_context(layout, model, 0))._strategy_config()
        )


def test_missing_peft_names_the_extra(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "peft" else find(name, *args))
    with pytest.raises(ImportError, match=r"'peft' is not installed.*roll-rl\[lora\]"):
        make_trainer(LAYOUTS["alone"], model, 0)
