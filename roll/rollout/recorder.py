"""The record of an episode: its turns, and the rows that they continue or begin.

The calls of an episode form a tree. One whose prompt begins with everything that a row holds (prompts and answers, id
by id) continues that row; any other begins a row of its own: a retry, a sub-agent, one of several answers to the same
prompt, a history that was rewritten. So each row is exactly what the engine got and sampled last in it, and each
sampled token belongs to one row; where a later row repeats it, it is part of the prompt there.
"""

from __future__ import annotations

from dataclasses import replace

from roll.data.identity import identity
from roll.rollout.types import Turn


class Recorder:
    """Turns of one episode, in the order in which they were finished."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._rows: list[bytes] = []
        """The ids of each row so far."""

    def add(self, turn: Turn) -> Turn:
        """Adds a turn; returns it with the ``row`` that it continues, the longest one where several would do."""
        prompt = identity(turn.prompt_ids)
        row, longest = len(self._rows), -1
        for number, ids in enumerate(self._rows):
            if len(ids) > longest and prompt.startswith(ids):
                row, longest = number, len(ids)
        ids = prompt + identity(turn.completion.token_ids)
        if row == len(self._rows):
            self._rows.append(ids)
        else:
            self._rows[row] = ids
        self.turns.append(replace(turn, row=row))
        return self.turns[-1]
