"""``roll export``: checkpoints of every kind of model become folders that Transformers loads."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from roll.__main__ import main
from roll.algorithms.types import LossOutput
from roll.distributed.strategy.fsdp2.strategy import Fsdp2Train
from roll.models.adapter_files import ADAPTER_CONFIG
from roll.models.lora import PREFIX, LoraSpec
from roll.pipeline.commands.exporting import num_bytes
from roll.tracking.checkpointer import Checkpointer
from tests.support.cli import refused
from tests.support.lines import write_lines
from tests.support.trainers import make_batch, make_context
from tests.unit.pipeline.test_imports import COMMAND
from tests.unit.pipeline.test_imports import run as in_a_process

ADAPTER = LoraSpec(rank=3, alpha=7, targets=("q_proj", "down_proj"))
TRAINED = {
    "adapter": {"lora": ADAPTER},
    "critic": {"role": "critic", "head": "value", "model_args": {"dtype": "bf16"}},
    "critic-shards": {"role": "critic", "head": "value", "strategy": {"checkpoint": "sharded"}},
    "reward": {"head": "score", "model_args": {"dtype": "bf16"}},
    "reward-shards": {"head": "score", "strategy": {"checkpoint": "sharded"}},
    "reward-adapter": {"head": "score", "lora": ADAPTER},
    "reward-adapter-shards": {"head": "score", "lora": ADAPTER, "strategy": {"checkpoint": "sharded"}},
}


def values(scores: Any, batch: Any, context: Any) -> LossOutput:
    """Something to learn for any head."""
    found = scores.logprobs_T if scores.values_T is None else scores.values_T
    return LossOutput((found * batch.loss_mask_T).sum() / 7, {})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model: str) -> dict[str, tuple[Path, dict[str, Tensor]]]:
    """A run's folder with a checkpoint, and the float32 parameters as they were then."""
    found = {}
    for name, options in TRAINED.items():
        folder = tmp_path_factory.mktemp("runs") / name
        trainer: Any = Fsdp2Train(make_context(Path(model), "fsdp2_train", **options))
        trainer.setup()
        for _ in range(3 if "reward-adapter" in name else 1):  # beside the head's first zeros an adapter learns nothing
            trainer.train_step(make_batch(), values)
        (folder / "checkpoints").mkdir(parents=True)
        kwargs = {"model_config_kwargs": {"rms_norm_eps": 1e-5}}
        (folder / "config.yaml").write_text(yaml.safe_dump({"actor_train": {"model_args": kwargs}}))
        Checkpointer(folder / "checkpoints").save(7, lambda path, trainer=trainer: trainer.save(path) and None, {})
        kept = {key: parameter.detach().float().clone() for key, parameter in trainer.weights.trained.items()}
        found[name] = (folder, kept)
    return found


def export(*words: object) -> int:
    return main(["export", *map(str, words)])


def parameters(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not found[name].equal(tensor)]


def test_the_card_says_what_was_trained_and_keeps_that_of_the_base(runs, model, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "planted-in-the-environment")
    base, run = tmp_path / "base", tmp_path / "maths"
    shutil.copytree(model, base)
    (base / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# Base\n")
    shutil.copytree(runs["adapter"][0], run)
    config = {
        **{"pretrain": str(base), "max_steps": 9, "adv_estimator": "grpo"},
        "rewards": {"maths": {"verifiers": [{"name": "math"}], "api_key": "planted-in-a-key"}},
        "actor_train": {"data_args": {"file_name": ["sums.jsonl"]}, "model_args": {"lora_target": "q_proj"}},
        "tracker_kwargs": {"note": "planted-in-the-environment"},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    rows = {"rows": 1200, "samples": 1200, "digest": "0123456789abcdef"}
    counts = {"prompts": 200, "episodes": 200}
    ends = {"before": {"accuracy": 0.1, **counts}, "after": {"accuracy": 0.6, **counts}}
    summary = {"steps": 7, "eval": ends, "data": {"actor_train.data_args": rows}, "versions": {"roll": "0.1.0"}}
    (run / "summary.json").write_text(json.dumps(summary))
    shares = {0: 0.1, 7: 0.6, 8: 0.9}
    steps = [{"step": step, "eval/success": share, "eval/prompts": 200} for step, share in shares.items()]
    write_lines(run / "metrics.jsonl", steps)
    assert export(run, "-o", tmp_path / "out") == 0
    card = (tmp_path / "out" / "README.md").read_text()
    head = {"base_model": str(base), "library_name": "peft", "tags": ["roll", "rlvr", "grpo"], "license": "apache-2.0"}
    assert yaml.safe_load(card.split("---\n")[1]) == head
    assert "# maths, step 7" in card and "for 7 of 9 steps" in card and "AutoPeftModelForCausalLM" in card
    assert "Learned: accuracy 10.0% → 60.0% (+50.0 points, 95% interval" in card
    assert "| 7 | 60.0% | 53.1% to 66.5% (200) |" in card and "90.0%" not in card, "step 8 is later"
    assert "| actor_train.data_args | sums.jsonl: 1,200 rows, 1,200 samples, content 01234567 |" in card
    assert "| reward maths | math |" in card and '| `actor_train.model_args.lora_target` | `"q_proj"` |' in card
    assert "planted" not in card
    assert (tmp_path / "out" / "BASE_README.md").read_text() == (base / "README.md").read_text()
    assert export(base, "-o", tmp_path / "plain") == 0
    assert (tmp_path / "plain" / "README.md").read_text() == (base / "README.md").read_text()


def test_a_merged_adapter_is_a_whole_model(runs, model, tmp_path, capsys):
    run, trained = runs["adapter"]
    assert export(run, "-o", tmp_path / "out", "--merge-adapter", "--max-shard-size", "60KB") == 0
    assert f"{tmp_path / 'out'}: " in capsys.readouterr().out
    merged = parameters(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    expected = parameters(AutoModelForCausalLM.from_pretrained(model))
    adapted = [name for name in trained if "lora_A" in name]
    assert len(adapted) == 4
    for name in adapted:
        a, b = trained[name].double(), trained[name.replace("lora_A", "lora_B")].double()
        key = name.removeprefix("model.").replace(".lora_A.default", "")
        assert b.abs().max() > 0
        expected[key] = (expected[key].double() + 7 / 3 * b @ a).float()
    assert_equal(merged, expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5 and config["architectures"] == ["Qwen2ForCausalLM"]
    defaults = (tmp_path / "out" / "generation_config.json").read_bytes()
    assert defaults == (Path(model) / "generation_config.json").read_bytes()
    ids = [AutoTokenizer.from_pretrained(folder).encode("12+34=") for folder in (tmp_path / "out", model)]
    assert ids[0] == ids[1] and len(ids[0]) == 6
    files = {file.name: file.stat().st_size for file in (tmp_path / "out").glob("model-*.safetensors")}
    assert len(files) >= 3 and not (tmp_path / ".out.unfinished").exists()


def test_an_adapter_keeps_its_form(runs, tmp_path):
    run, trained = runs["adapter"]
    assert export(run / "checkpoints" / "checkpoint-7", "-o", tmp_path / "out", "--dtype", "bf16") == 0
    names = {name: PREFIX + name.removeprefix("model.").replace(".default", "") for name in trained}
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert_equal(found, {names[name]: one.bfloat16() for name, one in trained.items()})
    assert (tmp_path / "out" / ADAPTER_CONFIG).is_file() and not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("name", ["critic", "critic-shards"])
def test_a_critic_has_a_trunk_and_its_head(runs, tmp_path, name):
    run, trained = runs[name]
    for dtype in ("fp32", "fp16"):
        assert export(run, "-o", tmp_path / dtype, "--role", "critic", "--dtype", dtype) == 0
    expected = part(trained, "model.")
    assert_equal(parameters(AutoModel.from_pretrained(tmp_path / "fp32")), expected)
    halves = {key: one.half() for key, one in expected.items()}
    assert_equal(parameters(AutoModel.from_pretrained(tmp_path / "fp16", dtype="auto")), halves)
    head = part(trained, "value_head.")
    assert len(head) == 2
    assert_equal(load_file(tmp_path / "fp16" / "value_head.safetensors"), head)


@pytest.mark.parametrize("name", ["reward", "reward-shards"])
def test_a_reward_model_is_a_classifier(runs, tmp_path, name):
    run, trained = runs[name]
    assert export(run, "-o", tmp_path / "out", "--dtype", "fp32") == 0
    found = parameters(AutoModelForSequenceClassification.from_pretrained(tmp_path / "out"))
    expected = {f"model.{key}": one for key, one in part(trained, "model.").items()}
    assert_equal(found, expected | {"score.weight": trained["value_head.linear.weight"]})


@pytest.mark.parametrize("name", ["reward-adapter", "reward-adapter-shards"])
def test_an_adapter_of_a_reward_model_becomes_a_classifier(runs, model, tmp_path, name):
    from peft import PeftModel

    run, trained = runs[name]
    assert export(run, "-o", tmp_path / "adapter") == 0
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert stored["base_model.model.score.weight"].equal(trained["value_head.linear.weight"]) and len(stored) == 9
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    expected = PeftModel.from_pretrained(base, tmp_path / "adapter").double().eval()
    assert export(run, "-o", tmp_path / "out", "--merge-adapter") == 0
    found = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").double().eval()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"] and found.config.num_labels == 1
    assert found.config.rms_norm_eps == 1e-5 and not (tmp_path / "out" / "generation_config.json").exists()
    names = {key for key in load_file(tmp_path / "out" / "model.safetensors") if not key.startswith("model.")}
    assert names == {"score.weight"}
    merged, start = parameters(expected.merge_and_unload()), parameters(AutoModel.from_pretrained(model))
    for key, one in parameters(found).items():
        torch.testing.assert_close(one, merged[key], rtol=0, atol=1e-6)
    adapted = [key for key, one in start.items() if (one - merged[f"model.{key}"]).abs().max() > 1e-5]
    assert len(adapted) == 4, "the adapter has learnt"


def test_exporting_needs_no_ray(runs, tmp_path):
    assert "ray" not in in_a_process(COMMAND, "export", runs["reward-shards"][0], "-o", tmp_path / "out")[2]


def test_what_cannot_be_exported_is_refused(runs, model, tmp_path, capsys):
    out = ("-o", tmp_path / "out")
    assert "no adapter in it" in refused(capsys, "export", runs["reward"][0], *out, "--merge-adapter")
    assert "no such folder" in refused(capsys, "export", tmp_path / "absent", *out)
    assert "neither a model" in refused(capsys, "export", runs["reward"][0], *out, "--role", "critic")
    assert "a plain model" in refused(capsys, "export", model, *out, "--role", "critic")
    assert "500MB or 4GiB" in refused(capsys, "export", model, *out, "--max-shard-size", "much")
    assert "the folder of what is exported" in refused(capsys, "export", model, "-o", model, "--overwrite")
    adapter = (runs["adapter"][0], *out, "--merge-adapter", "--base")
    assert "no such folder" in refused(capsys, "export", *adapter, tmp_path / "absent")
    other = shutil.copytree(model, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file(weights | {name: weights[name][:, 1:].contiguous()}, other / "model.safetensors")
    assert f"{name}: got shape" in refused(capsys, "export", *adapter, other)
    save_file({key: one for key, one in weights.items() if key != name}, other / "model.safetensors")
    assert f"no {name} in it" in refused(capsys, "export", *adapter, other)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"use_rslora": True}, "use_rslora is"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern is"),
        ({"bias": "all"}, "bias is"),
        ({"r": 5}, "expected r = 5 of adapter_config.json"),
        ({"r": "4"}, "r: got '4', expected a whole number from 1"),
        ({"lora_alpha": None}, "lora_alpha: got None, expected a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha: got nan, expected a number"),
        ({"target_modules": ["up_proj"]}, "expected in target_modules of adapter_config.json too"),
        ({"target_modules": r".*\.1\..*"}, "model.layers.0.mlp.down_proj: got in"),
        ({"base_model_name_or_path": None}, "expected --base MODEL"),
    ],
)
def test_a_configuration_that_is_not_the_adapters_is_refused(runs, tmp_path, capsys, change, reason):
    folder = shutil.copytree(runs["adapter"][0] / "checkpoints" / "checkpoint-7" / "actor_train", tmp_path / "adapter")
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config | change))
    assert reason in refused(capsys, "export", folder, "-o", tmp_path / "out", "--merge-adapter")


def test_a_folder_that_is_there_stays_unless_asked(model, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert "--overwrite" in refused(capsys, "export", model, "-o", tmp_path / "out")
    assert (tmp_path / "out" / "mine").exists()
    assert export(model, "-o", tmp_path / "out", "--overwrite", "--dtype", "fp16") == 0
    assert not (tmp_path / "out" / "mine").exists()
    kinds = {one.dtype for one in load_file(tmp_path / "out" / "model.safetensors").values()}
    assert kinds == {torch.float16} and json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"


@pytest.mark.parametrize("folder", [".", "/", ""])
def test_a_folder_that_cannot_be_replaced_is_refused(model, tmp_path, monkeypatch, capsys, folder):
    monkeypatch.chdir(tmp_path)
    assert "got the working folder or" in refused(capsys, "export", model, "-o", folder, "--overwrite")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_refused(runs, tmp_path, capsys):
    checkpoint = shutil.copytree(runs["reward"][0] / "checkpoints" / "checkpoint-7", tmp_path / "checkpoint-7")
    with (checkpoint / "actor_train" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    assert "has checksum" in refused(capsys, "export", checkpoint, "-o", tmp_path / "out")


def test_weights_without_their_float32_are_widened_and_that_is_said(runs, tmp_path, capsys):
    folder = runs["reward"][0] / "checkpoints" / "checkpoint-7" / "actor_train"
    copy = shutil.copytree(folder, tmp_path / "model")
    assert export(copy, "-o", tmp_path / "out", "--dtype", "fp32") == 0
    assert "widened" in capsys.readouterr().err
    stored = load_file(copy / "model.safetensors")
    assert_equal(load_file(tmp_path / "out" / "model.safetensors"), {key: one.float() for key, one in stored.items()})


def test_sizes():
    written = {"1000": 1000, "500MB": 5 * 10**8, "4GiB": 4 * 2**30, "1.5 g": 15 * 10**8}
    assert {size: num_bytes(size) for size in written} == written


@pytest.mark.parametrize("size", ["", "0", "GB", "-1GB", "4 apples"])
def test_a_wrong_size_is_refused(size):
    with pytest.raises(ValueError, match="max-shard-size"):
        num_bytes(size)
