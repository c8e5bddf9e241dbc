"""Runs environments of the package ``gem`` (GEM, a gym for language models)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field

from roll.agentic.env.base import stable_hash
from roll.agentic.env.game import AdaptedEnvConfig, AdaptedGame, Played
from roll.configs.problems import ConfigProblem
from roll.extras.worlds.own_random import OwnRandom

if TYPE_CHECKING:
    import gem


class GemConfig(AdaptedEnvConfig):
    """Keys of ``env_config`` for ``env_type: gem``."""

    env_id: str = Field(description="Name of an environment, for gem.make, as game:GuessTheNumber-v0-easy.")
    env_kwargs: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments for gem.make.")
    success_reward: float = Field(1.0, description="The lowest reward of the last step that counts as success.")

    def problems(self) -> Iterator[ConfigProblem]:
        """Finds a missing package, an unknown environment, and a pattern that is none."""
        yield from super().problems()
        yield from self.id_problems(self.env_id, "gem", "an environment of gem")


class GemEnv(AdaptedGame):
    """An environment of GEM: its text, with its additions for the next turn, is the observation.

    It reads the answer itself (most look for a last ``\\boxed{}``), and pays what it says. It draws from the random
    numbers of the process: calls follow one another, each with the numbers of its own episode.
    """

    config: GemConfig
    config_class = GemConfig

    def __init__(self, **env_config: Any) -> None:
        super().__init__(**env_config)
        self._own_random = OwnRandom()
        with self._own_random.take():
            self._inner = _made(self.config)

    def begin(self, seed: int, options: dict[str, Any]) -> None:
        """Starts an episode of the inner environment, seeded alike."""
        with self._own_random.take():
            seen, told = self._inner.reset(seed=seed % 2**32)  # numpy takes no larger one
        self._text = _words(seen, told)
        self._key = stable_hash(self._text.encode())

    def play(self, text: str) -> Played:
        """Tells the environment what was said; a text without an answer is not told."""
        said = self.said(text)
        if said is None:
            return Played(None, 0.0, False, False, False)
        with self._own_random.take():
            seen, paid, terminated, truncated, told = self._inner.step(said)
        self._text = _words(seen, told)
        self._key = stable_hash(f"{self._key}\n{self._text}".encode())
        success = bool(terminated) and float(paid) >= self.config.success_reward
        return Played(said, self.config.reward_scale * float(paid), True, bool(terminated), success, bool(truncated))


def _made(config: GemConfig) -> gem.Env:
    import gem.envs

    return cast("gem.Env", gem.make(config.env_id, **config.env_kwargs))


def _words(seen: Any, told: dict[str, Any]) -> str:
    """An observation between what comes before and after it."""
    parts = (told.get("prefix"), seen, told.get("suffix"))
    return "\n".join(text for part in parts if (text := str(part or "").strip("\n")))
