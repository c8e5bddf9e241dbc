"""Episodes with a scripted policy: what it is shown, what it is asked for, what is kept."""

import asyncio
import io
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from roll.agentic.env import make
from roll.agentic.env.base import StepResult, TextEnv
from roll.configs.env import CustomEnvConfig
from roll.data.renderer import ChatRenderer
from roll.data.requests import Completion, FinishReason, GenerateRequest, SamplingParams
from roll.demo.scripted_play import ScriptedPlay
from roll.rollout.env_manager import ENV_MANAGERS, EnvManager, EpisodeAbortedError, EpisodeSpec, LengthLimits
from roll.rollout.env_runner import EnvRunner, checked_frame
from roll.rollout.errors import EnvCrashError, EnvError, PromptTooLongError
from roll.rollout.plans import GroupPlan
from roll.rollout.types import EpisodeEnd, Trajectory, Turn
from tests.support.rollouts import RENDERER, TOKENIZER, Engine
from tests.support.steps import usual_step

SPEC = EpisodeSpec("Echo", group_id=4, member=1, env_seed=9, sampling_seed=77)
ROOMY = LengthLimits(prompt_length=4000, sequence_length=8000)
PLAIN = SamplingParams()
MODES = pytest.mark.parametrize("mode", ["step", "traj"])


class EchoEnv(TextEnv):
    """Repeats the words; ``bad`` is no action, ``win`` ends with success, ``late`` truncates, ``crash`` raises.

    Args:
        info: what it tells beside the usual at each step.
    """

    env_instruction = "Repeat after me."

    def __init__(self, **info: Any) -> None:
        self.info = info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.num_steps = 0
        return f"seed {seed}", {"state_key": f"start {seed}"} | self.info

    def step(self, action: str) -> StepResult:
        self.num_steps += 1
        if action == "crash":
            raise ZeroDivisionError
        valid = action != "bad"
        pays = {"task_reward": float(self.num_steps), "penalty": 0.0 if valid else -0.5, "action_is_effective": valid}
        ends = {"terminated": action == "win", "success": action == "win", "truncated": action == "late"}
        said, key = f"{action} {self.num_steps}", f"after {self.num_steps}"
        *others, info = usual_step(said, action if valid else None, key, **pays, **ends)
        return *others, info | self.info  # type: ignore[return-value]


class BareEnv(TextEnv):
    """A user's environment that gives no info at all."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return "start", {}

    def step(self, action: str) -> StepResult:
        return "next", 0.5, False, False, {"board": np.zeros(3), "depth": 2, "level": "cave"}


def manager(mode: str, limits: LengthLimits = ROOMY, params: SamplingParams = PLAIN, **keys: Any) -> EnvManager:
    renderer = keys.pop("renderer", RENDERER)
    tag = CustomEnvConfig(env_type="echo", env_manager_cls=mode, **keys)
    return ENV_MANAGERS.get(mode)(tag, renderer, params, limits)


def play(
    manager: EnvManager, engine: Engine, spec: EpisodeSpec = SPEC, make_env: Callable[[], TextEnv] = EchoEnv
) -> Trajectory:
    async def episode() -> Trajectory:
        with closing(EnvRunner(make_env, timeout=5)) as runner:
            return await manager.run_episode(runner, engine.generate, spec)

    return asyncio.run(episode())


def shown(turn: Turn) -> str:
    return str(TOKENIZER.decode(turn.prompt_ids))


def test_step_mode_shows_each_turn_afresh():
    trajectory = play(manager("step", max_steps=3), Engine("a", "b", "c"))
    head = "<|im_start|>system\nRepeat after me.<|im_end|>\n<|im_start|>user\n"
    tail = "<|im_end|>\n<|im_start|>assistant\n"
    observations = ["seed 9", "a 1", "b 2"]
    assert [shown(turn) for turn in trajectory.turns] == [f"{head}{each}{tail}" for each in observations]
    assert [turn.observation for turn in trajectory.turns] == observations and not trajectory.history
    assert trajectory.final_observation == "c 3"


@pytest.mark.parametrize("ends", [True, False])
def test_traj_mode_is_one_growing_conversation(ends):
    trajectory = play(manager("traj", max_steps=3), Engine("a", "b", "c", ends=ends))
    assert trajectory.history
    for earlier, later in zip(trajectory.turns, trajectory.turns[1:], strict=False):
        prefix = np.concatenate([earlier.prompt_ids, earlier.completion.token_ids])
        assert (later.prompt_ids[: len(prefix)] == prefix).all()
        assert len(later.prompt_ids) > len(prefix)
    assert shown(trajectory.turns[2]) == (
        "<|im_start|>system\nRepeat after me.<|im_end|>\n<|im_start|>user\nseed 9<|im_end|>\n"
        "<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\na 1<|im_end|>\n"
        "<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nb 2<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_turn_keeps_what_happened_in_it():
    trajectory = play(manager("step", max_steps=4), Engine("a", "bad", "win"))
    assert (trajectory.tag, trajectory.group_id, trajectory.member, trajectory.seed) == ("Echo", 4, 1, 9)
    kept = [(turn.text, turn.action, turn.task_reward, turn.penalty, turn.state_key) for turn in trajectory.turns]
    assert kept == [
        ("a", "a", 1.0, 0.0, "start 9"),
        ("bad", None, 2.0, -0.5, "after 1"),
        ("win", "win", 3.0, 0.0, "after 2"),
    ]
    assert [turn.reward for turn in trajectory.turns] == [1.0, 1.5, 3.0] and trajectory.score == 5.5
    assert trajectory.turns[0].completion.weight_version == 3


@pytest.mark.parametrize(
    ("last", "end", "success"),
    [
        ("win", EpisodeEnd.TERMINATED, True),
        ("late", EpisodeEnd.TRUNCATED, False),
        ("more", EpisodeEnd.TRUNCATED, False),  # the manager's own limit
    ],
)
def test_how_an_episode_ends(last, end, success):
    trajectory = play(manager("step", max_steps=2), Engine("a", last))
    assert (len(trajectory.turns), trajectory.end, trajectory.success) == (2, end, success)
    assert trajectory.info["state_key"] == "after 2" and "env_instruction" not in trajectory.info


def test_an_episode_stops_when_the_next_prompt_leaves_no_room():
    prompts = [len(turn.prompt_ids) for turn in play(manager("traj", max_steps=6), Engine("a")).turns]
    full = play(manager("traj", LengthLimits(4000, prompts[3]), max_steps=6), Engine("a"))
    assert (len(full.turns), full.end, full.success) == (3, EpisodeEnd.CONTEXT_FULL, False)
    assert full.final_observation == "a 3"
    one_more = play(manager("traj", LengthLimits(4000, prompts[3] + 1), max_steps=6), Engine("a"))
    assert (len(one_more.turns), one_more.end) == (4, EpisodeEnd.CONTEXT_FULL)
    assert len(one_more.turns[-1].completion.token_ids) == 1  # cut to the room that was left
    config: dict[str, Any] = {"max_steps": 6, "agent_template": "{observation}{observation}"}
    first = len(play(manager("step", **config), Engine("a")).turns[0].prompt_ids)
    trajectory = play(manager("step", LengthLimits(4000, first + 10), **config), Engine("x" * 20))
    assert [turn.text for turn in trajectory.turns] == ["x" * 10] and trajectory.end is EpisodeEnd.CONTEXT_FULL


@MODES
def test_a_first_prompt_that_cannot_fit_is_an_error(mode):
    length = len(play(manager(mode, max_steps=1), Engine("a")).turns[0].prompt_ids)
    expected = rf"Echo: the first prompt has {length} tokens, but prompt_length is "
    with pytest.raises(PromptTooLongError, match=rf"{expected}{length - 1} and sequence_length 8000"):
        play(manager(mode, LengthLimits(length - 1, 8000)), Engine("a"))
    with pytest.raises(PromptTooLongError, match=rf"{expected}4000 and sequence_length {length}"):
        play(manager(mode, LengthLimits(4000, length)), Engine("a"))
    assert len(play(manager(mode, LengthLimits(length, length + 1), max_steps=1), Engine("a")).turns) == 1


@pytest.mark.parametrize(
    ("history_length", "expected"),
    [
        (0, ["", "", "", ""]),
        (1, ["", "seed 9\na", "a 1\nb", "b 2\nc"]),
        (3, ["", "seed 9\na", "seed 9\na\na 1\nb", "seed 9\na\na 1\nb\nb 2\nc"]),
        (10, ["", "seed 9\na", "seed 9\na\na 1\nb", "seed 9\na\na 1\nb\nb 2\nc"]),
    ],
)
def test_step_mode_repeats_the_last_turns_in_words(history_length, expected):
    templates = {"agent_system_template": "", "agent_template": "{history}"}
    shows = manager("step", max_steps=4, history_length=history_length, **templates)
    trajectory = play(shows, Engine("a", "b", "c", "d"))
    opened = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert [shown(turn) for turn in trajectory.turns] == [opened.format(text) for text in expected]


@MODES
def test_placeholders_are_filled_at_every_turn(mode):
    shown_each_turn = "{turn}/{max_turns}, {turns_left} left: {observation} {unknown} {} {env_instruction}"
    second_names = "{turn_idx} of {actions_left}, {max_response_length} tokens"
    system, template = "{env_instruction} Turns: {max_turns}.", f"{shown_each_turn} {second_names}"
    config = {"max_steps": 3, "max_tokens_per_step": 3, "agent_system_template": system, "agent_template": template}
    trajectory = play(manager(mode, **config), Engine("a", "b", "c"))
    for number, (turn, observation) in enumerate(zip(trajectory.turns, ["seed 9", "a 1", "b 2"], strict=True), 1):
        text = shown(turn)
        filled = f"{number}/3, {4 - number} left: {observation} {{unknown}} {{}} Repeat after me."
        assert text.count("<|im_start|>system\nRepeat after me. Turns: 3.<|im_end|>") == 1
        assert text.endswith(f"user\n{filled} {number} of {4 - number}, 3 tokens<|im_end|>\n<|im_start|>assistant\n")


def test_placeholders_of_history():
    template = "{step_count} before {current_step}: {current_observation} ({history_length} shown)"
    played = play(manager("step", max_steps=3, agent_template=template, history_length=1), Engine("a", "b", "c"))
    expected = ["0 before 1: seed 9 (0 shown)", "1 before 2: a 1 (1 shown)", "2 before 3: b 2 (1 shown)"]
    assert all(text in shown(turn) for text, turn in zip(expected, played.turns, strict=True))


@MODES
def test_braces_in_what_the_environment_or_the_policy_says_are_left_alone(mode):
    words = '{"move": {"turn": 1}} {turn} {observation}'
    trajectory = play(manager(mode, max_steps=2, agent_template="{turn}. {observation}"), Engine(words))
    assert f"user\n2. {words} 1<|im_end|>" in shown(trajectory.turns[1])


def test_an_empty_system_text_makes_no_message_and_an_environment_without_info_will_do():
    trajectory = play(manager("traj", max_steps=1, agent_system_template=""), Engine("a"))
    assert shown(trajectory.turns[0]) == "<|im_start|>user\nseed 9<|im_end|>\n<|im_start|>assistant\n"
    trajectory = play(manager("step", max_steps=2), Engine("a"), make_env=BareEnv)
    turn = trajectory.turns[0]
    assert (turn.task_reward, turn.penalty, turn.action, turn.state_key) == (0.5, 0.0, None, "start")
    assert (trajectory.score, trajectory.success) == (1.0, False)
    assert trajectory.info == {"depth": 2, "level": "cave"}  # arrays stay behind
    assert not shown(turn).startswith("<|im_start|>system")


class PictureEnv(EchoEnv):
    """Has a picture of every state, but of ``dark`` ones."""

    dark = False

    def step(self, action: str) -> StepResult:
        self.dark = action == "dark"
        return super().step(action)

    def render(self) -> Any:
        if self.dark:
            raise OSError("no light")
        return np.full((30, 50, 3), 20 * self.num_steps, dtype=np.uint8)


def test_only_a_recorded_episode_has_pictures_if_there_are_any_and_is_the_same_else(caplog):
    plain = play(manager("step", max_steps=3), Engine("a", "b"), make_env=PictureEnv)
    recorded = play(manager("step", max_steps=3), Engine("a", "b"), replace(SPEC, record=True), PictureEnv)
    assert plain.frames == () and len(recorded.frames) == 4
    shades = [Image.open(io.BytesIO(frame)).convert("RGB").getpixel((1, 1)) for frame in recorded.frames]
    assert shades == [(shade, shade, shade) for shade in (0, 20, 40, 60)]
    assert [turn.prompt_ids.tolist() for turn in plain.turns] == [turn.prompt_ids.tolist() for turn in recorded.turns]
    assert replace(recorded, frames=(), turns=()) == replace(plain, turns=())
    spec = replace(SPEC, record=True)
    assert play(manager("step", max_steps=2), Engine("a"), spec).frames == ()
    dark = play(manager("step", max_steps=3), Engine("a", "dark", "b"), spec, PictureEnv)
    assert (len(dark.turns), dark.frames) == (3, ())
    assert "PictureEnv.render: no picture: OSError: no light" in caplog.text


@pytest.mark.parametrize(
    ("view", "shown"),
    [
        ("a cave", "a cave"),
        (Image.new("L", (960, 480), 77), (480, 240)),
        (np.zeros((4, 6, 4), dtype=np.uint8), (6, 4)),
        (np.zeros((4, 6)), None),
        (7, None),
        (None, None),
    ],
)
def test_pictures_come_as_arrays_images_or_text(view, shown):
    env = EchoEnv()
    env.render = lambda: view  # type: ignore[method-assign]
    frame = checked_frame(env)
    assert (Image.open(io.BytesIO(frame)).size if isinstance(frame, bytes) else frame) == shown


def asked(mode: str = "step", sampling_seed: int = 77, **keys: Any) -> list[SamplingParams]:
    """What the requests of an episode ask for; ``keys``: of the manager."""
    engine = Engine("a", "b", "c")
    play(manager(mode, **keys), engine, replace(SPEC, sampling_seed=sampling_seed))
    return [request.params for request in engine.requests]


def test_a_plan_records_the_first_groups_alone():
    plan = GroupPlan(("Echo",), (2,), group_size=3, redundancy=0, seed=0, name="val", num_recorded=2)
    assert [plan.spec(n).record for n in range(4)] == [True, True, False, False]
    assert not GroupPlan(("Echo",), (2,), 3, 0, 0, "train").spec(0).record


def test_requests_carry_the_sampling_of_the_tag_and_ids_of_their_own():
    params = SamplingParams(max_new_tokens=50, temperature=0.7, top_p=0.9, top_k=5, stop=("!",))
    assert [replace(each, seed=None) for each in asked(params=params, max_steps=2)] == [params] * 2
    for tokens, expected in ((8, 8), (80, 50)):
        (only,) = asked(params=params, max_tokens_per_step=tokens, max_steps=1)
        assert only.max_new_tokens == expected
    engine = Engine("a")
    play(manager("step", params=params, max_steps=1), engine, replace(SPEC, greedy=True))
    assert engine.requests[0].params.temperature == 0.0
    engine = Engine("a")
    for member in range(2):
        play(manager("step", max_steps=2), engine, replace(SPEC, member=member))
    assert len({request.request_id for request in engine.requests}) == 4


def test_seeds_differ_between_turns_and_members_and_repeat_themselves():
    one, two, again = ([params.seed for params in asked("traj", seed, max_steps=3)] for seed in (1, 2, 1))
    assert len({*one, *two}) == 6 and one == again


class Aborting(Engine):
    """Is stopped at its second answer."""

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await super().generate(request)
        return replace(completion, finish_reason=FinishReason.ABORT) if len(self.requests) == 2 else completion


def test_an_aborted_request_a_crash_a_refusing_template_and_tools_that_are_none_end_the_episode():
    with pytest.raises(EpisodeAbortedError, match="request Echo-4-1-1 was aborted"):
        play(manager("step"), Aborting("a"))
    with pytest.raises(EnvCrashError, match="environment step raised ZeroDivisionError"):
        play(manager("step"), Engine("a", "crash"))
    with pytest.raises(EnvError, match="the chat template cannot render the conversation"):
        play(manager("traj"), Engine("a"), make_env=lambda: EchoEnv(tools=3))
    fussy = "{% if messages[-1].content == 'b 1' %}{{ raise_exception('no b') }}{% endif %}"
    each = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    renderer = ChatRenderer(TOKENIZER, f"{fussy}{each}<|im_start|>assistant\n")
    with pytest.raises(EnvError, match="the chat template cannot render the conversation: TemplateError: no b"):
        play(manager("traj", renderer=renderer), Engine("b"))


@MODES
def test_an_environment_that_counts_turns_with_tools_has_no_more_of_them(mode):
    episode = play(manager(mode, max_steps=2), Engine("a"), make_env=lambda: EchoEnv(tool_turns=1))
    assert len(episode.turns) == 2 and "tool_turns" not in episode.info
    assert len(play(manager(mode, max_steps=2), Engine("a"), make_env=lambda: EchoEnv(tool_turns="-")).turns) == 2


@MODES
async def test_equal_specs_give_equal_episodes_in_a_real_environment(mode):
    """Sokoban, played by the script that makes the demonstrations."""
    environment = {"min_solution": 3, "max_solution": 8, "max_steps": 8}

    async def episode(expert_share: float) -> Trajectory:
        with closing(EnvRunner(lambda: make("sokoban", **environment), timeout=5)) as runner:
            policy = ScriptedPlay(expert_share)(runner, RENDERER)
            return await manager(mode, max_steps=8).run_episode(runner, policy, SPEC)

    first, second, expert = await episode(0.5), await episode(0.5), await episode(1.0)
    assert [turn.text for turn in first.turns] == [turn.text for turn in second.turns]
    assert [turn.prompt_ids.tolist() for turn in first.turns] == [turn.prompt_ids.tolist() for turn in second.turns]
    assert all(turn.action is not None for turn in first.turns)
    assert expert.success and expert.end is EpisodeEnd.TERMINATED
    assert all(len(turn.completion.token_ids) == 4 for turn in expert.turns)
