"""A reward model that is a LoRA adapter with a head, as peft keeps one: its scores are peft's in float64."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from roll.configs.problems import ConfigErrors
from roll.models.tiny import make_tokenizer
from roll.rewards.classifiers import RewardModelConfig
from roll.rewards.reward_model import RewardModelVerifier
from roll.rewards.types import Sample

peft = pytest.importorskip("peft", reason="peft is not installed")

ANSWERS = ["2", "three", "", "because √4"]
OUTPUTS = 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder, tokenizer = tmp_path_factory.mktemp("base"), make_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes, **heads)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def classifier(base: Path, outputs: int) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(base, num_labels=outputs)


@pytest.fixture(scope="module", params=[1, OUTPUTS], ids=["a score", "labels"])
def adapter(request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="SEQ_CLS", init_lora_weights=False)
    torch.manual_seed(1)
    peft.get_peft_model(classifier(base, request.param), config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def outputs_of(folder: Path) -> int:
    return len(load_file(folder / "adapter_model.safetensors")["base_model.model.score.weight"])


def scores(folder: Path, **args: Any) -> list[float]:
    async def judge() -> list[float]:
        verifier = RewardModelVerifier(RewardModelConfig(model_path=str(folder), device="cpu", **args))
        fields: dict[str, Any] = {"ground_truth": None, "data_source": "chat"}
        samples = [Sample(prompt="1+1=", response=answer, **fields) for answer in ANSWERS]
        verdicts = await asyncio.gather(*map(verifier.score, samples))
        await verifier.close()
        return [verdict.score for verdict in verdicts]

    return asyncio.run(judge())


def test_it_is_a_verifier(base, adapter):
    outputs = outputs_of(adapter)
    model = peft.PeftModel.from_pretrained(classifier(base, outputs), adapter).double().eval()
    tokenizer = make_tokenizer()
    expected = []
    for answer in ANSWERS:
        talk = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(talk, tokenize=False)
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        with torch.no_grad():
            expected.append(float(model(input_ids=ids).logits[0, -1]))
    found = scores(adapter, label=None if outputs == 1 else outputs - 1)
    assert found == pytest.approx(expected, abs=1e-5 * max(1.0, *map(abs, expected)))
    assert len({round(score, 3) for score in found}) == len(ANSWERS)


def refused(folder: Path, **args: Any) -> str:
    with pytest.raises((ConfigErrors, ValueError)) as caught:
        RewardModelVerifier(RewardModelConfig(model_path=str(folder), device="cpu", label=0, **args))
    return str(caught.value)


def changed(adapter: Path, target: Path, **config: Any) -> Path:
    folder = shutil.copytree(adapter, target)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def test_what_cannot_be_loaded_is_named(adapter, tmp_path):
    assert "task_type is 'CAUSAL_LM'" in refused(changed(adapter, tmp_path / "lm", task_type="CAUSAL_LM"))
    gone = changed(adapter, tmp_path / "gone", base_model_name_or_path=str(tmp_path / "nowhere"))
    assert "base_model_name_or_path" in (words := refused(gone)) and "no such folder" in words
    assert "--merge-adapter" in refused(adapter, remote={"url": "http://10.0.0.5:8000"})
    other = changed(adapter, tmp_path / "other", target_modules=["q_proj"])
    assert "does not fit its base" in refused(other)
    (tmp_path / "other" / "adapter_config.json").write_text("{")
    assert "task_type is None" in refused(other)
    headless = changed(adapter, tmp_path / "headless", modules_to_save=None)
    tensors = load_file(headless / "adapter_model.safetensors")
    del tensors["base_model.model.score.weight"]
    save_file(tensors, headless / "adapter_model.safetensors")
    assert "1 weights are missing" in (words := refused(headless)) and "score.weight" in words
    (headless / "adapter_model.safetensors").write_bytes(b"broken")
    assert "expected a whole safetensors file" in refused(headless)
    (headless / "adapter_model.safetensors").unlink()
    assert "no adapter_model.safetensors" in refused(headless)
