"""``roll serve``: requests of real clients, answered by a real model in a process of its own."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest

from roll.__main__ import main
from roll.data.renderer import ChatRenderer
from roll.models.tiny import make_tokenizer
from tests.support.contract import greedy_oracle, load

pytestmark = pytest.mark.usefixtures("one_thread")
UP = {"role": "user", "content": "Up?"}


@pytest.fixture(scope="module")
def served(model: str) -> Iterator[openai.OpenAI]:
    command = [sys.executable, "-m", "roll", "serve", model, "--port", "0", "--max-length", "64", "--concurrency", "4"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        url = next(found[1] for line in lines if (found := re.search(r"answers at (\S+),", line)))
        yield openai.OpenAI(base_url=url, api_key="any", max_retries=0)
        process.send_signal(signal.SIGTERM)
        assert "answers of" in process.stderr.read()
    assert process.returncode == 0


def test_answers_are_the_models_own_whoever_asks(served, model):
    renderer, oracle = ChatRenderer(make_tokenizer()), load(model)
    expected = greedy_oracle(oracle, renderer.prompt([UP]), 6)
    chat = served.chat.completions.create(model="any", messages=[UP], max_tokens=6, temperature=0)  # type: ignore[list-item]
    assert chat.choices[0].message.content == renderer.decode(np.array(expected))
    written = greedy_oracle(oracle, renderer.words("12+3="), 5)
    text = served.completions.create(model="any", prompt="12+3=", max_tokens=5, temperature=0)
    assert text.choices[0].text == renderer.decode(np.array(written))


def test_a_seed_repeats_an_answer_and_no_seed_does_not(served):
    def texts(**keys: int) -> set[str]:
        return {
            choice.text
            for _ in range(3)
            for choice in served.completions.create(model="m", prompt="1", max_tokens=24, **keys).choices
        }

    assert len(texts(seed=7)) == 1
    assert len(texts()) == 3
    assert len(texts(seed=7, n=3)) == 3


def test_requests_are_refused_in_the_words_of_the_api(served):
    with pytest.raises(openai.BadRequestError, match="echo"):
        served.completions.create(model="m", prompt="1", echo=True)
    with pytest.raises(openai.BadRequestError, match="64"):
        served.completions.create(model="m", prompt="1" * 80)
    assert httpx.post(f"{served.base_url}reward", json={"reward": 1.0}).status_code == 404
    assert served.models.list().data[0].id == "policy"


def test_a_port_that_is_taken_is_named(model, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()
        assert main(["serve", model, "--port", str(port)]) == 2
    assert f"--port: got {port}, expected a free port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--port", "70000"], "--port: got 70000"),
        (["--concurrency", "0"], "--concurrency"),
        (["--dialect", "x"], "'x'"),
    ],
)
def test_wrong_options_are_refused(words, named, model, capsys):
    try:
        code = main(["serve", model, *words])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2 and named in capsys.readouterr().err
