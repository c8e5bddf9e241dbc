"""Observations with pictures: what an environment may return, what becomes of it, and worlds that draw themselves."""

import asyncio
import base64
import io
from collections import defaultdict

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from PIL import Image

from roll.agentic.env import check_env_config, frozen_lake, make, sokoban
from roll.agentic.env.base import StepResult, TextEnv, picture
from roll.agentic.env.grid import draw_grid
from roll.configs.env import CustomEnvConfig
from roll.data.columns import Item
from roll.data.identity import items_along, vocabulary_ids
from roll.data.pictures import Pictures
from roll.data.requests import SamplingParams
from roll.extras.env_check.probes import draws
from roll.extras.env_check.trial import Subject, Trial, can_be_made, plays
from roll.report.render import render_episode_html
from roll.rollout.call_threads import CallThreads
from roll.rollout.env_manager import EpisodeSpec, LengthLimits
from roll.rollout.env_runner import EnvRunner, checked_reset
from roll.rollout.env_worker import EnvironmentWorker, EnvWorkerContext
from roll.rollout.errors import EnvProtocolError
from roll.rollout.observations import filled, in_words, items_in, shown, state_of
from roll.rollout.plans import GroupSpec
from roll.rollout.rows import groups_to_batch
from roll.rollout.types import RolloutGroup
from tests.support.picture_models import make_processor
from tests.support.rollouts import Engine
from tests.support.steps import usual_step

RED = np.full((2, 3, 3), (200, 0, 0), np.uint8)


class Screen(TextEnv):
    """Shows what it is made with."""

    def __init__(self, observation=None):
        self.observation = observation

    def reset(self, *, seed=None, options=None):
        return self.observation, {}


class AsTheyAre:
    """A processor that resizes nothing."""

    def item(self, source, place=""):
        return Item(source)


def words(text):
    return {"type": "text", "text": text}


def test_pictures_become_arrays_of_their_own():
    frame = RED.copy()
    (first, text, second), _ = checked_reset(Screen([picture(frame), words("a"), picture(Image.fromarray(RED))]), 0)
    frame[:] = 0
    assert text == words("a")
    assert (first["image"] == RED).all() and (second["image"] == RED).all()
    assert checked_reset(Screen([words("a"), words("b")]), 0)[0] == "ab"


@pytest.mark.parametrize(
    ("observation", "expected"),
    [
        ([], "expected text, or a list of parts"),
        ([RED], "observation[0] .* expected a part"),
        ([words(5)], r"observation[0]['text'] 5 \(int\), expected text"),
        ([words("a"), picture(RED.astype(np.float32))], r"observation[1]['image'] of shape 2×3×3, float32"),
        ([picture(RED[..., :2])], "shape 2×3×2, uint8, expected a Pillow image or an array"),
        ([picture(RED[:0])], "shape 0×3×3"),
        ([picture("board.png")], "observation[0]['image'] 'board.png'"),
        ([picture(np.zeros((4097, 4096, 3), np.uint8))], "at most 16,777,216 pixels"),
    ],
)
def test_what_is_no_observation_is_named(observation, expected):
    with pytest.raises(EnvProtocolError, match="Screen.reset returned .*" + expected.replace("[", r"\[", 2)):
        checked_reset(Screen(observation), 0)


async def test_the_runner_makes_items_where_the_model_takes_pictures():
    seeing, blind = (
        EnvRunner(lambda: Screen([picture(RED)]), 5, instant=True, pictures=pictures)
        for pictures in (AsTheyAre(), None)
    )
    observation, _ = await seeing.reset(0)
    assert items_in(observation) == [Item(RED)]
    with pytest.raises(EnvProtocolError, match=r"Screen\.reset returned a picture, expected text: .* no processor"):
        await blind.reset(0)


def test_words_state_and_frame_of_an_observation():
    parts = [words("Look: "), picture(Item(RED)), picture(Item(RED + 1)), words("!")]
    assert in_words(parts) == "Look: [picture 3x2][picture 3x2]!"
    assert state_of("a") == "a" and state_of(parts) == state_of(list(parts))
    assert state_of(parts) != state_of([parts[0], parts[2], parts[1], parts[3]])
    pixels = np.asarray(Image.open(io.BytesIO(shown(parts))))
    assert (pixels[:, :3] == RED).all() and (pixels[:, -3:] == RED + 1).all()
    assert shown("a") is None


def test_templates_take_the_parts_in_their_place():
    seen = picture(Item(RED))
    fill = lambda text: text.replace("{turn}", "2")  # noqa: E731
    assert filled("{turn}: {observation} go", [words("x"), seen], fill) == [words("2: x"), seen, words(" go")]
    assert filled("{current_observation}", [seen], fill) == [seen]
    assert filled("turn {turn}", [seen], fill) == "turn 2"
    assert filled("{observation}", "text", fill) == "{observation}"  # which fill replaces


# --- worlds that draw themselves


@pytest.mark.parametrize("side", [8, 32])
@pytest.mark.parametrize("world", ["sokoban", "frozen_lake"])
def test_pictures_follow_the_text(world, side):
    """The same moves in both forms: pictures differ exactly where texts do, whatever the size of a tile."""
    texts, pictures = [], []
    told, drawn = make(world), make(world, render_mode="rgb_array", tile_size=side)
    for seed in range(12):
        told.reset(seed=seed), drawn.reset(seed=seed)
        for name in told.action_names * 2:
            result = told.step(f"<answer>{name}</answer>")
            (part,), *same = drawn.step(f"<answer>{name}</answer>")
            assert result[1:] == tuple(same)
            assert drawn.observation_space.contains(part["image"])
            texts.append(result[0]), pictures.append(part["image"].tobytes())
            if result[2] or result[3]:
                break
    assert len(set(texts)) == len(set(pictures)) == len(set(zip(texts, pictures, strict=True))) > 40


def test_every_tile_differs_clearly_at_the_smallest_size():
    for tiles in (sokoban.TILES, frozen_lake.TILES):
        drawn = [draw_grid([[kind]], tiles, 8).astype(int) for kind in tiles]
        distances = [abs(one - other).max() for n, one in enumerate(drawn) for other in drawn[:n]]
        assert min(distances) > 24, "of 255"


def test_instructions_speak_of_the_picture():
    for world in ("sokoban", "frozen_lake"):
        assert "symbols" not in make(world, render_mode="rgb_array").env_instruction
    (problem,) = check_env_config("sokoban", {"render_mode": "rgb_array", "show_coordinates": True})
    assert problem.path == "env_config.show_coordinates"


class Dot(gymnasium.Env):
    """A bright pixel that moves; its observation and its picture are the same."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 1}  # noqa: RUF012
    observation_space = Box(0, 255, (4, 4, 3), np.uint8)
    action_space = Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = int(self.np_random.integers(4))
        return self.render(), {}

    def step(self, action):
        self.at = (self.at + action) % 4
        return self.render(), float(self.at == 3), self.at == 3, False, {}

    def render(self):
        pixels = np.zeros((4, 4, 3), np.uint8)
        pixels[self.at] = 255
        return pixels


gymnasium.register("Dot-v0", f"{__name__}:Dot")


@pytest.mark.parametrize("renderer", [None, "rgb_array"])
def test_gymnasium_pictures_are_observations(renderer):
    env = make("gymnasium", env_id=f"{__name__}:Dot-v0", success_return=1, renderer=renderer)
    (first,), info = env.reset(seed=1)
    before = first["image"].copy()
    (second,), *_, after = env.step("<answer>1</answer>")
    assert (before != second["image"]).any() and info["state_key"] != after["state_key"]


class Careless(TextEnv):
    """Draws another size each time, or the time, or hides what it names."""

    action_names = ("Go",)

    def __init__(self, fault=""):
        self.fault = fault
        self.steps = 0

    def _seen(self):
        side = 4 + self.steps % 2 * (self.fault == "size")
        light = {"hides": 0, "": self.at * 20, "size": self.at * 20, "clock": self.steps}[self.fault]
        return [picture(np.full((side, side, 3), light, np.uint8))]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.steps = int(self.np_random.integers(2)), 0
        return self._seen(), {"state_key": str(self.at)}

    def step(self, action: str) -> StepResult:
        found = "Go" if "Go" in action else None
        self.at, self.steps = self.at ^ (found is not None), self.steps + 1
        ends = {"truncated": self.steps >= 4, "success": False, "action_is_effective": found is not None}
        return usual_step(self._seen(), found, self.at, task_reward=float(self.at), **ends)


@pytest.mark.parametrize(
    ("fault", "findings"), [("", ""), ("size", "size state"), ("hides", "state"), ("clock", "state")]
)
async def test_the_check_compares_pictures_with_states(fault, findings):
    trial = Trial(Subject(f"{__name__}:Careless", {"fault": fault}, episodes=2))
    found = [each.name for probe in (can_be_made, plays, draws) async for each in probe(trial)]
    assert found == [f"picture-{name}" for name in findings.split()]


# --- episodes


@pytest.mark.parametrize("mode", ["step", "traj"])
def test_a_policy_gets_the_pictures_of_its_turns(mode, picture_folder):
    """Each once, where the template has the observation; a turn without an effect shows the same picture again."""
    said = ["<answer>Up</answer>", "nothing", "<answer>Left</answer>", "<answer>Down</answer>"]
    board = {"render_mode": "rgb_array", "tile_size": 14, "max_steps": 4}
    keys = {"env_manager_cls": mode, "env_config": board, "agent_template": "{observation}{turn}"}
    config = CustomEnvConfig(env_type="sokoban", max_steps=4, **keys)
    worker = EnvironmentWorker("envs", 0, 1, {})
    limits, pictures = LengthLimits(4000, 8000), Pictures(picture_folder)
    context = {"Board": config}, str(picture_folder), "native", SamplingParams(), limits, 0
    worker.setup(EnvWorkerContext(*context, pictures=pictures))
    engine = Engine(*said, renderer=worker.managers["Board"].renderer)
    episode = EpisodeSpec("Board", 0, 0, env_seed=5, sampling_seed=1, record=True)
    trajectory = asyncio.run(worker.play(GroupSpec(0, "Board", 5, 1), episode, engine.generate))

    env = make("sokoban", **board)
    boards = [env.reset(seed=5)[0], *(env.step(text)[0] for text in said)]
    pixels = [Item(part["image"]) for (part,) in boards]
    assert pixels[1] == pixels[2] and len(set(pixels)) == 4
    for number, (turn, request) in enumerate(zip(trajectory.turns, engine.requests, strict=True)):
        told = pixels[number : number + 1] if mode == "step" else list(dict.fromkeys(pixels[: number + 1]))
        assert turn.items == request.items == tuple(told)
        placed = [item for _, item in items_along(turn.prompt_ids, turn.items)]
        assert placed == (told if mode == "step" else pixels[: number + 1])
        assert (turn.prompt_ids < 0).sum() == 9 * len(placed), "a token for two by two cells"
        words = engine.renderer.tokenizer.decode(vocabulary_ids(turn.prompt_ids))
        assert words.endswith(f"<|vision_end|>{number + 1}<|im_end|>\n<|im_start|>assistant\n")
        assert turn.observation == "[picture 84x84]"
    frames = [np.asarray(Image.open(io.BytesIO(frame))) for frame in trajectory.frames]
    assert [Item(frame) for frame in frames] == pixels, "people see what the policy got"
    page = render_episode_html(trajectory)
    assert base64.b64encode(trajectory.frames[0]).decode() in page and 'class="picture small"' in page
    rows = groups_to_batch([RolloutGroup(0, "Board", (trajectory,))], ["Board"]).items_I
    assert rows == ((tuple(dict.fromkeys(pixels[:4])),) if mode == "traj" else tuple((each,) for each in pixels[:4]))


async def test_a_program_that_acts_gets_no_pictures():
    agent = {"type": "python", "path": "tests.support.agents:nothing"}
    config = CustomEnvConfig(env_type="sokoban", env_config={"render_mode": "rgb_array"}, agent=agent)
    worker = EnvironmentWorker("envs", 0, 1, {})
    worker.context = EnvWorkerContext({"Board": config}, "", "native", SamplingParams(), LengthLimits(9, 9), 0)
    worker._idle, worker._threads, worker._locks, worker._pictures = defaultdict(list), CallThreads(), {}, AsTheyAre()
    with pytest.raises(EnvProtocolError, match="an agent program without"):
        await worker._take_runner("Board").reset(1)


@pytest.fixture(scope="module")
def picture_folder(tmp_path_factory):
    return make_processor(tmp_path_factory.mktemp("model") / "seeing", "qwen2_5_vl")
