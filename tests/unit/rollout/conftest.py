"""What tests of rollouts share: tokenizers on disk, an engine, a renderer that sees, waiting for other threads."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from roll.data.pictures import Pictures
from roll.data.renderer import ChatRenderer
from roll.data.requests import Completion, GenerateFn, GenerateRequest
from roll.models.tiny import make_tiny_model, make_tokenizer
from roll.rewards.types import RewardResult, Sample
from tests.support.rollouts import RENDERER, sampled


class Engine:
    """Says one text after the other, the last one from then on; keeps what it was asked and the tokens that it said.

    A text may be given in parts, which are tokenized one by one.
    """

    def __init__(self, *texts: str | list[str], renderer: ChatRenderer = RENDERER, ends: bool = True) -> None:
        self.texts, self.renderer, self.ends = texts, renderer, ends
        self.requests: list[GenerateRequest] = []
        self.log: list[tuple[list[int], list[int]]] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        text = self.texts[min(len(self.requests), len(self.texts) - 1)]
        self.requests.append(request)
        await asyncio.sleep(0)
        parts = [self.renderer.words(part) for part in ([text] if isinstance(text, str) else text)]
        whole = np.concatenate([*parts, [self.renderer.turn_end()[1]] * self.ends])
        ids = whole[: request.params.max_new_tokens]
        self.log.append((request.prompt_ids.tolist(), ids.tolist()))
        logprobs, stops = -len(self.log), len(ids) == len(whole)
        return sampled(ids, request.request_id, logprobs=logprobs, versions=3, stops=stops)

    def pinned(self) -> GenerateFn:
        return self.generate


async def judge(sample: Sample) -> RewardResult:
    """Looks for the true answer in the words of an answer."""
    good = f"<answer>{sample.ground_truth}</answer>" in sample.response
    return RewardResult(float(good), good, sample.response)


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(path, seed=1)
    return str(path)


@pytest.fixture(scope="session")
def sees(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    """A renderer of a tiny model that takes pictures."""
    path, tokenizer = tmp_path_factory.mktemp("tiny") / "vl", make_tokenizer(pictures=True)
    make_tiny_model(path, 0, pictures=True)
    return ChatRenderer(tokenizer, pictures=Pictures(path, tokenizer=tokenizer))


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a test's threads may wait for; open at its end."""
    gate = threading.Event()
    yield gate
    gate.set()


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never happened")
