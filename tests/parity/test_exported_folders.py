"""Folders of ``roll export`` from the checkpoints of every trainer: Transformers loads the trainer's own weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from roll.configs.engines import packages
from roll.distributed.strategy import STRATEGIES
from roll.distributed.strategy.training.checkpoint import resume_folder
from roll.distributed.strategy.training.exchange import gather
from roll.distributed.strategy.training.merging import Export, export_folder
from roll.distributed.strategy.training.optim import MASTER
from roll.models.lora import PREFIX
from tests.support.harness import ADAPTER, TEMPERATURE, Layout, make_batch, make_context, make_model, policy_loss
from tests.support.layouts_deepspeed import zero
from tests.support.layouts_megatron import EP, PP, TP
from tests.support.ranks import enter_rank, leave_rank, run_ranks

SHARDED = {"checkpoint": "sharded"}
BF16: dict[str, Any] = {"model_args": {"dtype": "bf16"}}
FSDP2 = [
    Layout("shards", "fsdp2_train", 2, SHARDED, model="qwen3_moe", **BF16),
    Layout("adapter-shards", "fsdp2_train", 2, SHARDED, lora=ADAPTER),
    Layout("whole", "fsdp2_train", 2, model="qwen3_moe", **BF16),
    Layout("fp32", "fsdp2_train", 2, {"fsdp_size": 1}),
]
DEEPSPEED = [
    Layout("zero3", "deepspeed_train", 2, zero(3), **BF16),
    Layout("zero1-adapter", "deepspeed_train", 2, zero(1), lora=ADAPTER),
]
MEGATRON = [
    Layout("experts", "megatron_train", 2, {EP: 2}, model="qwen3_moe", **BF16),
    Layout("tensor", "megatron_train", 2, {TP: 2}, **BF16),
    Layout("stages-adapter", "megatron_train", 2, {PP: 2}, lora=ADAPTER),
]
PACKAGES = packages()


def others(layouts: list[Layout]) -> list[Any]:
    missing = pytest.mark.skipif(
        not PACKAGES[layouts[0].strategy].installed, reason=f"{layouts[0].strategy} is not installed"
    )
    return [pytest.param(layout, id=layout.id, marks=[pytest.mark.slow, missing]) for layout in layouts]


ALL = [*(pytest.param(layout, id=layout.id) for layout in FSDP2), *others(DEEPSPEED), *others(MEGATRON)]


def rank_main(rank: int, port: int, layouts: list[Layout], models: Path, folder: Path) -> None:
    enter_rank(port)
    for layout in layouts:
        trainer: Any = STRATEGIES.get(layout.strategy)(make_context(layout, models / layout.model, rank))
        trainer.setup()
        info, batch = trainer.info, make_batch(0)
        for step in range(2):
            part = make_batch(step)
            trainer.train_step(part.select(part.split(info.dp_size)[info.dp_rank]), policy_loss)
        trainer.save(folder / layout.name)
        trained = gather(trainer.trained.tensors(MASTER), [0])
        scores = trainer.logprobs(batch).logprobs_T
        if rank == 0:
            named = {name: tensor.clone().contiguous() for name, tensor in trained.items()}
            save_file(named, folder / f"{layout.name}.safetensors")
            save_file({"logprobs": scores}, folder / f"{layout.name}-scores.safetensors")
    leave_rank()


class Runs:
    """Checkpoints by layout, made when the first of an engine is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._done: set[str] = set()
        for name in ("qwen2", "qwen3_moe"):
            make_model(folder / name, name)

    def of(self, layout: Layout) -> Path:
        if layout.strategy not in self._done:
            engine = next(each for each in (FSDP2, DEEPSPEED, MEGATRON) if layout in each)
            run_ranks(rank_main, 2, engine, self.folder, self.folder)
            self._done.add(layout.strategy)
        return self.folder / layout.name

    def trained(self, layout: Layout) -> dict[str, Tensor]:
        return load_file(self.folder / f"{layout.name}.safetensors")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def export_of(checkpoint: Path, **options: Any) -> Export:
    return Export(checkpoint / "actor_train", resume_folder(checkpoint, "actor_train"), **options)


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def expected_weights(runs: Runs, layout: Layout) -> dict[str, Tensor]:
    """The module's weights: what was trained, or the base with ``W + scale·B·A`` in float64."""
    trained = runs.trained(layout)
    if layout.lora is None:
        return trained
    weights = {name: tensor.detach() for name, tensor in load(runs.folder / layout.model).named_parameters()}
    for name in [name for name in trained if ".lora_A." in name]:
        a, b = trained[name].double(), trained[name.replace("lora_A", "lora_B")].double()
        key = name.removeprefix(PREFIX).replace(".lora_A", "")
        weights[key] = (weights[key].double() + layout.lora.alpha / layout.lora.rank * b @ a).float()
    return weights


@pytest.mark.parametrize("layout", ALL)
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


@pytest.mark.parametrize("layout", ALL)
def test_the_folder_gives_the_policys_probabilities(runs, layout, tmp_path):
    checkpoint = runs.of(layout)
    export_folder(export_of(checkpoint, merge=layout.lora is not None), tmp_path / "model")
    bits = layout.model_args.get("dtype") == "bf16"
    stored = {tensor.dtype for tensor in load_file(tmp_path / "model" / "model.safetensors").values()}
    assert stored == {torch.bfloat16 if bits else torch.float32}
    model, batch = load(tmp_path / "model"), make_batch(0)
    scores = load_file(runs.folder / f"{layout.name}-scores.safetensors")["logprobs"]
    with torch.no_grad():
        for row in range(batch.num_sequences):
            one, of_row = batch.select([row]), batch.rows_T == row
            logprobs = (model(one.tokens_T[None]).logits[0] / TEMPERATURE).log_softmax(-1)
            positions = one.loss_mask_T.nonzero().flatten()
            expected = logprobs[positions - 1, one.tokens_T[positions]]
            found = scores[of_row][positions]
            torch.testing.assert_close(found, expected, rtol=0, atol=0.08 if bits else 1e-5)


FROZEN = Layout(
    "frozen", "fsdp2_train", 1, SHARDED, model_args={"freeze_module_prefix": "model.embed_tokens,model.layers.0"}
)


def save_shards(folder: Path) -> dict[str, Tensor]:
    """Of a model that is partly frozen; returns all of its weights as they were at the end."""
    trainer: Any = STRATEGIES.get("fsdp2_train")(make_context(FROZEN, make_model(folder / "model", "qwen2"), 0))
    trainer.setup()
    trainer.train_step(make_batch(0), policy_loss)
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


def _save_replaced(rank: int, port: int, strategy: str, model: Path, folder: Path) -> None:
    enter_rank(port)
    replaced = {"model_config_kwargs": {"rms_norm_eps": 0.25}}
    trainer: Any = STRATEGIES.get(strategy)(make_context(Layout("eps", strategy, 1, model_args=replaced), model, rank))
    trainer.setup()
    trainer.save_model(folder / "saved")
    save_file({"logprobs": trainer.logprobs(make_batch(0)).logprobs_T}, folder / "scores.safetensors")
    leave_rank()


@pytest.mark.parametrize("strategy", ["fsdp2_train", "deepspeed_train", "megatron_train"])
def test_a_saved_model_is_configured_as_it_was_trained(strategy, tmp_path):
    if strategy in PACKAGES and not PACKAGES[strategy].installed:
        pytest.skip(f"{PACKAGES[strategy].module} is not installed")
    run_ranks(_save_replaced, 1, strategy, make_model(tmp_path / "model", "qwen2"), tmp_path)
    batch = make_batch(0).select([0])
    with torch.no_grad():
        logprobs = (load(tmp_path / "saved")(batch.tokens_T[None]).logits[0] / TEMPERATURE).log_softmax(-1)
    positions = batch.loss_mask_T.nonzero().flatten()
    expected = logprobs[positions - 1, batch.tokens_T[positions]]
    found = load_file(tmp_path / "scores.safetensors")["logprobs"][make_batch(0).rows_T == 0]
    torch.testing.assert_close(found[positions], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", [layout for layout in FSDP2 if layout.lora])
def test_an_adapter_that_is_not_merged_is_one_of_peft(runs, layout, tmp_path):
    from peft import PeftModel

    checkpoint = runs.of(layout)
    export_folder(export_of(checkpoint), tmp_path / "adapter")
    model = PeftModel.from_pretrained(load(runs.folder / layout.model), tmp_path / "adapter").merge_and_unload()
    expected = expected_weights(runs, layout)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-6)
