"""A prompt as an environment, of one turn or with a user who answers, and the worker that plays a group of them."""

import asyncio
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from roll.configs.loader import load_config
from roll.configs.rlvr import RLVRConfig, UserConfig
from roll.data.pictures import PictureError, Pictures, Source
from roll.data.prompts import Prompt, PromptSampler
from roll.data.questions import question_in
from roll.data.requests import SamplingParams
from roll.data.row_pictures import with_items
from roll.preflight.choices import CHECKS
from roll.rewards.types import RewardError, RewardResult, Sample
from roll.rollout.env_manager import AsyncEnv, EpisodeSpec, LengthLimits
from roll.rollout.errors import EnvError, PromptTooLongError
from roll.rollout.metrics import rollout_metrics
from roll.rollout.prompt_worker import (
    PromptEnv,
    PromptManager,
    PromptPlan,
    PromptSpec,
    PromptWorker,
    PromptWorkerContext,
    UserEnv,
    UserError,
    load_user,
)
from roll.rollout.rows import groups_to_batch
from roll.rollout.types import RolloutGroup, Trajectory
from roll.rollout.workers import FlatGroups
from tests.support.configs import words_of
from tests.support.picture_models import make_processor
from tests.support.rollouts import RENDERER, TOKENIZER, Engine
from tests.support.talks import system, user
from tests.unit.configs.test_rlvr_config import MINIMAL

MESSAGES = (system("Add."), user("1+1="))
PROMPT = Prompt("p1", "sums", MESSAGES, ground_truth={"value": 2}, extra_info={"level": 3})
PARAMS = SamplingParams(max_new_tokens=16, temperature=0.7)
LIMITS = LengthLimits(prompt_length=1000, sequence_length=1200)
EPISODE = EpisodeSpec("sums", 5, 1, env_seed=11, sampling_seed=13)
GOOD = RewardResult(1.0, True, "2")
FAILURE = RewardError("rewards.maths: cannot tell")


class Scorer:
    """Gives one outcome after the other or raises it, the last one from then on; keeps the samples."""

    def __init__(self, *outcomes: RewardResult | Exception) -> None:
        self.outcomes = outcomes or (GOOD,)
        self.samples: list[Sample] = []

    async def score(self, sample: Sample) -> RewardResult:
        outcome = self.outcomes[min(len(self.samples), len(self.outcomes) - 1)]
        self.samples.append(sample)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


ERRORS = {"raise": ZeroDivisionError("by nought"), "exit": SystemExit(3), "own timeout": TimeoutError("no line")}


class Guide:
    """A user who says warmer or colder; what it does wrong is told by ``fault``."""

    def __init__(self, fault: str = "", goal: int = 51) -> None:
        self.fault, self.goal = fault, goal
        self.seen: list[list[str]] = []

    async def respond(self, messages: Sequence[Mapping[str, str]], prompt: Prompt) -> tuple[str, float, bool]:
        self.seen.append([message["content"] for message in messages])
        assert messages[-1]["role"] == "assistant" and prompt.tag == PROMPT.tag
        if self.fault in ERRORS:
            raise ERRORS[self.fault]
        if self.fault == "hang":
            await asyncio.sleep(30)
        if self.fault == "odd":
            return "text", float("nan"), False
        guess = int(messages[-1]["content"])
        return ("larger" if guess < self.goal else "smaller"), 0.25, guess == self.goal


class Silent:
    """No user."""


PATH = f"{__name__}:Guide"


def play(
    engine: Engine,
    scorer: Scorer,
    prompt: Prompt = PROMPT,
    limits: LengthLimits = LIMITS,
    *,
    guide: Guide | None = None,
    **keys: Any,
) -> Trajectory:
    """An episode, with a user if there is one, who is configured by ``keys``."""
    env = PromptEnv(prompt, scorer.score)
    partner: AsyncEnv = UserEnv(env, guide, UserConfig(path=PATH, **keys)) if guide else env
    manager = PromptManager(RENDERER, PARAMS, limits)
    return asyncio.run(manager.run_episode(partner, env.watch(engine.generate), EPISODE))


def test_an_answer_is_one_turn_with_the_verdict_as_its_reward():
    engine = Engine("two: 2")
    trajectory = play(engine, Scorer(RewardResult(0.75, True, "2", {"math/score": 1.0, "format/score": 0.5})))
    (turn,) = trajectory.turns
    assert turn.prompt_ids.tolist() == RENDERER.prompt(MESSAGES).tolist()
    assert (turn.text, turn.action, turn.observation) == ("two: 2", "2", "1+1=")
    assert (turn.task_reward, turn.penalty, trajectory.score, trajectory.success) == (0.75, 0.0, 0.75, True)
    assert trajectory.history and trajectory.end == "terminated"
    known = {"prompt_id": "p1", "ground_truth": "{'value': 2}", "math/score": 1.0, "format/score": 0.5}
    assert known.items() <= trajectory.info.items()
    assert question_in(trajectory.info, turn.observation) == list(MESSAGES)
    (request,) = engine.requests
    assert (request.params.temperature, request.params.max_new_tokens) == (0.7, 16)
    # The batch has the reward on the last sampled token and learns from the answer alone.
    batch = groups_to_batch([RolloutGroup(5, "sums", (trajectory,))], ["sums"])
    sampled = len(TOKENIZER.encode("two: 2")) + 1
    assert batch.rewards_T is not None
    assert batch.rewards_T.nonzero().flatten().tolist() == [batch.num_tokens - 1]
    assert batch.loss_mask_T.tolist() == [False] * len(turn.prompt_ids) + [True] * sampled


def test_where_nobody_looks_for_an_answer_there_is_no_rate_of_valid_ones():
    verdicts = (
        RewardResult(0.5, False, notes={"custom/why": "x"}, seeks_answer=False),
        RewardResult(0.0, False),
        RewardResult(0.0, False, "2"),
    )
    played = tuple(play(Engine("two"), Scorer(verdict)) for verdict in verdicts)
    assert played[0].info["custom/why"] == "x"
    metrics = [rollout_metrics([RolloutGroup(0, "sums", of)], "r") for of in (played[:1], played)]
    assert "r/valid_rate" not in metrics[0] and metrics[1]["r/valid_rate"] == 0.5


@pytest.mark.parametrize(("answer", "kept"), [("no idea", "no idea"), ("no idea at all, I say", "no idea at all, ")])
def test_the_verifier_learns_all_that_is_known(answer, kept):
    scorer = Scorer(RewardResult(0.0, False))
    trajectory = play(Engine(answer), scorer)
    (sample,) = scorer.samples
    assert sample == Sample(
        prompt="1+1=",
        response=kept,
        ground_truth={"value": 2},
        data_source="sums",
        extra_info={"level": 3},
        messages=MESSAGES,
        num_tokens=len(TOKENIZER.encode(kept)) + (kept == answer),
        truncated=kept != answer,
    )
    assert trajectory.turns[0].action is None, "no answer was found"


def test_a_prompt_is_used_as_it_was_cut_and_ends_the_episode_where_it_does_not_fit():
    engine = Engine("2")
    play(engine, Scorer(), replace(PROMPT, prompt_ids=np.array([7, 8, 9])))
    assert engine.requests[0].prompt_ids.tolist() == [7, 8, 9]
    with pytest.raises(PromptTooLongError, match="sums: the first prompt has"):
        play(Engine("2"), Scorer(), limits=LengthLimits(prompt_length=8, sequence_length=80))
    with pytest.raises(RewardError, match="cannot tell"):
        play(Engine("2"), Scorer(FAILURE))


# --- conversations with a user


def test_the_user_answers_and_the_last_answer_is_scored():
    engine, scorer, guide = Engine("7", "99", "51"), Scorer(), Guide()
    trajectory = play(engine, scorer, guide=guide)
    question = [message["content"] for message in MESSAGES]
    said = [*question, "7", "larger", "99", "smaller", "51"]
    assert guide.seen == [said[: len(question) + n] for n in (1, 3, 5)]
    assert [turn.task_reward for turn in trajectory.turns] == [0.25, 0.25, 1.25]
    assert trajectory.success and trajectory.end == "terminated" and trajectory.info["user_turns"] == 2
    (sample,) = scorer.samples
    assert [message["content"] for message in sample.messages] == said[:-1] and sample.response == "51"
    # One row: what was sampled stays as it was sampled, and what the user said follows as the template has it.
    prompt, ids = RENDERER.prompt(MESSAGES).tolist(), []
    for words, (seen, sampled) in zip(("larger", "smaller", ""), engine.log, strict=True):
        assert seen == prompt + ids
        ids += [*sampled, *RENDERER.continuation([user(words)], np.array(sampled)).tolist()]
    assert "larger" in TOKENIZER.decode(engine.log[1][0])


def test_after_its_last_turn_the_answer_is_scored_without_the_user():
    scorer, guide = Scorer(), Guide()
    trajectory = play(Engine("7", "8", "9"), scorer, guide=guide, max_turns=2)
    assert [turn.task_reward for turn in trajectory.turns] == [0.25, 0.25, 1.0] and len(guide.seen) == 2
    assert scorer.samples[0].response == "9"


async def test_an_episode_that_is_given_up_as_the_user_answers_is_over():
    """``asyncio.wait_for`` of Python 3.11 forgets a cancellation that comes together with its result."""

    class Interrupted(Guide):
        async def respond(self, messages: Sequence[Mapping[str, str]], prompt: Prompt) -> tuple[str, float, bool]:
            asyncio.get_running_loop().call_soon(episode.cancel)
            return await super().respond(messages, prompt)

    engine = Engine("7", "51")
    env = UserEnv(PromptEnv(PROMPT, Scorer().score), Interrupted(), UserConfig(path=PATH))
    manager = PromptManager(RENDERER, PARAMS, LIMITS)
    episode = asyncio.create_task(manager.run_episode(env, engine.generate, EPISODE))
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert len(engine.log) == 1


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raise", "the user raised ZeroDivisionError: by nought"),
        ("own timeout", "the user raised TimeoutError: no line"),
        ("exit", "the user raised RuntimeError: SystemExit: 3"),
        ("hang", r"the user took longer than user.timeout=0\.1s"),
        ("odd", r"the user answered \('text', nan, False\), expected \(text, finite number, true or false\)"),
    ],
)
def test_a_user_who_fails_is_a_failure_of_the_episode(fault, told):
    scorer = Scorer()
    with pytest.raises(UserError, match=told) as raised:
        play(Engine("7"), scorer, guide=Guide(fault), timeout=0.1)
    assert isinstance(raised.value, EnvError) and not scorer.samples


def test_what_is_no_user_is_told_before_the_run(tmp_path):
    (tmp_path / "mine.yaml").write_text(MINIMAL)

    def problems(*overrides: str) -> dict[str, str]:
        return words_of(load_config, RLVRConfig, "mine", tmp_path, overrides, CHECKS[RLVRConfig])

    assert "no such method" in problems(f"user={{path: {__name__}:Silent}}")["user"]
    found = problems(
        f"user={{path: {PATH}, args: {{gaol: 1}}}}", "tools={dialect: hermes, use: {c: {tool: calculator}}}"
    )
    assert "gaol" in found["user.args.gaol"] and "null with user" in found["tools"]
    beside = problems(f"user={{path: {PATH}}}", "actor_train.data_args.tag_templates={gsm8k: plain}")
    assert "conversations of several turns have one template" in beside["user"]
    file = tmp_path / "mine.py"
    file.write_text("class Me:\n    async def respond(self, messages, prompt):\n        return 'a', 0.0, True\n")
    assert asyncio.run(load_user(UserConfig(path=f"{file}:Me")).respond([], PROMPT)) == ("a", 0.0, True)


# --- groups


def spec(**changes: Any) -> PromptSpec:
    return replace(PromptSpec(5, "sums", 11, 3, prompt=PROMPT, sampling="train"), **changes)


def prompt_worker(
    tokenizer_path: str, engine: Engine, scorer: Scorer, held_out: LengthLimits = LIMITS, **more: Any
) -> PromptWorker:
    worker = PromptWorker("rollout", 0, 1, {})
    params = {"train": PARAMS, "val": replace(PARAMS, temperature=0.3)}
    limits = {"train": LIMITS, "val": held_out}
    more = {"spread": False, **more}
    worker.setup(PromptWorkerContext(tokenizer_path, "native", params, limits, {"sums": "maths"}, **more))
    worker.client = engine  # type: ignore[assignment]
    worker.rewards = {"maths": scorer.score}
    return worker


def run_group(tokenizer_path: str, engine: Engine, scorer: Scorer, group: PromptSpec, **more: Any) -> RolloutGroup:
    return asyncio.run(prompt_worker(tokenizer_path, engine, scorer, **more).run_group(group))


def test_a_group_answers_one_prompt_with_seeds_of_their_own(tokenizer_path):
    engine, val = Engine("2"), Engine("2")
    group = run_group(tokenizer_path, engine, Scorer(), spec())
    assert [trajectory.member for trajectory in group.trajectories] == [0, 1, 2]
    assert len({request.prompt_ids.tobytes() for request in engine.requests}) == 1
    assert len({request.params.seed for request in engine.requests}) == 3
    assert (group.tag, group.dropped, group.errors, group.baseline) == ("sums", 0, (), None)
    short = LengthLimits(LIMITS.prompt_length, len(engine.requests[0].prompt_ids) + 3)
    run_group(tokenizer_path, val, Scorer(), spec(sampling="val", greedy=False), held_out=short)
    assert {request.params.temperature for request in val.requests} == {0.3}
    rooms = [{request.params.max_new_tokens for request in each.requests} for each in (engine, val)]
    assert rooms == [{16}, {3}], "held-out samples have a bound of their own"


def test_an_answer_without_a_reward_is_dropped_and_told(tokenizer_path):
    group = run_group(tokenizer_path, Engine("2"), Scorer(GOOD, FAILURE, GOOD), spec())
    assert group.dropped == 1 and group.errors == ("sums group 5 member 1: rewards.maths: cannot tell",)
    assert [trajectory.score for trajectory in group.trajectories] == [1.0, 1.0], "never a silent 0"
    lost = run_group(tokenizer_path, Engine("2"), Scorer(FAILURE), spec())
    assert not lost.trajectories and lost.dropped == 3 and len(lost.errors) == 3


def test_the_baseline_is_one_more_greedy_answer_without_which_the_group_is_lost(tokenizer_path):
    engine = Engine("2")
    group = run_group(tokenizer_path, engine, Scorer(), spec(baseline=True))
    assert [trajectory.member for trajectory in group.trajectories] == [0, 1, 2]
    assert group.baseline is not None and group.baseline.score == 1.0
    assert sorted(request.params.temperature for request in engine.requests) == [0.0, 0.7, 0.7, 0.7]
    lost = run_group(tokenizer_path, Engine("2"), Scorer(FAILURE, GOOD), spec(baseline=True))  # it starts first
    assert not lost.trajectories and lost.baseline is None and lost.dropped == 3


def test_conversations_are_played_in_groups_too_and_failures_of_users_counted(tokenizer_path):
    def group(fault: str) -> RolloutGroup:
        config = UserConfig(path=PATH, args={"fault": fault}, retries=2)
        return run_group(tokenizer_path, Engine("51"), Scorer(), spec(group_size=1), spread=True, user=config)

    good, bad = group(""), group("raise")
    assert [len(each.turns) for each in good.trajectories] == [1] and good.trajectories[0].score == 1.25
    assert bad.dropped == 1 and len(bad.errors) == 3 and "ZeroDivisionError" in bad.errors[0]


@pytest.fixture
def pictures(tmp_path) -> Pictures:
    return Pictures(make_processor(tmp_path / "model"))


PIXELS = np.random.default_rng(0).integers(0, 256, (56, 84, 3), np.uint8)


def plan_with_a_picture(file: Path) -> PromptPlan:
    """Groups of three answers to a prompt with one picture."""
    Image.fromarray(PIXELS).save(file)
    content = [{"type": "image", "image": Source(file, "images[0]")}, {"type": "text", "text": "?"}]
    prompt = replace(PROMPT, messages=(user(content),))
    return PromptPlan(PromptSampler([prompt], seed=3), group_size=3, num_slots=8, seed=3, sampling="train")


async def test_a_worker_decodes_the_pictures_of_few_prompts_at_a_time(tmp_path, monkeypatch, pictures):
    worker = prompt_worker(str(tmp_path / "model"), Engine("2"), Scorer(), pictures=pictures)
    plan, now, seen = plan_with_a_picture(tmp_path / "a.png"), [], []

    def slow(messages: Any, pictures: Pictures) -> Any:
        now.append(messages)
        seen.append(len(now))
        time.sleep(0.02)
        now.pop()
        return with_items(messages, pictures)

    monkeypatch.setattr("roll.rollout.prompt_worker.with_items", slow)
    await asyncio.gather(*(worker.run_group(plan.spec(number)) for number in range(12)))
    assert len(seen) == 12 and max(seen) <= 4


def test_pictures_are_decoded_once_for_a_group_and_travel_once(tmp_path, pictures):
    file = tmp_path / "a.png"
    group = plan_with_a_picture(file).spec(0)
    file.unlink()  # a worker on another machine does not have it
    engine, scorer = Engine("2"), Scorer()
    played = run_group(str(tmp_path / "model"), engine, scorer, group, pictures=pictures)
    items = [item for request in engine.requests for item in request.items]
    assert len(items) == 3 and len({*map(id, items)}) == 1 and (items[0].data == PIXELS).all()
    assert all((request.prompt_ids < 0).sum() == 6 for request in engine.requests)
    assert [sample.messages[0]["content"] for sample in scorer.samples] == ["<image>?"] * 3
    assert len(pickle.dumps(FlatGroups.of([played]))) < 1.5 * PIXELS.nbytes
    batch = groups_to_batch([played], ["sums"])
    assert batch.items_I is not None and [*map(len, batch.items_I)] == [1, 1, 1]
    broken = replace(PROMPT, messages=(user([{"type": "image", "image": Source(b"x", "a")}]),))
    with pytest.raises(PictureError, match="prompt p1: a: no picture"):
        run_group(str(tmp_path / "model"), Engine("2"), Scorer(), replace(group, prompt=broken), pictures=pictures)


def test_a_draw_decides_prompt_and_seed_and_later_epochs_have_other_seeds():
    prompts = [replace(PROMPT, id=f"p{n}") for n in range(5)]
    plan = PromptPlan(PromptSampler(prompts, seed=3), group_size=4, num_slots=8, seed=3, sampling="train")
    specs, again = ([plan.spec(n) for n in range(10)] for _ in range(2))
    assert specs == again
    assert sorted(spec.prompt.id for spec in specs[:5]) == sorted(spec.prompt.id for spec in specs[5:])
    assert len({spec.env_seed for spec in specs}) == 10
    held_out = replace(plan, sampling="val").spec(0)
    assert held_out.env_seed != specs[0].env_seed and held_out.sampling == "val"
