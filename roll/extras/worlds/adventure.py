"""A text adventure: find the treasure of a house, where keys open locked doors."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from typing import Any

from gymnasium.spaces import Text
from pydantic import Field

from roll.agentic.env.actions import ActionParser
from roll.agentic.env.base import stable_hash
from roll.agentic.env.config import ActionEnvConfig
from roll.agentic.env.game import Game, Played
from roll.configs.problems import ConfigProblem
from roll.extras.worlds.adventure_house import ACTIONS, COLOURS, DIRECTIONS, ROOMS, House, State, draw_house


class AdventureConfig(ActionEnvConfig):
    """Keys of ``env_config`` for ``env_type: adventure``."""

    max_steps: int = Field(20, ge=1, description="Steps after which the episode is truncated; the treasure is nearer.")
    num_rooms: int = Field(5, ge=2, le=len(ROOMS), description="Rooms of the house.")
    num_doors: int = Field(1, ge=0, le=len(COLOURS), description="Locked doors, each with a key of its colour.")
    step_penalty: float = Field(0.0, le=0, description="Task reward of every step.")
    door_reward: float = Field(0.0, ge=0, description="Task reward of unlocking a door.")
    treasure_reward: float = Field(1.0, ge=0, description="Task reward of taking the treasure.")

    def problems(self) -> Iterator[ConfigProblem]:
        """Rules that pydantic cannot state."""
        yield from super().problems()
        if self.num_doors >= self.num_rooms:
            expected = f"at most {self.num_rooms - 1}, the passages between {self.num_rooms} rooms"
            yield self.problem("num_doors", expected, "num_rooms")
        shortest = 2 + 2 * bool(self.num_doors)
        if self.max_steps < shortest:
            yield self.problem("max_steps", f"at least {shortest}, the shortest way to a treasure", "num_doors")


class AdventureEnv(Game):
    """One house per seed, solvable in ``max_steps``. The player sees the room that they are in and what they carry."""

    config: AdventureConfig
    config_class = AdventureConfig
    action_names = ACTIONS
    instant = True

    def __init__(self, **env_config: Any) -> None:
        super().__init__(**env_config)
        if self.config.env_instruction is None:
            self.env_instruction = _INSTRUCTION
        self._parser = ActionParser(ACTIONS, self.config.action_pattern)
        self._house: House | None = None
        self._state = State()
        self.observation_space = Text(max_length=512, charset=string.printable)

    def begin(self, seed: int, options: dict[str, Any]) -> None:
        """Enters the seed's house.

        Raises:
            ValueError: no house can be solved in ``max_steps``.
        """
        config = self.config
        self._house = draw_house(random.Random(seed), config.num_rooms, config.num_doors, config.max_steps)
        self._layout = repr(self._house).encode()
        self._state = State()

    def play(self, text: str) -> Played:
        """Does what the text says; what cannot be done changes nothing."""
        config, before = self.config, self._state
        name = self._parser.parse(text)
        if name is not None:
            self._state = self.house.after(before, name)
        success = self._state.has_treasure
        num_unlocked = len(self._state.unlocked) - len(before.unlocked)
        reward = config.step_penalty + config.door_reward * num_unlocked + config.treasure_reward * success
        return Played(name, config.reward_scale * reward, self._state != before, success, success)

    @property
    def house(self) -> House:
        """The house of this episode."""
        if self._house is None:
            raise RuntimeError("no house yet: call reset() first")
        return self._house

    def expert_actions(self) -> list[str]:
        """All actions that begin a shortest way to the treasure; empty when it is found."""
        distances = self.house.distances
        here = distances[self._state]
        return [name for name in ACTIONS if here and distances[self.house.after(self._state, name)] < here]

    def observation(self) -> str:
        house, state = self.house, self._state
        if state.has_treasure:
            return "You have the treasure."
        lines = [f"You are in the {house.names[state.room]}."]
        in_room = [door for door, room in enumerate(house.keys) if room == state.room]
        here = [_key_name(door) for door in in_room if door not in state.keys]
        if state.room == house.treasure:
            here.append("treasure")
        if here:
            lines.append(f"Here: {', '.join(here)}.")
        lines.append(f"Ways: {', '.join(self._ways())}.")
        if state.keys:
            lines.append(f"You carry: {', '.join(_key_name(door) for door in sorted(state.keys))}.")
        return "\n".join(lines)

    def _ways(self) -> list[str]:
        """The directions in which a passage leads on, with its door."""
        house, state = self.house, self._state
        ways = []
        for direction in DIRECTIONS:
            if direction in house.exits[state.room]:
                door = house.doors.get((state.room, direction))
                kind = "open" if door in state.unlocked else "locked"
                ways.append(direction if door is None else f"{direction} ({kind} {COLOURS[door]} door)")
        return ways

    def state_key(self) -> str:
        room, keys, unlocked, has_treasure = self._state
        return stable_hash(self._layout + repr((room, sorted(keys), sorted(unlocked), has_treasure)).encode())


def _key_name(door: int) -> str:
    return f"{COLOURS[door]} key"


_INSTRUCTION = (
    "You are in a house with a hidden treasure. Find it and take it. A locked door is unlocked with the key of its "
    "colour, which lies in a room; what is in a room is taken all at once. "
    f"Answer with one of the actions {', '.join(ACTIONS)}, like this: <answer>go north</answer>"
)
