"""``optimizer: muon``: PyTorch's Muon on one rank, the same bits in every layout and after resuming; its matrices."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from roll.distributed.strategy.fsdp2 import muon
from roll.distributed.strategy.fsdp2.muon import layer_matrices, number_format
from roll.distributed.strategy.fsdp2.strategy import Fsdp2Train
from roll.distributed.strategy.training.optim import ADAM_STATE, MASTER, MOMENTUM
from tests.integration.test_fsdp2 import make_context, state_of
from tests.support.picture_models import make_picture_model
from tests.support.ranks import enter_rank, leave_rank, run_ranks
from tests.support.trainers import VOCABULARY, make_batch, policy_loss

LAYOUTS: dict[str, dict[str, Any]] = {
    "four": {},
    "groups": {"fsdp_size": 2},
    "tensor": {"tensor_parallel_size": 2},
    "replicas": {"fsdp_size": 1},
    "offload": {"cpu_offload": True},
}
STEPS = 2


def make_trainer(model: Path, strategy: dict[str, Any] | None = None, **kwargs: Any) -> Fsdp2Train:
    # Without clipping: the gradient's norm is a sum over shares, which rounds differently in each layout.
    args = {"optimizer": "muon", **kwargs.pop("training_args", {})}
    trainer = Fsdp2Train(make_context(model, strategy, training_args=args, max_grad_norm=0.0, **kwargs))
    trainer.setup()
    return trainer


def given_steps(trainer: Fsdp2Train) -> dict[str, Tensor]:
    """The state after steps with gradients that are drawn, not computed (collective)."""
    weights, generator = trainer.weights, torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for name, share in weights.trained.items():
            gradient = torch.randn(weights.shape(name), generator=generator)
            share.grad = weights.share(name, gradient).to(share.device).clone()
        trainer._gradients = []
        trainer.apply_gradients(0.01, 0.0)
    return state_of(trainer)


def train(trainer: Fsdp2Train, *, seeds: range = range(STEPS)) -> dict[str, Tensor]:
    """The state after steps whose samples the first rank has alone: a sum over ranks adds zeros."""
    for seed in seeds:
        batch = make_batch(seed=seed)
        rows = range(batch.num_sequences) if trainer.info.dp_rank == 0 else []
        trainer.train_step(batch.select(list(rows)), policy_loss)
    return state_of(trainer)


def ranks_main(rank: int, port: int, folder: Path, model: Path) -> None:
    enter_rank(port)
    for name, config in LAYOUTS.items():
        state = given_steps(make_trainer(model, config, rank=rank, world_size=4))
        if rank == 0:
            save_file(state, folder / f"{name}.safetensors")
    for name, config in {"trained": {}, "sharded": {"checkpoint": "sharded"}}.items():
        trainer = make_trainer(model, config, rank=rank, world_size=4)
        state = train(trainer)
        trainer.save(folder / f"checkpoint-{name}")
        if rank == 0:
            save_file(state, folder / f"{name}.safetensors")
        resumed = make_trainer(model, config, rank=rank, world_size=4)
        resumed.load(folder / f"checkpoint-{name}")
        pair = [train(each, seeds=range(STEPS, STEPS + 1)) for each in (trainer, resumed)]
        assert_equal(pair[1], pair[0])
    leave_rank()


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys() and found
    assert not [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    # Shares of whole vector registers: what is left over, AdamW's kernel rounds in another way.
    shape = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 4}
    path = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=VOCABULARY, num_hidden_layers=2, tie_word_embeddings=False, **shape)
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    path = tmp_path_factory.mktemp("muon")
    run_ranks(ranks_main, 4, path, model)
    return path


def test_one_rank_steps_as_pytorch_does(model, monkeypatch):
    monkeypatch.setattr(muon, "number_format", lambda _: torch.bfloat16)  # as PyTorch's has on a CPU too
    trainer = make_trainer(model)
    weights, chosen = trainer.weights, layer_matrices(trainer.weights)
    assert {name.rpartition(".layers.")[2].split(".", 1)[1] for name in chosen} == {
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    }
    copies = {name: torch.nn.Parameter(share.detach().clone()) for name, share in weights.trained.items()}
    others = [copies[name] for name in copies if name not in chosen]
    theirs = [
        torch.optim.Muon([copies[n] for n in chosen], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for p in others if p.ndim > 1], lr=0.01, weight_decay=0.1, fused=True),
        torch.optim.AdamW([p for p in others if p.ndim < 2], lr=0.01, weight_decay=0.0, fused=True),
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for copy in copies.values():
            copy.grad = torch.randn(copy.shape, generator=generator)
        for optimizer in theirs:
            optimizer.step()
    found = given_steps(trainer)
    assert_equal({name: found[f"{name}.{MASTER}"] for name in copies}, {n: c.detach() for n, c in copies.items()})
    for name in copies:
        assert weights.kinds(name) == ([MOMENTUM] if name in chosen else [*ADAM_STATE])


def test_the_iteration_has_sixteen_bits_on_gpus_alone():
    formats = {kind: number_format(torch.device(kind)) for kind in ("cpu", "cuda")}
    assert formats == {"cpu": torch.float32, "cuda": torch.bfloat16}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_matrices_of_a_tower_and_its_projector_are_among_them(tmp_path, family):
    path = make_picture_model(tmp_path / "model", family)
    context = make_context(path, training_args={"optimizer": "muon"})
    trainer = Fsdp2Train(replace(context, pictures=True))
    trainer.setup()
    chosen = [name for name in layer_matrices(trainer.weights) if ".visual." in name]
    matrices = {name: p for name, p in trainer.weights.parameters.items() if ".visual." in name and p.ndim == 2}
    assert {name for name in matrices if "pos_embed" not in name} == {*chosen}
    assert any("merger" in name for name in chosen) and any("blocks" in name for name in chosen)


@pytest.mark.slow  # four processes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_steps_as_one_rank_does(folder, model, layout):
    assert_equal(load_file(folder / f"{layout}.safetensors"), given_steps(make_trainer(model)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trained", "sharded"])
def test_four_ranks_train_and_resume_as_one(folder, model, name):
    trainer = make_trainer(model)
    state = train(trainer)
    assert_equal(load_file(folder / f"{name}.safetensors"), state)
    if name == "trained":
        resumed = make_trainer(model)
        resumed.load(folder / f"checkpoint-{name}")
        assert_equal(state_of(resumed), state)
        pair = [train(each, seeds=range(STEPS, STEPS + 1)) for each in (trainer, resumed)]
        assert_equal(pair[1], pair[0])


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path, model):
    trainer = make_trainer(model)
    trainer.save(tmp_path)
    other = make_trainer(model, training_args={"optimizer": "adamw"})
    with pytest.raises(ValueError, match=r"its optimizer has exp_avg, exp_avg_sq, momentum_buffer; expected exp_avg, "):
        other.load(tmp_path)
