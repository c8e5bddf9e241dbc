"""The commands with pictures, beside ``generate`` of Transformers with the model's own picture processor."""

import base64
import io
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from roll.__main__ import main
from tests.support.cli import refused
from tests.support.lines import read_lines as read
from tests.support.picture_models import greedy_words, make_picture_model
from tests.support.web import Reply, serving
from tests.unit.rewards.test_judge import says, shown_in

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = ("--temperature", "0", "--max-tokens", "6", "--max-length", "128")
PIXELS = np.random.default_rng(0).integers(0, 256, (2, 56, 84, 3), np.uint8)
TOKENS = 6
"""Of each of them."""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_picture_model(tmp_path_factory.mktemp("seeing") / "qwen3_vl", "qwen3_vl", seed=1))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for number, pixels in enumerate(PIXELS):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    return [str(tmp_path / f"{number}.png") for number in range(2)]


def oracle(model: str, words: str, *pictures: int) -> str:
    return greedy_words(model, words, [PIXELS[number] for number in pictures], 6)


def test_generate_answers_rows_with_pictures_and_score_reads_them(seeing, files, rows, tmp_path, capsys):
    part = {"type": "image", "image": "1.png"}
    talk = rows("talk.jsonl", [{"messages": [{"role": "user", "content": [part, {"type": "text", "text": "so?"}]}]}])
    texts = rows("texts.jsonl", [{"prompt": "<image><image>which?", "images": ["0.png", "1.png"], "solution": "0"}])
    data = [{"bytes": Path(files[0]).read_bytes(), "path": None}]
    parquet.write_table(pyarrow.table({"prompt": ["what?"], "images": [data]}), tmp_path / "bytes.parquet")
    out = tmp_path / "out" / "said.jsonl"
    asked = ["generate", seeing, talk, texts, str(tmp_path / "bytes.parquet"), "-o", str(out), *GREEDY, "--chat"]
    assert main(asked) == 0
    expected = [oracle(seeing, "so?", 1), oracle(seeing, "which?", 0, 1), oracle(seeing, "what?", 0)]
    lines = read(out)
    assert [line["answers"][0]["text"] for line in lines] == expected and len(set(expected)) == 3
    assert base64.b64decode(lines[2]["images"][0]["bytes"]) == data[0]["bytes"]
    scored = tmp_path / "scored.jsonl"
    lines[0]["solution"] = lines[2]["solution"] = expected[0]
    answered = rows("out/answered.jsonl", lines)  # whose pictures lie elsewhere
    assert main(["score", answered, "--verifier", "math", "-o", str(scored)]) == 0, capsys.readouterr().err
    assert [len(line["scores"]) for line in read(scored)] == [1, 1, 1]
    with serving(says("Score: 9")) as server:
        verifier = ["--verifier", "judge", f"judge_api_url={server.url}", "judge_model_name=j", "--no-truth"]
        lost, there = ["score", answered, *verifier, "pictures=true"], ["--image-folder", str(tmp_path)]
        assert "out/1.png': no such file" in refused(capsys, *lost)
        assert main([*lost, *there]) == 0
        assert main(["score", answered, *verifier]) == 0
    assert "(judge) reads <image> in place of the pictures of 3 prompts; pictures: true" in capsys.readouterr().err
    seen = [[np.asarray(shown) for shown in shown_in(body)] for body in server.bodies]
    assert sorted(map(len, seen)) == [0, 0, 0, 1, 1, 2]
    assert all(np.array_equal(pixels, PIXELS[number]) for number, pixels in enumerate(max(seen, key=len)))


def test_pictures_that_cannot_be_asked_are_told_before_a_model_loads(seeing, model, files, rows, tmp_path, capsys):
    line = {"prompt": "?", "images": ["0.png"]}
    out = ["-o", tmp_path / "out.jsonl", *GREEDY]
    assert "--chat sends them" in refused(capsys, "generate", seeing, rows("a.jsonl", [line]), *out)
    (tmp_path / "2.png").write_bytes(Path(files[0]).read_bytes()[:900])
    wrong = rows("b.jsonl", [line | {"images": ["2.png"]}, line | {"images": ["../0.png"]}])
    assert "outside of" in refused(capsys, "generate", seeing, wrong, *out, "--chat")
    cut = rows("c.jsonl", [line | {"images": ["2.png"]}])
    assert "c.jsonl:1: images[0]: unreadable" in refused(capsys, "generate", seeing, cut, *out, "--chat")
    told = refused(capsys, "generate", model, rows("d.jsonl", [line]), *out, "--chat")
    assert "there are pictures, but the model takes no pictures" in told


def test_generate_and_score_take_pictures_at_addresses(seeing, files, rows, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def file(path: str, _: Any) -> Reply:
        name = tmp_path / path[1:]
        return Reply(body=name.read_bytes()) if name.is_file() else Reply(404)

    with serving(file) as web:
        lines = [{"prompt": "so?", "images": [f"{web.url}/{name}.png"], "solution": "0"} for name in (1, "none")]
        out = tmp_path / "said.jsonl"
        asking = ["generate", seeing, rows("a.jsonl", lines[:1]), "-o", str(out), *GREEDY, "--chat"]
        assert "not fetched from addresses" in refused(capsys, *asking) and not web.paths
        assert "expected https://" in refused(capsys, *asking, "--image-urls", "any")
        assert "without https://" in refused(capsys, *asking, "--image-urls", "https://a")
        urls = ["--image-urls", "127.0.0.1,example.org"]
        missing = ["generate", seeing, rows("b.jsonl", lines), "-o", str(out), *GREEDY, "--chat", *urls]
        assert "b.jsonl:2: images[0]: " in refused(capsys, *missing)
        assert main([*asking, *urls]) == 0
        (line,) = read(out)
        assert line["answers"][0]["text"] == oracle(seeing, "so?", 1)
        with serving(says("Score: 9")) as judge:
            verifier = ["judge", f"judge_api_url={judge.url}", "judge_model_name=j", "pictures=true"]
            scoring = ["score", str(out), "--no-truth", "--verifier", *verifier]
            assert "image_urls" in refused(capsys, *scoring)
            assert main([*scoring, *urls]) == 0
            unseen = rows("c.jsonl", [{**lines[1], "answers": ["3"]}])
            told = refused(capsys, "score", unseen, "--no-truth", "--verifier", *verifier, *urls)
    assert "c.jsonl:1: images[0]: " in told
    (body,) = judge.bodies
    assert np.array_equal(np.asarray(shown_in(body)[0]), PIXELS[1])
    assert web.paths.count("/1.png") == 1, "once for both commands"


def test_a_path_out_of_the_folder_is_allowed_by_an_option(seeing, files, rows, tmp_path, capsys):
    asked = rows("a.jsonl", [{"prompt": "so?", "images": [files[1]]}])
    (tmp_path / "elsewhere").mkdir()
    options = ["-o", str(tmp_path / "out.jsonl"), *GREEDY, "--chat", "--image-folder", str(tmp_path / "elsewhere")]
    assert "image_outside_folder" in refused(capsys, "generate", seeing, asked, *options)
    assert main(["generate", seeing, asked, *options, "--image-outside-folder"]) == 0
    assert read(tmp_path / "out.jsonl")[0]["answers"][0]["text"] == oracle(seeing, "so?", 1)


def test_chat_puts_a_picture_into_the_next_message(seeing, model, files, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/image {files[1]}\nso?\n/reset\n/image none.png\n/image\n/quit\n"))
    assert main(["chat", seeing, *GREEDY]) == 0
    out, err = capsys.readouterr()
    assert out == oracle(seeing, "so?", 1) + "\n"
    assert "84 x 56 pixels, 6 tokens" in err and "no such file" in err and "/image: no file" in err
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/image {files[1]}\n"))
    assert main(["chat", model, *GREEDY]) == 0
    assert "/image: no pictures, the model takes no pictures" in capsys.readouterr().err


def test_serve_answers_requests_with_pictures(seeing, files, capfd):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said: list[Any] = []

    def ask() -> None:
        policy = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=60)
        policy.models.list()  # tried until there is a server
        uri = f"data:image/png;base64,{base64.b64encode(Path(files[1]).read_bytes()).decode()}"
        content: Any = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": "so?"}]
        try:
            messages: Any = [{"role": "user", "content": content}]
            answer = policy.chat.completions.create(model="m", messages=messages, max_tokens=6, temperature=0)
            said.append((answer.choices[0].message.content, answer.usage))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    client = threading.Thread(target=ask)
    client.start()
    assert main(["serve", seeing, "--port", str(port), "--max-length", "128"]) == 0
    client.join()
    ((text, usage),) = said
    assert text == oracle(seeing, "so?", 1) and usage.prompt_tokens > TOKENS
    assert "pictures too; Ctrl-C" in capfd.readouterr().err


def test_an_exported_model_sees_as_before(seeing, tmp_path):
    out = tmp_path / "out"
    assert main(["export", seeing, "-o", str(out), "--max-shard-size", "200KB"]) == 0
    assert oracle(str(out), "so?", 1) == oracle(seeing, "so?", 1)
    name = "preprocessor_config.json"
    assert (out / name).read_bytes() == (Path(seeing) / name).read_bytes()
