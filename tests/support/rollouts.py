"""An engine that says what it is told to, and answers, turns, episodes and batches that tests of rollouts make up.

They say only what is not as usual.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from roll.data.batch import Batch
from roll.data.renderer import ChatRenderer
from roll.data.requests import Completion, FinishReason, GenerateFn, GenerateRequest
from roll.models.tiny import make_tokenizer
from roll.rewards.types import RewardResult, Sample
from roll.rollout.rows import groups_to_batch
from roll.rollout.types import EpisodeEnd, RolloutGroup, Trajectory, Turn

TOKENIZER = make_tokenizer()
RENDERER = ChatRenderer(TOKENIZER)


def sampled(ids: Any, request_id: str = "r", *, logprobs: Any = 0, versions: Any = 0, stops: bool = True) -> Completion:
    """An answer of these tokens; ``logprobs`` and ``versions`` may be one value for all of them."""
    ids = np.asarray(ids, dtype=np.int64)
    logprobs = np.full(len(ids), logprobs, dtype=np.float32)
    versions = np.full(len(ids), versions, dtype=np.int64)
    return Completion(request_id, ids, logprobs, FinishReason.STOP if stops else FinishReason.LENGTH, versions)


class Engine:
    """Says one text after the other in ``seconds`` each, the last one from then on; keeps what it was asked and said.

    A text may be given in parts, which are tokenized one by one.
    """

    version = 3

    def __init__(
        self, *texts: str | list[str], renderer: ChatRenderer = RENDERER, ends: bool = True, seconds: float = 0.0
    ) -> None:
        self.texts, self.renderer, self.ends, self.seconds = texts, renderer, ends, seconds
        self.requests: list[GenerateRequest] = []
        self.log: list[tuple[list[int], list[int]]] = []
        self.given_up = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        text = self.texts[min(len(self.requests), len(self.texts) - 1)]
        self.requests.append(request)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        parts = [self.renderer.words(part) for part in ([text] if isinstance(text, str) else text)]
        whole = np.concatenate([*parts, [self.renderer.turn_end()[1]] * self.ends])
        ids = whole[: request.params.max_new_tokens]
        self.log.append((request.prompt_ids.tolist(), ids.tolist()))
        logprobs, stops = np.linspace(-1, 0, len(ids)) - len(self.log), len(ids) == len(whole)
        return sampled(ids, request.request_id, logprobs=logprobs, versions=self.version, stops=stops)

    def pinned(self) -> GenerateFn:
        return self.generate


async def judge(sample: Sample) -> RewardResult:
    """Looks for the true answer in the words of an answer."""
    good = f"<answer>{sample.ground_truth}</answer>" in sample.response
    return RewardResult(float(good), good, sample.response)


def make_turn(
    prompt: Sequence[int],
    answer: Sequence[int] | Completion,
    reward: float = 0.0,
    penalty: float = 0.0,
    key: str = "s",
    stops: bool = True,
) -> Turn:
    """A turn; the log-probs and the versions of an answer that is given as tokens tell these tokens from others."""
    if not isinstance(answer, Completion):
        ids = np.array(answer, dtype=np.int64)
        answer = sampled(ids, logprobs=ids / np.float32(-8), versions=ids + 1000, stops=stops)
    action = None if penalty else "Up"
    return Turn(np.array(prompt, dtype=np.int64), answer, "", "", action, reward, penalty, key)


def told_turn(
    text: str = "text",
    observation: str = "asked",
    action: str | None = None,
    reward: float = 0.0,
    penalty: float = 0.0,
    *,
    ids: Sequence[int] = (1,),
    prompt: Sequence[int] = (0,),
    **completion: Any,
) -> Turn:
    """A turn of which the words matter; ``completion``: what else is known of the tokens."""
    answer = replace(sampled(ids), **completion)
    return Turn(np.array(prompt, dtype=np.int64), answer, text, observation, action, reward, penalty, "s")


def make_trajectory(
    turns: Sequence[Turn], *, tag: str = "A", group: int = 0, member: int = 0, **values: Any
) -> Trajectory:
    """An episode, a success where its last turn has a task reward."""
    plain = {"seed": 0, "end": EpisodeEnd.TERMINATED, "final_observation": "", "history": True}
    plain["success"] = bool(turns and turns[-1].task_reward > 0)
    return Trajectory(tag=tag, group_id=group, member=member, turns=tuple(turns), **(plain | values))


def conversation(turns: Sequence[tuple[list[int], list[int], float]]) -> list[Turn]:
    """Turns of one growing conversation from what each adds."""
    prompt: list[int] = []
    made = []
    for added, answer, reward in turns:
        prompt = prompt + added
        made.append(make_turn(prompt, answer, reward))
        prompt = prompt + answer
    return made


def group_of(*episodes: Trajectory, number: int = 0, **others: Any) -> RolloutGroup:
    return RolloutGroup(number, episodes[0].tag if episodes else "A", episodes, **others)


def batch_of(*episodes: Trajectory) -> Batch:
    """The rows of one group."""
    return groups_to_batch([group_of(*episodes)], [episodes[0].tag])


def assert_equal(left: Any, right: Any, where: str = "") -> None:
    """Of the same types and equal in every field, down to the arrays."""
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype and np.array_equal(left, right), where
    elif is_dataclass(left):
        assert type(left) is type(right), where
        for entry in fields(left):
            assert_equal(getattr(left, entry.name), getattr(right, entry.name), f"{where}.{entry.name}")
    elif isinstance(left, tuple | list):
        assert type(left) is type(right) and len(left) == len(right), where
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_equal(one, other, f"{where}[{index}]")
    else:
        assert left == right and isinstance(left, type(right)), where
