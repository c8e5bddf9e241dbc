"""The text environment: a ``gymnasium.Env`` whose actions are texts, and its observations too, or pictures."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import gymnasium
from gymnasium.spaces import Text

from roll.data.requests import JudgeQuestion
from roll.data.tool_messages import Content

Part: TypeAlias = Mapping[str, Any]
"""A part of a message (``roll.data.tool_messages.Message``)."""
Observation: TypeAlias = Content
"""A text, or texts and pictures in the order in which the policy reads them."""
StepResult = tuple[Observation, float, bool, bool, dict[str, Any]]

_MAX_TEXT = 4096

PICTURES: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 1}
"""``metadata`` of an environment whose ``render`` returns a picture."""


class TextEnv(gymnasium.Env[Observation, str]):
    """An environment of text: its manager passes it the response and shows the policy the observation.

    An observation is a text, or a list of parts, ``{"type": "text", "text": …}`` and ``{"type": "image", "image": …}``;
    an image is an array of red, green and blue, uint8, shape [height, width, 3], or a Pillow image.

    A subclass implements two methods of ``gymnasium.Env`` and ends ``step`` with ``step_result``:

    * ``reset(*, seed, options) -> (observation, info)``; ``info["state_key"]`` names the first state. The same seed
      gives the same episode in every process.
    * ``step(text) -> (observation, reward, terminated, truncated, info)``, with the info of ``step_result``.

    ``render() -> picture`` is for people: an array of red, green and blue, shape [height, width, 3], a Pillow image, or
    text. Without it the observation's text is shown. Only some episodes of an evaluation are rendered.

    ``step`` takes any string, whatever ``action_space`` says: a language model's words fit no character set.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (gymnasium's own declaration)
    observation_space: gymnasium.Space[Any] = Text(min_length=0, max_length=_MAX_TEXT, charset=string.printable)
    action_space: gymnasium.Space[str] = Text(min_length=0, max_length=_MAX_TEXT, charset=string.printable)

    env_instruction: str = ""
    """The rules and the answer format in the environment's own words; a manager may put it into the system message."""

    action_names: Sequence[str] = ()
    """The actions that a text may name, for scripted play; empty when any text is an answer."""

    instant: ClassVar[bool | staticmethod[[Mapping[str, Any]], bool]] = False
    """True: every call takes less than a millisecond or so and waits for nothing. It then runs in the event loop that
    plays all episodes, which costs half as much as a thread, and ``step_timeout`` does not watch it. A static
    method tells it from ``env_config``. A subclass does not inherit it: its own code may be slower."""

    own_thread: ClassVar[bool] = False
    """True: all calls of an environment run in the same thread, and those of no other environment there. It is for code
    that is bound to the thread that it was made in, such as database connections, OpenGL and browsers. Otherwise calls
    follow one another in threads that many environments share."""

    asks: ClassVar[bool] = False
    """True: it asks the model of the configuration's section ``judge``, by ``self.ask``. Subclasses inherit it; its
    calls are never ``instant``."""

    ask: Callable[[JudgeQuestion], str]
    """Has the judge answer a user's message, or a conversation, and waits for its words. Of an environment that
    ``asks``, in a run; a test gives one of its own. What it raises ends the episode as a failure, caught or not."""

    def render(self) -> Any:
        """No picture: the observation is all there is to see."""
        return None


def picture(image: Any) -> Part:
    """The part of an observation that shows a picture."""
    return {"type": "image", "image": image}


def step_result(
    observation: Observation,
    *,
    task_reward: float,
    penalty: float,
    terminated: bool,
    truncated: bool,
    action: str | None,
    action_is_effective: bool,
    success: bool,
    state_key: str,
) -> StepResult:
    """The five-tuple of ``TextEnv.step``.

    Args:
        observation: the state after the step.
        task_reward: what the task pays, penalties not included.
        penalty: zero or negative; the returned reward is ``task_reward + penalty``.
        terminated: the task reached a final state.
        truncated: the step limit ended the episode.
        action: the parsed action's name, ``None`` if the text holds none.
        action_is_effective: the action changed the state.
        success: the task is solved.
        state_key: hash of the state after the step; equal keys mean equal states.
    """
    info = {
        "action": action,
        "action_is_valid": action is not None,
        "action_is_effective": action_is_effective,
        "task_reward": task_reward,
        "penalty": penalty,
        "success": success,
        "state_key": state_key,
    }
    return observation, task_reward + penalty, terminated, truncated, info


class StepLimit:
    """Counts the steps of an episode and refuses those outside of one."""

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        self.num_steps = 0
        self._running = False

    def start(self) -> None:
        """Begins an episode."""
        self.num_steps = 0
        self._running = True

    def count(self) -> bool:
        """Counts one step; True when it was the last one allowed.

        Raises:
            RuntimeError: no episode is running.
        """
        if not self._running:
            raise RuntimeError("step() outside of an episode: call reset() first")
        self.num_steps += 1
        return self.num_steps >= self.max_steps

    def stop(self) -> None:
        """Ends the episode: further steps are refused."""
        self._running = False


def stable_hash(data: bytes) -> str:
    """64 bits as 16 hexadecimal digits, the same in every process (unlike ``hash``)."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


Split: TypeAlias = Literal["train", "eval", "all"]


def in_split(name: str, split: Split, holdout_fraction: float) -> bool:
    """Tells by a thing's ``stable_hash`` whether it is of the split; ``eval`` has the held-out share of all."""
    held_out = int(name, 16) < holdout_fraction * 2**64
    return split == "all" or held_out == (split == "eval")
