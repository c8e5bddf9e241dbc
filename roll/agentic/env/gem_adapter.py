"""Plays environments of the package ``gem`` (GEM, a gym for language models)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from pydantic import Field

from roll.agentic.env.actions import ActionParser, pattern_problem
from roll.agentic.env.base import StepLimit, StepResult, TextEnv, stable_hash, step_result
from roll.agentic.env.config import EnvConfig, parse_config
from roll.agentic.env.own_random import OwnRandom
from roll.configs.problems import ConfigProblem
from roll.configs.schema import nearest

if TYPE_CHECKING:
    import gem

INSTALL = "pip install 'roll-rl[gem]'"


class GemConfig(EnvConfig):
    """Keys of ``env_config`` for ``env_type: gem``."""

    env_id: str = Field(description="Name of an environment, for gem.make, as game:GuessTheNumber-v0-easy.")
    env_kwargs: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments for gem.make.")
    action_pattern: str | None = Field(
        None, description="Regular expression whose first group is what the environment is told; null: the whole text."
    )
    max_steps: int = Field(100, ge=1, description="Steps after which the episode is truncated.")
    success_reward: float = Field(1.0, description="The lowest reward of the last step that counts as success.")

    def problems(self) -> list[ConfigProblem]:
        """What is not there, and a pattern that is none."""
        found: list[ConfigProblem | None] = []
        try:
            from gem.envs.registration import ENV_REGISTRY
        except ModuleNotFoundError as error:
            found.append(self.problem("env_id", f"the package {error.name} to be installed", hint=INSTALL))
        else:
            if self.env_id not in ENV_REGISTRY:
                near = nearest(self.env_id, list(ENV_REGISTRY))
                found.append(
                    self.problem("env_id", "an environment of gem", hint=f"did you mean {near}?" if near else "")
                )
        if self.action_pattern is not None:
            found.append(pattern_problem(self.action_pattern))
        return [problem for problem in found if problem]


class GemEnv(TextEnv):
    """An environment of GEM: its words, with what it adds to them for the next turn, are the observation.

    It reads the answer itself (most look for a last ``\\boxed{}``), and pays what it says. It draws from the random
    numbers of the process: calls follow one another, each with the numbers of its own episode.

    Args:
        env_config: the keys of ``GemConfig``.
    """

    config_class = GemConfig

    def __init__(self, **env_config: Any) -> None:
        self.config = config = parse_config(GemConfig, env_config)
        self.env_instruction = config.env_instruction or ""
        self._parser = None if config.action_pattern is None else ActionParser({}, config.action_pattern)
        self._limit = StepLimit(config.max_steps)
        self._own_random = OwnRandom()
        self._text = self._key = ""
        with self._own_random.take():
            self._inner = _made(config)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Starts an episode, seeded alike."""
        super().reset(seed=seed)
        drawn = seed if seed is not None else int(self.np_random.integers(2**31))
        with self._own_random.take():
            seen, told = self._inner.reset(seed=drawn % 2**32)  # numpy takes no larger one
        self._text = _words(seen, told)
        self._key = stable_hash(self._text.encode())
        self._limit.start()
        return self._text, {"state_key": self._key, "success": False}

    def step(self, action: str) -> StepResult:
        """Tells the environment what was said; a text without an answer is not told."""
        limit_reached = self._limit.count()
        scale = self.config.reward_scale
        said = action if self._parser is None else self._parser.answer(action)
        reward, terminated, truncated = 0.0, False, False
        if said is not None:
            with self._own_random.take():
                seen, paid, terminated, truncated, told = self._inner.step(said)
            reward, self._text = float(paid), _words(seen, told)
            self._key = stable_hash(f"{self._key}\n{self._text}".encode())
        truncated = not terminated and (truncated or limit_reached)
        if terminated or truncated:
            self._limit.stop()
        return step_result(
            self._text,
            task_reward=scale * reward,
            penalty=scale * self.config.format_penalty if said is None else 0.0,
            terminated=bool(terminated),
            truncated=bool(truncated),
            action=said,
            action_is_effective=said is not None,
            success=bool(terminated) and reward >= self.config.success_reward,
            state_key=self._key,
        )


def _made(config: GemConfig) -> gem.Env:
    import gem.envs

    return cast("gem.Env", gem.make(config.env_id, **config.env_kwargs))


def _words(seen: Any, told: dict[str, Any]) -> str:
    """An observation between what comes before and after it."""
    parts = (told.get("prefix"), seen, told.get("suffix"))
    return "\n".join(text for part in parts if (text := str(part or "").strip("\n")))
