"""What a model folder has beside what is trained: computed with as Transformers does, and saved as it was."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from roll.distributed.strategy.training.merging import Export, export_folder
from roll.distributed.weights.receiver import WeightUpdate
from roll.models.loading import load_causal_lm
from tests.support.harness import ADAPTER, TEMPERATURE, Layout, make_batch, make_model, started, take_steps
from tests.support.pictured import plain_logprobs
from tests.support.ranks import enter_rank, exported, leave_rank, run_ranks
from tests.support.sizes import sizes

SIZES = sizes(61, 32, 48, 2, 4, 4) | {"max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 60}
LATENT = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8)


def random_folder(model: Any, path: Path) -> Path:
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.ndim > 1 or "correction_bias" in name:
                tensor.normal_(0, 0.3)
    model.float().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def balanced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture whose routers have a bias that no gradient trains, and a layer that predicts further tokens."""
    torch.manual_seed(0)
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2}
    more = {"topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
    config = transformers.DeepseekV3Config(**SIZES, **experts, **more, **LATENT)
    folder = random_folder(AutoModelForCausalLM.from_config(config), tmp_path_factory.mktemp("models") / "deepseek")
    predictor = {"model.layers.2.eh_proj.weight": torch.randn(32, 64)}
    file = folder / "model.safetensors"
    save_file(load_file(file) | predictor, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model with a vision tower, in the layout in which Qwen publishes them."""
    torch.manual_seed(0)
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    types = {"layer_types": ["linear_attention", "full_attention"], "linear_value_head_dim": 8}
    text = {**SIZES, **linear, **types, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}
    eyes = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 32}
    config = transformers.Qwen3_5Config(
        text_config=text, vision_config={**eyes, "num_position_embeddings": 64}, tie_word_embeddings=True
    )
    model = transformers.Qwen3_5ForConditionalGeneration(config)
    return random_folder(model, tmp_path_factory.mktemp("models") / "qwen3_5")


def make_trainer(folder: Path, strategy: str = "fsdp2_train", rank: int = 0, **options: Any) -> Any:
    return started(Layout("alone", strategy, **{"world_size": 1} | options), folder, rank)


def differ(found: Tensor, folder: Path) -> float:
    """How far log-probabilities are from those by Transformers' own loading and forward pass."""
    model, batch = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), make_batch(0)
    return float((found - plain_logprobs(model, batch, TEMPERATURE))[batch.loss_mask_T].abs().max())


def scores(trainer: Any) -> Tensor:
    found: Tensor = trainer.logprobs(make_batch(0)).logprobs_T
    return found


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        *((strategy, kind) for strategy in ("fsdp2_train", "deepspeed_train") for kind in ("balanced", "published")),
        ("megatron_train", "balanced"),
    ],
)
def test_all_of_a_folder_is_computed_with_and_saved_again(request, tmp_path, strategy, kind):
    folder = request.getfixturevalue(kind)
    trainer = make_trainer(folder, strategy)
    assert differ(scores(trainer), folder) < 1e-4
    trainer.save_model(tmp_path / "same")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "same"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    settings = [json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "same")]
    assert len({(one["model_type"], *one["architectures"]) for one in settings}) == 1
    receiver = load_causal_lm(str(folder))
    weights = exported(trainer)
    assert WeightUpdate(receiver, weights).parts and not any("visual" in name or "eh_proj" in name for name in weights)
    take_steps(trainer, 0)
    trainer.save(tmp_path / "checkpoint")
    trained = scores(trainer)
    assert differ(trained, tmp_path / "checkpoint" / "actor_train") < 1e-4
    take_steps(trainer, 1)
    trainer.load(tmp_path / "checkpoint")
    assert torch.equal(scores(trainer), trained)


@pytest.mark.parametrize("kind", ["balanced", "published"])
def test_an_export_from_the_optimizers_weights_has_all_of_the_folder(request, tmp_path, kind):
    folder = request.getfixturevalue(kind)
    trainer = make_trainer(folder, model_args={"dtype": "bf16"}, strategy_config={"param_dtype": "fp32"})
    take_steps(trainer, 0)
    trainer.save(tmp_path)
    made = export_folder(
        Export(tmp_path / "actor_train", tmp_path / "resume" / "actor_train", torch.float32), tmp_path / "out"
    )
    assert made.num_tensors == len(load_file(folder / "model.safetensors"))
    assert differ(scores(trainer), tmp_path / "out") < 1e-4


def test_an_adapter_is_merged_into_all_of_the_folder(published, tmp_path):
    trainer = make_trainer(published, lora=ADAPTER)
    take_steps(trainer, 0, 1)
    trainer.save_model(tmp_path / "adapter")
    made = export_folder(Export(tmp_path / "adapter", merge=True), tmp_path / "out")
    assert made.num_tensors == len(load_file(published / "model.safetensors"))
    assert differ(scores(trainer), tmp_path / "out") < 1e-4


def sharded_main(rank: int, port: int, folder: Path, out: Path) -> None:
    enter_rank(port)
    trainer = make_trainer(folder, rank=rank, world_size=2, strategy_config={"checkpoint": "sharded"})
    take_steps(trainer, 0)
    trainer.save(out)
    found = scores(trainer)
    if rank == 0:
        save_file({"scores": found}, out / "scores.safetensors")
    leave_rank()


@pytest.mark.slow  # two processes that import all over again
def test_shards_of_two_ranks_become_all_of_the_folder(balanced, tmp_path):
    run_ranks(sharded_main, 2, balanced, tmp_path)
    made = export_folder(Export(tmp_path / "actor_train", tmp_path / "resume" / "actor_train"), tmp_path / "out")
    assert made.num_tensors == len(load_file(balanced / "model.safetensors"))
    assert differ(load_file(tmp_path / "scores.safetensors")["scores"], tmp_path / "out") < 1e-4


def test_shards_of_a_model_with_other_parts_are_refused(published):
    with pytest.raises(ValueError, match=r"checkpoint: got sharded, expected whole: .* \(qwen3_5\) has more than"):
        make_trainer(published, strategy_config={"checkpoint": "sharded"})


@pytest.mark.parametrize("strategy", ["fsdp2_train", "deepspeed_train", "megatron_train", "hf_infer"])
@pytest.mark.parametrize("change", ["tied", "layer", "head"])
def test_every_engine_reads_a_folder_alike(tmp_path, strategy, change):
    folder = make_model(tmp_path / "model", "qwen2")
    tensors, file = load_file(folder / "model.safetensors"), folder / "model.safetensors"
    more = {"tied": "lm_head.weight", "layer": "model.layers.4.input_layernorm.weight", "head": "v_head.weight"}[change]
    tensors[more] = torch.ones_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, file, metadata={"format": "pt"})

    def load() -> Any:
        return load_causal_lm(str(folder)) if strategy == "hf_infer" else make_trainer(folder, strategy)

    if refused := {"tied": r"lm_head\.weight differs", "layer": r"lost: model\.layers\.4"}.get(change):
        with pytest.raises(ValueError, match=refused):
            load()
        return
    found = load()
    if strategy != "hf_infer":
        found.save_model(tmp_path / "saved")
        assert torch.equal(load_file(tmp_path / "saved" / "model.safetensors")[more], tensors[more])


def test_a_tower_survives_the_end_of_the_folder_that_it_came_from(published, tmp_path):
    folder = shutil.copytree(published, tmp_path / "model")
    trainer = make_trainer(folder)
    (folder / "model.safetensors").unlink()
    trainer.save_model(tmp_path / "saved")
    names = [load_file(path / "model.safetensors").keys() for path in (tmp_path / "saved", published)]
    assert names[0] == names[1]
