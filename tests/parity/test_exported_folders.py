"""Folders of ``roll export`` from the checkpoints of every trainer: Transformers loads the trainer's own weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from roll.distributed.strategy.training.checkpoint import resume_folder
from roll.distributed.strategy.training.exchange import gather
from roll.distributed.strategy.training.merging import Export, export_folder
from roll.distributed.strategy.training.optim import MASTER
from roll.models.lora import PREFIX
from tests.support.harness import ADAPTER, Layout, cases, differ, make_batch, make_model, needs, started, take_steps
from tests.support.layouts_deepspeed import zero
from tests.support.layouts_megatron import EP, PP, TP
from tests.support.ranks import run_ranks

SHARDED = {"checkpoint": "sharded"}
BF16 = {"model_args": {"dtype": "bf16"}}
FSDP2 = [
    Layout("shards", "fsdp2_train", 2, SHARDED, model="qwen3_moe", **BF16),
    Layout("adapter-shards", "fsdp2_train", 2, SHARDED, lora=ADAPTER),
    Layout("whole", "fsdp2_train", 2, model="qwen3_moe", **BF16),
    Layout("fp32", "fsdp2_train", 2, {"fsdp_size": 1}),
]
DEEPSPEED = [
    Layout("zero3", "deepspeed_train", 2, zero(3), slow=True, **BF16),
    Layout("zero1-adapter", "deepspeed_train", 2, zero(1), slow=True, lora=ADAPTER),
]
MEGATRON = [
    Layout("experts", "megatron_train", 2, {EP: 2}, slow=True, model="qwen3_moe", **BF16),
    Layout("tensor", "megatron_train", 2, {TP: 2}, slow=True, **BF16),
    Layout("stages-adapter", "megatron_train", 2, {PP: 2}, slow=True, lora=ADAPTER),
]
LAYOUTS = [*FSDP2, *DEEPSPEED, *MEGATRON]


def rank_main(rank: int, layouts: list[Layout], folder: Path) -> dict[str, Any]:
    """What was trained, on the first rank, and the log-probabilities, by layout."""
    found = {}
    for layout in layouts:
        trainer = started(layout, folder / layout.model, rank)
        take_steps(trainer, 0, 1)
        trainer.save(folder / layout.name)
        trained = {name: tensor.clone() for name, tensor in gather(trainer.trained.tensors(MASTER), [0]).items()}
        found[layout.name] = trained, trainer.logprobs(make_batch(0)).logprobs_T
    return found


class Runs:
    """Checkpoints by layout, made when the first of an engine is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, Any] = {}
        for name in ("qwen2", "qwen3_moe"):
            make_model(folder / name, name)

    def of(self, layout: Layout) -> Path:
        needs(layout.strategy)
        if layout.name not in self.found:
            engine = [each for each in LAYOUTS if each.strategy == layout.strategy]
            self.found |= run_ranks(rank_main, 2, engine, self.folder)[0]
        return self.folder / layout.name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def export_of(checkpoint: Path, **options: Any) -> Export:
    return Export(checkpoint / "actor_train", resume_folder(checkpoint, "actor_train"), **options)


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def expected_weights(runs: Runs, layout: Layout) -> dict[str, Tensor]:
    """The module's weights: what was trained, or the base with ``W + scale·B·A`` in float64."""
    trained, _ = runs.found[layout.name]
    if layout.lora is None:
        return trained
    weights = {name: tensor.detach() for name, tensor in load(runs.folder / layout.model).named_parameters()}
    for name in [name for name in trained if ".lora_A." in name]:
        a, b = trained[name].double(), trained[name.replace("lora_A", "lora_B")].double()
        key = name.removeprefix(PREFIX).replace(".lora_A", "")
        weights[key] = (weights[key].double() + layout.lora.alpha / layout.lora.rank * b @ a).float()
    return weights


@pytest.mark.parametrize("layout", cases(LAYOUTS))
def test_the_folder_has_the_trained_weights_to_the_bit(runs, layout, tmp_path):
    checkpoint = runs.of(layout)
    merges = layout.lora is not None
    exported = export_folder(
        export_of(checkpoint, dtype=torch.float32, merge=merges, max_file_bytes=20_000), tmp_path / "model"
    )
    assert exported.num_files > 2 and (tmp_path / "model" / "model.safetensors.index.json").is_file()
    found = {name: tensor.detach() for name, tensor in load(tmp_path / "model").named_parameters()}
    expected = expected_weights(runs, layout)
    assert found.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not found[name].equal(tensor)]
    start = dict(load(runs.folder / layout.model).named_parameters())
    assert sum(not tensor.equal(start[name]) for name, tensor in found.items()) >= 12, "it was trained"


@pytest.mark.parametrize("layout", cases(LAYOUTS))
def test_the_folder_gives_the_policys_probabilities(runs, layout, tmp_path):
    checkpoint = runs.of(layout)
    export_folder(export_of(checkpoint, merge=layout.lora is not None), tmp_path / "model")
    bits = layout.model_args.get("dtype") == "bf16"
    stored = {tensor.dtype for tensor in load_file(tmp_path / "model" / "model.safetensors").values()}
    assert stored == {torch.bfloat16 if bits else torch.float32}
    _, scores = runs.found[layout.name]
    assert differ(scores, tmp_path / "model") <= (0.08 if bits else 1e-5)


def save_shards(folder: Path) -> dict[str, Tensor]:
    """Of a model that is partly frozen; returns all of its weights as they were at the end."""
    frozen = {"freeze_module_prefix": "model.embed_tokens,model.layers.0"}
    layout = Layout("frozen", "fsdp2_train", 1, SHARDED, model_args=frozen)
    trainer = started(layout, make_model(folder / "model", "qwen2"))
    take_steps(trainer, 0)
    trainer.save(folder / "checkpoint")
    return {name.removeprefix("model."): one.detach() for name, one in trainer.weights.parameters.items()}


def test_shards_have_what_is_frozen_too(tmp_path):
    expected = save_shards(tmp_path)
    export_folder(export_of(tmp_path / "checkpoint"), tmp_path / "exported")
    found = dict(load(tmp_path / "exported").named_parameters())
    assert found.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not found[name].equal(tensor)]


def test_shards_of_an_earlier_version_lack_what_is_frozen(tmp_path, monkeypatch):
    monkeypatch.setattr("roll.distributed.strategy.fsdp2.weights.is_adapter", lambda name: True)
    save_shards(tmp_path)
    with pytest.raises(ValueError, match=r"no model\.embed_tokens\.weight in it, an earlier version left out"):
        export_folder(export_of(tmp_path / "checkpoint"), tmp_path / "exported")


def _save_replaced(rank: int, strategy: str, model: Path, folder: Path) -> Tensor:
    replaced = {"model_config_kwargs": {"rms_norm_eps": 0.25}}
    trainer = started(Layout("eps", strategy, 1, model_args=replaced), model, rank)
    trainer.save_model(folder / "saved")
    return trainer.logprobs(make_batch(0)).logprobs_T


@pytest.mark.parametrize("strategy", ["fsdp2_train", "deepspeed_train", "megatron_train"])
def test_a_saved_model_is_configured_as_it_was_trained(strategy, tmp_path):
    needs(strategy)
    (logprobs_T,) = run_ranks(_save_replaced, 1, strategy, make_model(tmp_path / "model", "qwen2"), tmp_path)
    assert differ(logprobs_T, tmp_path / "saved") <= 1e-5


@pytest.mark.parametrize("layout", [layout for layout in FSDP2 if layout.lora])
def test_an_adapter_that_is_not_merged_is_one_of_peft(runs, layout, tmp_path):
    from peft import PeftModel

    checkpoint = runs.of(layout)
    export_folder(export_of(checkpoint), tmp_path / "adapter")
    model = PeftModel.from_pretrained(load(runs.folder / layout.model), tmp_path / "adapter").merge_and_unload()
    expected = expected_weights(runs, layout)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-6)
