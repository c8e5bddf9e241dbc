"""``roll generate``: order, seeds, going on, progress, what cannot be answered, and the forms of prompts."""

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from safetensors.torch import save_file

from roll.__main__ import main
from roll.data.renderer import ChatRenderer
from roll.models.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE
from roll.models.lora import write_adapter_config
from roll.models.tiny import make_tokenizer
from roll.pipeline.commands import progress as progress_module
from roll.pipeline.commands.progress import progress
from tests.support.cli import call, refused
from tests.support.contract import LORA, greedy_oracle, load, make_adapter
from tests.support.lines import read_lines as read

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = ("--temperature", "0", "--max-tokens", "8")


def oracle(model: str, ids: list[int], max_new_tokens: int = 8) -> str:
    tokens = greedy_oracle(load(model), np.array(ids), max_new_tokens)
    return make_tokenizer().decode(tokens, skip_special_tokens=True)


def test_texts_are_continued_and_messages_rendered(model, rows, tmp_path, capsys):
    tokenizer = make_tokenizer()
    talk = [{"role": "system", "content": "Short."}, {"role": "user", "content": "Up or Down?"}]
    files = [rows("a.jsonl", [{"prompt": "one two", "k": [1]}]), rows("b.jsonl", [{"messages": talk}])]
    (tmp_path / "c.txt").write_text("three\n\n four\r\n")
    parquet.write_table(pyarrow.table({"question": ["five"]}), tmp_path / "d.parquet")
    out = tmp_path / "out.jsonl"
    _, err = call(capsys, "generate", model, *files, tmp_path / "c.txt", "-o", out, *GREEDY)
    assert "--chat sends them" in err
    expected = [oracle(model, tokenizer(text)["input_ids"]) for text in ("one two", "three", " four")]
    expected.insert(1, oracle(model, ChatRenderer(tokenizer).prompt(talk).tolist()))
    lines = read(out)
    assert [line["answers"][0]["text"] for line in lines] == expected
    assert lines[0]["k"] == [1] and lines[1]["messages"] == talk
    assert all(1 <= line["answers"][0]["num_tokens"] <= 8 for line in lines)
    assert {line["answers"][0]["finish_reason"] for line in lines} <= {"stop", "length"}

    asked = ["generate", model, tmp_path / "d.parquet", "-o", tmp_path / "five.jsonl", *GREEDY, "--chat"]
    call(capsys, *asked, "--prompt-key", "question", "--system", "Short.", "--answer-key", "said")
    prompt = ChatRenderer(tokenizer).prompt([talk[0], {"role": "user", "content": "five"}])
    assert read(tmp_path / "five.jsonl")[0]["said"][0]["text"] == oracle(model, prompt.tolist())


def test_an_interrupted_output_is_finished_as_if_nothing_had_happened(model, rows, tmp_path, capsys):
    prompts = rows("prompts.jsonl", [{"prompt": f"prompt {n} " * (1 + n % 3)} for n in range(12)])
    whole, other = tmp_path / "whole.jsonl", tmp_path / "other.jsonl"
    command = ["generate", model, prompts, "-n", "2", "--max-tokens", "6", "--seed", "3", "--concurrency", "4"]
    assert main([*command, "-o", str(whole)]) == 0
    texts = [answer["text"] for line in read(whole) for answer in line["answers"]]
    assert len(texts) == 24 and len(set(texts)) > 12  # seeds of their own
    lines = whole.read_bytes().splitlines(keepends=True)
    other.write_bytes(b"".join(lines[:5]) + lines[5][:20])
    shutil.copy(f"{whole}.settings.json", f"{other}.settings.json")
    for kept in (5, 12):
        assert f"{kept} of 12 rows exist" in call(capsys, *command, "-o", other)[1]
        assert other.read_bytes() == whole.read_bytes()
    # Answers that were made otherwise are neither mixed nor lost.
    refused(capsys, *command, "-o", other, "--temperature", "0.5", "seed_of_mine=1")
    assert "begun with another generator" in refused(capsys, *command, "-o", other, "--temperature", "0.5")
    Path(f"{other}.settings.json").unlink()
    refused(capsys, *command, "-o", other)
    assert other.read_bytes() == whole.read_bytes()
    call(capsys, *command, "-o", other, "--overwrite")
    assert other.read_bytes() == whole.read_bytes()


def test_a_prompt_that_cannot_be_answered_is_told_in_its_row(model, rows, tmp_path, capsys):
    prompts = rows("prompts.jsonl", [{"prompt": "a"}, {"prompt": "word " * 40}, {"prompt": "b"}])
    out = tmp_path / "out.jsonl"
    command = ["generate", model, prompts, "-o", out, "-n", "2", "--max-length", "32", *GREEDY]
    for _ in range(2):  # they are not forgotten when there is nothing left to do
        assert "2 answers failed" in call(capsys, *command, code=1)[1]
    lines = read(out)
    assert [["text" in answer for answer in line["answers"]] for line in lines] == [[True] * 2, [False] * 2, [True] * 2]
    assert "sequence_length is 32" in lines[1]["answers"][0]["error"]


def test_everything_that_is_wrong_is_told_before_a_model_loads(rows, tmp_path, capsys):
    wrong = rows("wrong.jsonl", [{"question": "?"}, {"prompt": 3}, {"prompt": "x", "answers": "y"}])
    out = tmp_path / "out.jsonl"
    told = refused(capsys, "generate", "/nowhere", wrong, "-o", out)
    assert "3 problems" in told and "--prompt-key" in told and "--answer-key" in told and "3, expected text" in told
    assert not out.exists()
    command = ["generate", "/nowhere", rows("right.jsonl", [{"prompt": "x"}]), "-o", out]
    told = refused(capsys, *command, "--engine", "fsdp2_train", "--top-p", "2", "model_args.dtyp=bf16")
    assert "3 problems" in told and "did you mean dtype?" in told and "hf_infer, sglang, vllm" in told
    told = refused(capsys, *command, "--system", "x", "world_size=2", "generating_args.num_return_sequences=2")
    assert "world_size" in told and "-n, which says" in told
    assert "--chat sends it" in refused(capsys, *command, "--system", "x")
    assert "/nowhere" in refused(capsys, *command)
    prompts = rows("prompts.jsonl", [{"prompt": "x"}])
    told = refused(capsys, "generate", "/nowhere", prompts, "-o", prompts, "--overwrite")
    assert "a file of prompts, expected another" in told and read(prompts) == [{"prompt": "x"}]


@pytest.mark.parametrize("targets", [None, "all-linear", r".*_proj", ["model.layers.0.self_attn.q_proj"]])
def test_an_adapter_is_put_on_the_model_that_it_names(model, rows, tmp_path, targets):
    tensors, merged = make_adapter(model, seed=3)
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(tensors, folder / ADAPTER_FILE)
    write_adapter_config(folder, LORA, model, tensors)
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config | {"target_modules": targets or config["target_modules"]}))
    out = tmp_path / "out.jsonl"
    assert main(["generate", str(folder), rows("p.jsonl", [{"prompt": "one two"}]), "-o", str(out), *GREEDY]) == 0
    ids = np.array(make_tokenizer()("one two")["input_ids"])
    expected = make_tokenizer().decode(greedy_oracle(merged, ids, 8), skip_special_tokens=True)
    assert read(out)[0]["answers"][0]["text"] == expected != oracle(model, ids.tolist())


def test_lines_of_progress_come_while_nothing_is_finished_and_end_with_the_work(capsys, monkeypatch):
    monkeypatch.setattr(progress_module, "QUIET_SECONDS", 0.02)
    with progress("rows answered", 1000, 3) as advance:
        time.sleep(0.3)
        advance("12 tokens/s")
        time.sleep(0.3)
    time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("rows answered: 3 of 1,000 after ")
    assert lines[-1].startswith("rows answered: 4 of 1,000 after ") and lines[-1].endswith(", 12 tokens/s")
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
