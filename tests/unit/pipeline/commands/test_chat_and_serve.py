"""``roll chat`` through pipes, the conversation behind it, and ``roll serve`` in a process, asked by real clients."""

import asyncio
import io
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

from roll.data.renderer import ChatRenderer
from roll.data.requests import SamplingParams
from roll.distributed.strategy.generation.alone import local_generator
from roll.models.tiny import make_tokenizer
from roll.pipeline.commands.engine import generator_section
from roll.rollout import answering as conversation
from roll.rollout.answering import Conversation
from tests.support.cli import call, refused
from tests.support.contract import greedy_oracle, load

pytestmark = pytest.mark.usefixtures("one_thread")
SYSTEM, UP = {"role": "system", "content": "Short."}, {"role": "user", "content": "Up?"}
DOWN = {"role": "user", "content": "Down?"}
RENDERER = ChatRenderer(make_tokenizer())
GREEDY = ("--temperature", "0", "--max-tokens", "6")


def test_a_conversation_through_pipes(model, monkeypatch, capsys):
    oracle = load(model)
    first_prompt = RENDERER.prompt([SYSTEM, UP])
    first = np.array(greedy_oracle(oracle, first_prompt, 6))
    second_prompt = np.concatenate([first_prompt, first, RENDERER.continuation([DOWN], first)])
    second = np.array(greedy_oracle(oracle, second_prompt, 6))
    again = np.array(greedy_oracle(oracle, RENDERER.prompt([SYSTEM, DOWN]), 6))
    monkeypatch.setattr("sys.stdin", io.StringIO("Up?\n\nDown?\n/reset\nDown?\n/what\n/quit\nnever\n"))
    out, err = call(capsys, "chat", model, "--system", "Short.", *GREEDY)
    assert out == "".join(RENDERER.decode(ids) + "\n" for ids in (first, second, again))
    assert "/what: no such command" in err and "/reset starts over" in err


def test_bytes_that_are_no_text_are_asked_as_marks(model, monkeypatch, capsys):
    asked = {"role": "user", "content": "Up\ufffd?"}
    expected = greedy_oracle(load(model), RENDERER.prompt([asked]), 6)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Up\xff?\n"), "utf-8", "surrogateescape"))
    assert call(capsys, "chat", model, *GREEDY)[0] == RENDERER.decode(np.array(expected)) + "\n"


def test_words_come_as_they_are_sampled_and_what_was_said_counts_when_one_stops_listening(model, monkeypatch):
    monkeypatch.setattr(conversation, "POLL_S", 0.002)
    worker = generator_section("hf_infer", {})
    with local_generator(model, worker, sequence_length=600, max_running_requests=1, seed=0) as engine:
        params = SamplingParams(max_new_tokens=80, temperature=1.5)
        talk = Conversation(engine, RENDERER, params, None, seed=1)

        async def listen(words: str, most: int) -> list[str]:
            pieces = []
            async for piece in talk.answer(words):
                pieces.append(piece)
                if len(pieces) == most:
                    break
            return pieces

        lengths = [len(asyncio.run(listen(words, 1000))) for words in "abcd"]
        assert max(lengths) > 1
        asyncio.run(listen("i", 1))
        assert asyncio.run(listen("j", 1000))
        with pytest.raises(ValueError, match="sequence_length is 600"):
            asyncio.run(listen("long " * 200, 1000))
        assert asyncio.run(listen("k", 1000))


def test_a_model_that_cannot_be_talked_with_is_code_2(tmp_path, capsys):
    assert "config.json" in refused(capsys, "chat", tmp_path)
    assert "did you mean temperature?" in refused(capsys, "chat", tmp_path, "generating_args.temprature=1")


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


def test_served_answers_are_the_models_own_whoever_asks(served, model):
    oracle = load(model)
    expected = greedy_oracle(oracle, RENDERER.prompt([UP]), 6)
    chat = served.chat.completions.create(model="any", messages=[UP], max_tokens=6, temperature=0)
    assert chat.choices[0].message.content == RENDERER.decode(np.array(expected))
    written = greedy_oracle(oracle, RENDERER.words("12+3="), 5)
    text = served.completions.create(model="any", prompt="12+3=", max_tokens=5, temperature=0)
    assert text.choices[0].text == RENDERER.decode(np.array(written))


def test_a_seed_repeats_an_answer_and_no_seed_does_not(served):
    def texts(**keys: int) -> set[str]:
        asked = [served.completions.create(model="m", prompt="1", max_tokens=24, **keys) for _ in range(3)]
        return {choice.text for each in asked for choice in each.choices}

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
        assert f"--port: got {port}, expected a free port" in refused(capsys, "serve", model, "--port", port)


GENERATE = ("generate", "/nowhere", "p.jsonl", "-o", "out.jsonl")
SCORE = ("score", "p.jsonl", "--verifier", "math")


@pytest.mark.parametrize(
    ("command", "words", "named"),
    [
        (("serve", "{model}"), ["--port", "70000"], "--port: got 70000"),
        (("serve", "{model}"), ["--concurrency", "0"], "--concurrency"),
        (("serve", "{model}"), ["--dialect", "x"], "'x'"),
        (GENERATE, ["--max-length", "0"], "generate: --max-length: got 0, expected at least 1"),
        (("chat", "/nowhere"), ["--max-length", "0"], "chat: --max-length: got 0, expected at least 1"),
        (("chat", "."), ["--system", ""], "--system: got"),
        (("chat", "."), ["--system", "a\udcff"], "--system: got"),
        ((*GENERATE, "--chat"), ["--system", ""], "--system: got"),
        ((*GENERATE, "--chat"), ["--system", "a\udcff"], "--system: got"),
        (SCORE, ["--processes", "0"], "score: --processes: got 0, expected at least 1"),
        (SCORE, ["--processes", "-1"], "score: --processes: got -1, expected at least 1"),
    ],
)
def test_wrong_options_are_refused(command, words, named, model, capsys):
    assert named in refused(capsys, *(word.format(model=model) for word in command), *words)
