"""Runs gymnasium environments: observations as text or pictures; actions that are discrete or text."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.spaces import Box, Discrete, Space, Text
from pydantic import Field

from roll.agentic.env.base import Observation, picture, stable_hash
from roll.agentic.env.game import ActionEnvConfig, ActionParser, Game, Played
from roll.configs.problems import ConfigProblem
from roll.extras.worlds.own_random import Renderer, find_renderer
from roll.utils.registry import UnknownNameError

_STYLE = re.compile(r"\x1b\[([0-9;]*)m")
_OTHER_CODE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_NAMES = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_LAYERS = {3: ("text", ""), 4: ("ground", ""), 9: ("text", "bright "), 10: ("ground", "bright ")}


def tell_colours(text: str) -> str:
    """Writes coloured parts of a terminal's text as ``[red:S]``, each on its line; other codes are left out.

    Letters of one colour on a ground of another are ``[blue on yellow:S]``. White space counts only with a ground.
    """
    plain, *rest = _STYLE.split(text)
    told = [plain]
    colours: dict[str, str] = {}
    for codes, part in zip(rest[::2], rest[1::2], strict=True):
        _apply(colours, codes)
        colour = " on ".join(colours[layer] for layer in ("text", "ground") if layer in colours)
        told.append("\n".join(_marked(line, colour, "ground" in colours) for line in part.split("\n")))
    return _OTHER_CODE.sub("", "".join(told))


def _marked(line: str, colour: str, has_ground: bool) -> str:
    visible = bool(line) if has_ground else bool(line.strip())
    return f"[{colour}:{line}]" if colour and visible else line


def _apply(colours: dict[str, str], codes: str) -> None:
    """Notes what the numbers of one code change in the colours of ``text`` and ``ground``."""
    numbers = iter([int(number or 0) for number in codes.split(";")])
    for number in numbers:
        tens, digit = divmod(number, 10)
        layer, shade = _LAYERS.get(tens, ("", ""))
        if number == 0:
            colours.clear()
        elif not layer:  # bold, underlined and the like
            continue
        elif digit < len(_NAMES):
            colours[layer] = shade + _NAMES[digit]
        elif digit == 8:  # one of 256 colours, or red, green and blue
            length = 3 if next(numbers, 0) == 2 else 1
            colours[layer] = f"colour {' '.join(str(next(numbers, 0)) for _ in range(length))}"
        else:
            colours.pop(layer, None)


def find_spec(env_id: str) -> EnvSpec:
    """The registered environment that ``gymnasium.make`` would build; of ``module:Name`` the module is imported first.

    Raises:
        gymnasium.error.Error: no such environment.
        ImportError: no such module.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    return gymnasium.spec(name)


_RENDERED = ("ansi", "rgb_array")
"""Values of ``renderer`` that are render modes of gymnasium."""


class GymnasiumConfig(ActionEnvConfig):
    """Keys of ``env_config`` for ``env_type: gymnasium``."""

    env_id: str = Field(description="Name for gymnasium.make; module:Name imports the module first.")
    env_kwargs: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments for gymnasium.make.")
    action_names: list[str] | None = Field(
        None, description="One name per action, in the order of their numbers; null uses the numbers."
    )
    renderer: str | None = Field(
        None,
        description="What the policy gets: ansi (the environment's own text, colours in brackets), rgb_array (its own "
        "picture), values (the observation's numbers), package.module:function or folder/file.py:function, observation "
        "to text. null: ansi if there is one, else the observation, if it is text, a number or a picture.",
    )
    success_key: str | None = Field(None, description="Key of the environment's info that is true on success.")
    success_return: float | None = Field(
        None, description="An episode that terminates with at least this sum of rewards (before reward_scale) succeeds."
    )

    def problems(self) -> Iterator[ConfigProblem]:
        """Names that do not exist, and rules between keys."""
        yield from super().problems()
        try:
            find_spec(self.env_id)
        except (gymnasium.error.Error, ImportError) as error:
            yield self.problem("env_id", "an environment of gymnasium", hint=str(error))
        try:
            self.find_renderer()
        except UnknownNameError as error:
            expected = "ansi, rgb_array, values, package.module:function or folder/file.py:function"
            yield self.problem("renderer", expected, hint=str(error))
        if self.success_key is None and self.success_return is None:
            yield self.problem("success_return", "a number, or success_key, to define success", "success_key")

    def find_renderer(self) -> Renderer | None:
        """The function that ``renderer`` names; ``None`` where it names what the environment renders, or nothing."""
        return None if self.renderer in (None, *_RENDERED) else find_renderer(self.renderer)


class GymnasiumEnv(Game):
    """Translates both ways; the inner environment never gets a text without an action.

    Equal observations count as equal states: ``state_key`` is the hash of the text or of the pixels.

    Raises:
        ValueError: actions are neither discrete nor text, ``action_names`` has the wrong length, the environment does
            not render what ``renderer`` asks for, or ``renderer`` is not given and observations are neither text nor
            discrete nor pictures.
    """

    config: GymnasiumConfig
    config_class = GymnasiumConfig
    num_seeds = 2**31
    own_thread = True  # whatever environment it is

    def __init__(self, **env_config: Any) -> None:
        super().__init__(**env_config)
        config = self.config
        self._inner = _make_inner(config)
        self._renderer = config.find_renderer()
        self._is_rendered = self._renderer is None and (
            config.renderer is not None or self._inner.render_mode == "ansi"
        )
        self._shown: Observation = ""
        self._shows_pixels = not self._is_rendered and is_picture(self._inner.observation_space)
        if self._renderer is None and not self._is_rendered and not self._shows_pixels:
            self._renderer = _plain_renderer(config, self._inner.observation_space)
        self._actions = _actions(config, self._inner.action_space)
        self.action_names = tuple(self._actions or ())
        self._parser = ActionParser(self.action_names, config.action_pattern)
        self._return = 0.0
        if config.env_instruction is None:
            names = self.action_names
            wanted = f"one of the actions {', '.join(names)}" if names else "an action"
            self.env_instruction = (
                f"You act in the environment {config.env_id}. Answer with {wanted}, "
                f"like this: <answer>{names[0] if names else '…'}</answer>"
            )

    def begin(self, seed: int, options: dict[str, Any]) -> None:
        """Starts an episode of the inner environment, seeded alike."""
        observation, _ = self._inner.reset(seed=seed, options=options or None)
        self._show(observation)
        self._return = 0.0

    def play(self, text: str) -> Played:
        """Plays the action that the text names; a text without one is not played."""
        name, before = self._named(text), self._key
        if name is None:
            return Played(None, 0.0, False, False, False)
        played = name if self._actions is None else self._actions[name]
        observation, reward, terminated, truncated, info = cast(Any, self._inner.step(played))
        self._return += reward
        self._show(observation)
        success = self._succeeded(terminated, info)
        effective = terminated or self._key != before
        return Played(name, self.config.reward_scale * reward, effective, terminated, success, truncated)

    def render(self) -> Any:
        """The inner environment's own picture, where it has one."""
        return self._inner.render() if self._inner.render_mode == "rgb_array" else None

    def close(self) -> None:
        """Closes the inner environment."""
        self._inner.close()

    def _named(self, text: str) -> str | None:
        """The action in a text, if the inner environment takes it."""
        if self._actions is not None:
            return self._parser.parse(text)
        answer = self._parser.answer(text)
        return answer if answer is not None and self._inner.action_space.contains(answer) else None

    def _succeeded(self, terminated: bool, info: Mapping[str, Any]) -> bool:
        if self.config.success_key is not None:
            return bool(info.get(self.config.success_key, False))
        return terminated and self.config.success_return is not None and self._return >= self.config.success_return

    def observation(self) -> Observation:
        return self._shown

    def _show(self, observation: Any) -> None:
        """Sets what the policy gets, and its hash."""
        if self._renderer is not None:
            observation = self._renderer(observation)
        elif self._is_rendered:
            observation = cast(Any, self._inner.render())
            if self._inner.render_mode == "ansi":
                observation = tell_colours(str(observation)).strip("\n")
        if isinstance(observation, str):
            self._shown, self._key = observation, stable_hash(observation.encode())
        else:
            self._shown, self._key = [picture(observation)], stable_hash(np.asarray(observation).tobytes())


def _make_inner(config: GymnasiumConfig) -> gymnasium.Env[Any, Any]:
    kwargs = dict(config.env_kwargs)
    modes = _render_modes(config.env_id)
    if config.renderer in _RENDERED:
        kwargs["render_mode"] = config.renderer
    elif config.renderer is None and "ansi" in modes:
        kwargs.setdefault("render_mode", "ansi")
    elif "rgb_array" in modes:
        kwargs.setdefault("render_mode", "rgb_array")
    inner = cast("gymnasium.Env[Any, Any]", gymnasium.make(config.env_id, **kwargs))
    modes = inner.metadata.get("render_modes", [])
    if config.renderer in _RENDERED and config.renderer not in modes:
        raise ValueError(
            f"renderer: got {config.renderer!r}, but {config.env_id} renders only {modes}; expected values or a "
            "function"
        )
    return inner


def is_picture(space: Space[Any]) -> bool:
    """Tells whether observations are pictures: red, green and blue of pixels, shape [height, width, 3]."""
    return isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) == 3 and space.shape[2] == 3


def _plain_renderer(config: GymnasiumConfig, space: Space[Any]) -> Renderer:
    """Text or a number as it is.

    Raises:
        ValueError: observations are something else.
    """
    if isinstance(space, Text | Discrete):
        return find_renderer("values")
    raise ValueError(
        f"renderer: got nothing, but the observations of {config.env_id} are {space}, neither text nor discrete "
        "nor pictures; expected rgb_array, values, package.module:function or folder/file.py:function, observation to "
        "text"
    )


def _actions(config: GymnasiumConfig, space: Space[Any]) -> dict[str, int] | None:
    """Numbers of the actions by name; ``None`` where they are texts.

    Raises:
        ValueError: they are neither discrete nor text, or ``action_names`` does not fit.
    """
    if isinstance(space, Text) and config.action_names is None:
        return None
    if not isinstance(space, Discrete):
        raise ValueError(f"env_id: {config.env_id} has the action space {space}, expected Discrete or Text")
    names = config.action_names or [str(space.start + index) for index in range(space.n)]
    if len(names) != space.n:
        raise ValueError(f"action_names: got {len(names)} names, expected {space.n} for {config.env_id}")
    return {name: int(space.start) + index for index, name in enumerate(names)}


def _render_modes(env_id: str) -> Sequence[str]:
    """The ways in which the class can show itself; none where it is not known before it is built."""
    entry = find_spec(env_id).entry_point
    creator = load_env_creator(entry) if isinstance(entry, str) else entry
    metadata = getattr(creator, "metadata", None) or {}
    return metadata.get("render_modes") or ()
