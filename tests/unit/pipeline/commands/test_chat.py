"""``roll chat`` through pipes, and the conversation behind it."""

import asyncio
import io

import numpy as np
import pytest

from roll.__main__ import main
from roll.configs.worker import WorkerConfig
from roll.data.renderer import ChatRenderer
from roll.data.requests import SamplingParams
from roll.distributed.strategy.generation.alone import local_generator
from roll.models.tiny import make_tokenizer
from roll.pipeline.commands.engine import generator_section
from roll.rollout import answering as conversation
from roll.rollout.answering import Conversation
from tests.support.contract import greedy_oracle, load

pytestmark = pytest.mark.usefixtures("one_thread")
SYSTEM = {"role": "system", "content": "Short."}


def said(words: str) -> dict[str, str]:
    return {"role": "user", "content": words}


def test_a_conversation_through_pipes(model, monkeypatch, capsys):
    renderer, oracle = ChatRenderer(make_tokenizer()), load(model)
    first_prompt = renderer.prompt([SYSTEM, said("Up?")])
    first = np.array(greedy_oracle(oracle, first_prompt, 6))
    second_prompt = np.concatenate([first_prompt, first, renderer.continuation([said("Down?")], first)])
    second = np.array(greedy_oracle(oracle, second_prompt, 6))
    again = np.array(greedy_oracle(oracle, renderer.prompt([SYSTEM, said("Down?")]), 6))
    monkeypatch.setattr("sys.stdin", io.StringIO("Up?\n\nDown?\n/reset\nDown?\n/what\n/quit\nnever\n"))
    assert main(["chat", model, "--system", "Short.", "--temperature", "0", "--max-tokens", "6"]) == 0
    out, err = capsys.readouterr()
    assert out == "".join(renderer.decode(ids) + "\n" for ids in (first, second, again))
    assert "/what: no such command" in err and "/reset starts over" in err


def test_bytes_that_are_no_text_are_asked_as_marks(model, monkeypatch, capsys):
    renderer, oracle = ChatRenderer(make_tokenizer()), load(model)
    expected = greedy_oracle(oracle, renderer.prompt([said("Up\ufffd?")]), 6)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Up\xff?\n"), "utf-8", "surrogateescape"))
    assert main(["chat", model, "--temperature", "0", "--max-tokens", "6"]) == 0
    assert capsys.readouterr().out == renderer.decode(np.array(expected)) + "\n"


@pytest.mark.parametrize("words", ["", "a\udcff"])
def test_a_system_message_is_a_text(words, capsys):
    for command in (["chat", "."], ["generate", ".", "x.jsonl", "-o", "y.jsonl", "--chat"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--system", words])
        assert ended.value.code == 2 and "--system: got" in capsys.readouterr().err


def test_words_come_as_they_are_sampled_and_what_was_said_counts_when_one_stops_listening(model, monkeypatch):
    monkeypatch.setattr(conversation, "POLL_S", 0.002)
    worker: WorkerConfig = generator_section("hf_infer", {})
    renderer = ChatRenderer(make_tokenizer())
    with local_generator(model, worker, sequence_length=600, max_running_requests=1, seed=0) as engine:
        params = SamplingParams(max_new_tokens=80, temperature=1.5)
        talk = Conversation(engine, renderer, params, None, seed=1)

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
    assert main(["chat", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
    assert main(["chat", str(tmp_path), "generating_args.temprature=1"]) == 2
    assert "did you mean temperature?" in capsys.readouterr().err
