"""A prompt as an environment of one turn, and the worker that plays a group of them."""

import asyncio
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from roll.data.pictures import PictureError, Pictures, Source
from roll.data.prompts import Prompt, PromptSampler
from roll.data.questions import question_in
from roll.data.renderer import ChatRenderer
from roll.data.requests import Completion, FinishReason, GenerateRequest, SamplingParams
from roll.data.row_pictures import with_items
from roll.models.tiny import make_tokenizer
from roll.rewards.types import RewardError, RewardResult, Sample
from roll.rollout.env_manager import EpisodeSpec, LengthLimits
from roll.rollout.errors import PromptTooLongError
from roll.rollout.metrics import rollout_metrics
from roll.rollout.prompt_worker import (
    PromptEnv,
    PromptManager,
    PromptPlan,
    PromptSpec,
    PromptWorker,
    PromptWorkerContext,
)
from roll.rollout.rows import groups_to_batch
from roll.rollout.types import RolloutGroup, Trajectory
from roll.rollout.workers import FlatGroups
from tests.support.picture_models import make_processor

TOKENIZER = make_tokenizer()
RENDERER = ChatRenderer(TOKENIZER)
MESSAGES = ({"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="})
PROMPT = Prompt("p1", "sums", MESSAGES, ground_truth={"value": 2}, extra_info={"level": 3})
PARAMS = SamplingParams(max_new_tokens=4, temperature=0.7)
LIMITS = LengthLimits(prompt_length=64, sequence_length=80)
EPISODE = EpisodeSpec("sums", 5, 1, env_seed=11, sampling_seed=13)


class Engine:
    """Says the text that it is told to; keeps the requests."""

    def __init__(self, text: str = "2", reason: FinishReason = FinishReason.STOP) -> None:
        self.text, self.reason = text, reason
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        ids = np.array([*TOKENIZER.encode(self.text), TOKENIZER.eos_token_id], dtype=np.int64)
        return Completion(
            request.request_id,
            ids,
            np.zeros(len(ids), dtype=np.float32),
            self.reason,
            np.zeros(len(ids), dtype=np.int64),
        )

    def pinned(self) -> Callable[[GenerateRequest], Any]:
        return self.generate


class Scorer:
    """Gives the verdict, or raises the error; keeps the samples."""

    def __init__(self, outcome: RewardResult | Exception) -> None:
        self.outcome = outcome
        self.samples: list[Sample] = []

    async def score(self, sample: Sample) -> RewardResult:
        self.samples.append(sample)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def play(prompt: Prompt, engine: Engine, scorer: Scorer, limits: LengthLimits = LIMITS) -> Trajectory:
    env = PromptEnv(prompt, scorer.score)
    return asyncio.run(PromptManager(RENDERER, PARAMS, limits).run_episode(env, env.watch(engine.generate), EPISODE))


def test_an_answer_is_one_turn_with_the_verdict_as_its_reward():
    engine = Engine("two: 2")
    scorer = Scorer(RewardResult(0.75, True, "2", {"math/score": 1.0, "format/score": 0.5}))
    trajectory = play(PROMPT, engine, scorer)
    (turn,) = trajectory.turns
    assert turn.prompt_ids.tolist() == RENDERER.prompt(MESSAGES).tolist()
    assert (turn.text, turn.action, turn.observation) == ("two: 2", "2", "1+1=")
    assert (turn.task_reward, turn.penalty, trajectory.score, trajectory.success) == (0.75, 0.0, 0.75, True)
    assert trajectory.history and trajectory.end == "terminated"
    assert trajectory.info["prompt_id"] == "p1" and trajectory.info["ground_truth"] == "{'value': 2}"
    assert question_in(trajectory.info, turn.observation) == list(MESSAGES)
    assert trajectory.info["math/score"] == 1.0 and trajectory.info["format/score"] == 0.5
    (request,) = engine.requests
    assert (request.params.temperature, request.params.max_new_tokens) == (0.7, 4)
    # The batch has the reward on the last sampled token and learns from the answer alone.
    batch = groups_to_batch([RolloutGroup(5, "sums", (trajectory,))], ["sums"])
    sampled = len(TOKENIZER.encode("two: 2")) + 1
    assert batch.rewards_T is not None
    assert batch.rewards_T.nonzero().flatten().tolist() == [batch.num_tokens - 1]
    assert batch.loss_mask_T.tolist() == [False] * len(turn.prompt_ids) + [True] * sampled


def test_where_nobody_looks_for_an_answer_there_is_no_rate_of_valid_ones():
    silent = play(
        PROMPT, Engine("two"), Scorer(RewardResult(0.5, False, notes={"custom/why": "x"}, seeks_answer=False))
    )
    missing = play(PROMPT, Engine("two"), Scorer(RewardResult(0.0, False)))
    found = play(PROMPT, Engine("two"), Scorer(RewardResult(0.0, False, "2")))
    assert silent.info["custom/why"] == "x"
    metrics = [rollout_metrics([RolloutGroup(0, "sums", of)], "r") for of in ((silent,), (silent, missing, found))]
    assert "r/valid_rate" not in metrics[0] and metrics[1]["r/valid_rate"] == 0.5


@pytest.mark.parametrize(("reason", "truncated"), [(FinishReason.STOP, False), (FinishReason.LENGTH, True)])
def test_the_verifier_learns_all_that_is_known(reason, truncated):
    scorer = Scorer(RewardResult(0.0, False))
    trajectory = play(PROMPT, Engine("no idea", reason), scorer)
    (sample,) = scorer.samples
    assert sample == Sample(
        prompt="1+1=",
        response="no idea",
        ground_truth={"value": 2},
        data_source="sums",
        extra_info={"level": 3},
        messages=MESSAGES,
        num_tokens=len(TOKENIZER.encode("no idea")) + 1,
        truncated=truncated,
    )
    assert trajectory.turns[0].action is None, "no answer was found"


def test_a_prompt_is_used_as_it_was_cut_and_ends_the_episode_where_it_does_not_fit():
    engine = Engine()
    play(replace(PROMPT, prompt_ids=np.array([7, 8, 9])), engine, Scorer(RewardResult(1.0, True)))
    assert engine.requests[0].prompt_ids.tolist() == [7, 8, 9]
    with pytest.raises(PromptTooLongError, match="sums: the first prompt has"):
        play(PROMPT, Engine(), Scorer(RewardResult(1.0, True)), LengthLimits(prompt_length=8, sequence_length=80))
    with pytest.raises(RewardError, match="cannot tell"):
        play(PROMPT, Engine(), Scorer(RewardError("cannot tell")))


def spec(**changes: Any) -> PromptSpec:
    return replace(PromptSpec(5, "sums", 11, 3, prompt=PROMPT, sampling="train"), **changes)


def run_group(
    tokenizer_path: str, engine: Engine, scorer: Any, group: PromptSpec, held_out: LengthLimits = LIMITS, **more: Any
) -> RolloutGroup:
    return asyncio.run(prompt_worker(tokenizer_path, engine, scorer, held_out, **more).run_group(group))


def prompt_worker(
    tokenizer_path: str, engine: Engine, scorer: Any, held_out: LengthLimits = LIMITS, **more: Any
) -> PromptWorker:
    worker = PromptWorker("rollout", 0, 1, {})
    params = {"train": PARAMS, "val": replace(PARAMS, temperature=0.3)}
    limits = {"train": LIMITS, "val": held_out}
    domains = {"sums": "maths"}
    worker.setup(PromptWorkerContext(tokenizer_path, "native", params, limits, domains, spread=False, **more))
    worker.client = engine  # type: ignore[assignment]
    worker.rewards = {"maths": scorer.score}
    return worker


class Choosy(Scorer):
    """Fails for some of the answers, by the order in which they come."""

    def __init__(self, *failing: int) -> None:
        super().__init__(RewardResult(1.0, True, "2"))
        self.failing = failing

    async def score(self, sample: Sample) -> RewardResult:
        self.samples.append(sample)
        if len(self.samples) - 1 in self.failing:
            raise RewardError("rewards.maths: cannot tell")
        return RewardResult(1.0, True, "2")


def test_a_group_answers_one_prompt_with_seeds_of_their_own(tokenizer_path):
    engine = Engine()
    group = run_group(tokenizer_path, engine, Choosy(), spec())
    assert [trajectory.member for trajectory in group.trajectories] == [0, 1, 2]
    assert len({request.prompt_ids.tobytes() for request in engine.requests}) == 1
    assert len({request.params.seed for request in engine.requests}) == 3
    assert (group.tag, group.dropped, group.errors, group.baseline) == ("sums", 0, (), None)
    val = Engine()
    short = LengthLimits(LIMITS.prompt_length, len(engine.requests[0].prompt_ids) + 3)
    run_group(tokenizer_path, val, Choosy(), spec(sampling="val", greedy=False), short)
    assert {request.params.temperature for request in val.requests} == {0.3}
    rooms = [{request.params.max_new_tokens for request in each.requests} for each in (engine, val)]
    assert rooms == [{4}, {3}], "held-out samples have a bound of their own"


def test_an_answer_without_a_reward_is_dropped_and_told(tokenizer_path):
    group = run_group(tokenizer_path, Engine(), Choosy(1), spec())
    assert len(group.trajectories) == 2 and group.dropped == 1
    assert group.errors == ("sums group 5 member 1: rewards.maths: cannot tell",)
    assert all(trajectory.score == 1.0 for trajectory in group.trajectories), "never a silent 0"
    lost = run_group(tokenizer_path, Engine(), Choosy(0, 1, 2), spec())
    assert not lost.trajectories and lost.dropped == 3 and len(lost.errors) == 3


def test_the_baseline_is_one_more_greedy_answer_without_which_the_group_is_lost(tokenizer_path):
    engine = Engine()
    group = run_group(tokenizer_path, engine, Choosy(), spec(baseline=True))
    assert [trajectory.member for trajectory in group.trajectories] == [0, 1, 2]
    assert group.baseline is not None and group.baseline.score == 1.0
    assert sorted(request.params.temperature for request in engine.requests) == [0.0, 0.7, 0.7, 0.7]
    lost = run_group(tokenizer_path, Engine(), Choosy(0), spec(baseline=True))  # the baseline starts first
    assert not lost.trajectories and lost.baseline is None and lost.dropped == 3


@pytest.fixture
def pictures(tmp_path) -> Pictures:
    found = Pictures.of(make_processor(tmp_path / "model"))
    assert found is not None
    return found


PIXELS = np.random.default_rng(0).integers(0, 256, (56, 84, 3), np.uint8)


def plan_with_a_picture(file: Path) -> PromptPlan:
    """Groups of three answers to a prompt with one picture."""
    Image.fromarray(PIXELS).save(file)
    content = [{"type": "image", "image": Source(file, "images[0]")}, {"type": "text", "text": "?"}]
    prompt = replace(PROMPT, messages=({"role": "user", "content": content},))
    return PromptPlan(PromptSampler([prompt], seed=3), group_size=3, num_slots=8, seed=3, sampling="train")


def test_a_worker_decodes_the_pictures_of_few_prompts_at_a_time(tmp_path, monkeypatch, pictures):
    worker = prompt_worker(str(tmp_path / "model"), Engine(), Choosy(), pictures=pictures)
    plan, now, seen = plan_with_a_picture(tmp_path / "a.png"), [], []

    def slow(messages: Any, pictures: Pictures) -> Any:
        now.append(messages)
        seen.append(len(now))
        time.sleep(0.02)
        now.pop()
        return with_items(messages, pictures)

    async def run() -> None:
        await asyncio.gather(*(worker.run_group(plan.spec(number)) for number in range(12)))

    monkeypatch.setattr("roll.rollout.prompt_worker.with_items", slow)
    asyncio.run(run())
    assert len(seen) == 12 and max(seen) <= 4


def test_pictures_are_decoded_once_for_a_group_and_travel_once(tmp_path, pictures):
    pixels, file = PIXELS, tmp_path / "a.png"
    group = plan_with_a_picture(file).spec(0)
    file.unlink()  # a worker on another machine does not have it
    engine, scorer = Engine(), Choosy()
    played = run_group(str(tmp_path / "model"), engine, scorer, group, pictures=pictures)
    items = [item for request in engine.requests for item in request.items]
    assert len(items) == 3 and len({*map(id, items)}) == 1 and (items[0].data == pixels).all()
    assert all((request.prompt_ids < 0).sum() == 6 for request in engine.requests)
    assert [sample.messages[0]["content"] for sample in scorer.samples] == ["<image>?"] * 3
    assert len(pickle.dumps(FlatGroups.of([played]))) < 1.5 * pixels.nbytes
    batch = groups_to_batch([played], ["sums"])
    assert batch.items_I is not None and [*map(len, batch.items_I)] == [1, 1, 1]
    broken = replace(PROMPT, messages=({"role": "user", "content": [{"type": "image", "image": Source(b"x", "a")}]},))
    with pytest.raises(PictureError, match="prompt p1: a: no picture"):
        run_group(str(tmp_path / "model"), Engine(), Choosy(), replace(group, prompt=broken), pictures=pictures)


def test_a_draw_decides_prompt_and_seed_and_later_epochs_have_other_seeds():
    prompts = [replace(PROMPT, id=f"p{n}") for n in range(5)]
    plan = PromptPlan(PromptSampler(prompts, seed=3), group_size=4, num_slots=8, seed=3, sampling="train")
    specs = [plan.spec(n) for n in range(10)]
    assert specs == [plan.spec(n) for n in range(10)]
    assert sorted(spec.prompt.id for spec in specs[:5]) == sorted(spec.prompt.id for spec in specs[5:])
    assert len({spec.env_seed for spec in specs}) == 10
    held_out = replace(plan, sampling="val").spec(0)
    assert held_out.env_seed != specs[0].env_seed and held_out.sampling == "val"
