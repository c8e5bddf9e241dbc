"""Houses of the text adventure: rooms, locked doors, keys and a treasure that can always be reached."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

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
