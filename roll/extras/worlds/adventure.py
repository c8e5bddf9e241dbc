"""A text adventure: find the treasure of a house, where keys open locked doors."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from gymnasium.spaces import Text
from pydantic import Field

from roll.agentic.env.base import stable_hash
from roll.agentic.env.game import ActionEnvConfig, ActionParser, Game, Played
from roll.configs.problems import ConfigProblem

DIRECTIONS = {"north": (-1, 0), "east": (0, 1), "south": (1, 0), "west": (0, -1)}

COLOURS = ("red", "blue", "green")
"""Of the doors and of their keys."""

ROOMS = (
    "hall",
    "kitchen",
    "library",
    "cellar",
    "attic",
    "garden",
    "study",
    "workshop",
    "pantry",
    "bedroom",
    "chapel",
    "gallery",
)

ACTIONS = (*(f"go {name}" for name in DIRECTIONS), *(f"unlock {name}" for name in DIRECTIONS), "take")


class State(NamedTuple):
    """State of a house that changes."""

    room: int = 0
    keys: frozenset[int] = frozenset()
    """Doors whose keys are carried; a key is kept."""
    unlocked: frozenset[int] = frozenset()
    """Doors that have been unlocked."""
    has_treasure: bool = False


@dataclass(frozen=True)
class House:
    """Rooms, numbered from the one where the episode begins, and what is in them."""

    names: tuple[str, ...]
    exits: tuple[dict[str, int], ...]
    """By room: direction -> the next room."""
    doors: dict[tuple[int, str], int] = field(default_factory=dict)
    """(room, direction) -> the door there, from both sides; a passage without one is open."""
    keys: tuple[int, ...] = ()
    """By door: the room of its key."""
    treasure: int = 0
    """The room of the treasure."""

    def after(self, state: State, action: str) -> State:
        """Returns the state after an action; the same where it has no effect."""
        if action == "take":
            here = frozenset(door for door, room in enumerate(self.keys) if room == state.room)
            return state._replace(
                keys=state.keys | here, has_treasure=state.has_treasure or state.room == self.treasure
            )
        verb, _, direction = action.partition(" ")
        door = self.doors.get((state.room, direction))
        if verb == "unlock":
            return state._replace(unlocked=state.unlocked | {door}) if door in state.keys else state
        if direction not in self.exits[state.room] or not (door is None or door in state.unlocked):
            return state
        return state._replace(room=self.exits[state.room][direction])

    @cached_property
    def distances(self) -> dict[State, int]:
        """Fewest actions to the treasure, from each state that can come up."""
        before: dict[State, list[State]] = {}
        queue, seen = [State()], {State()}
        for state in queue:  # it grows meanwhile
            for action in ACTIONS if not state.has_treasure else ():
                after = self.after(state, action)
                if after != state:
                    before.setdefault(after, []).append(state)
                if after not in seen:
                    seen.add(after)
                    queue.append(after)
        found = {state: 0 for state in queue if state.has_treasure}
        queue = list(found)
        for state in queue:
            for earlier in before.get(state, ()):
                if earlier not in found:
                    found[earlier] = found[state] + 1
                    queue.append(earlier)
        return found


def draw_house(rng: random.Random, num_rooms: int, num_doors: int, max_solution: int) -> House:
    """A house whose treasure takes from 1 to ``max_solution`` actions.

    Every key lies in front of the doors that are unlocked after its own, so no house has to be thrown away because
    it cannot be solved; some are because the way is too long.

    Raises:
        ValueError: no house with so short a way was found.
    """
    for _ in range(_MAX_HOUSES):
        house = _draw(rng, num_rooms, num_doors)
        if house.distances[State()] <= max_solution:
            return house
    raise ValueError(
        f"max_steps: got {max_solution}, but none of {_MAX_HOUSES} houses with {num_rooms} rooms and {num_doors} "
        "doors can be solved in so few; expected more steps, fewer rooms or fewer doors"
    )


_MAX_HOUSES = 1000
_OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}

_Exits = tuple[dict[str, int], ...]


def _draw(rng: random.Random, num_rooms: int, num_doors: int) -> House:
    """Locks some passages, opens them one after the other, and puts each key where one has been before."""
    exits = _draw_rooms(rng, num_rooms)
    names = tuple(rng.sample(ROOMS, num_rooms))
    passages = [(room, direction) for room in range(num_rooms) for direction, to in exits[room].items() if to > room]
    locked = rng.sample(passages, num_doors)
    doors: dict[tuple[int, str], int] = {}
    keys: list[int] = []
    newest = _open_rooms(exits, 0, locked)
    reached = list(newest)
    while front := [passage for passage in locked if passage not in doors and passage[0] in reached]:
        room, direction = rng.choice(front)
        beyond = exits[room][direction]
        doors[room, direction] = doors[beyond, _OPPOSITE[direction]] = len(keys)
        keys.append(rng.choice(reached))
        newest = _open_rooms(exits, beyond, locked)
        reached += newest
    return House(names, exits, doors, tuple(keys), rng.choice([room for room in newest if room]))


def _draw_rooms(rng: random.Random, num_rooms: int) -> _Exits:
    """A tree of rooms on a grid: a room's number is above that of the one it was added to."""
    cells = {(0, 0): 0}
    exits: list[dict[str, int]] = [{}]
    while len(exits) < num_rooms:
        row, column = rng.choice(list(cells))
        direction = rng.choice(list(DIRECTIONS))
        cell = (row + DIRECTIONS[direction][0], column + DIRECTIONS[direction][1])
        if cell not in cells:
            exits[cells[row, column]][direction] = len(exits)
            exits.append({_OPPOSITE[direction]: cells[row, column]})
            cells[cell] = len(exits) - 1
    return tuple(exits)


def _open_rooms(exits: _Exits, start: int, locked: list[tuple[int, str]]) -> list[int]:
    """The room and those beyond it, as far as no passage is locked."""
    rooms = [start]
    for room in rooms:  # it grows meanwhile
        rooms += [to for direction, to in exits[room].items() if to > room and (room, direction) not in locked]
    return rooms


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
