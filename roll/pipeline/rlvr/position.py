"""Where a run is in its data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from roll.rollout.scheduler import Collected


@dataclass(frozen=True)
class DataPosition:
    """Draws are numbered through the whole run, epochs included (see ``PromptSampler``)."""

    next_id: int = 0
    """The first draw that nobody has asked for yet."""
    returned: tuple[int, ...] = ()
    """Earlier draws that were given up before they were answered; they come first."""

    def ids(self) -> Iterator[int]:
        """The draws to come, in their order."""
        return itertools.chain(self.returned, itertools.count(self.next_id))

    def after(self, collected: Collected) -> DataPosition:
        """The position once these groups are used up."""
        finished = {group.group_id for group in [*collected.groups, *collected.rejected]}
        next_id = max([self.next_id, *(taken + 1 for taken in finished | set(collected.unfinished))])
        waiting = (set(self.returned) | set(range(self.next_id, next_id))) - finished
        return DataPosition(next_id, tuple(sorted(waiting)))

    def state_dict(self) -> dict[str, Any]:
        return {"next_id": self.next_id, "returned": list(self.returned)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> DataPosition:
        return cls(int(state["next_id"]), tuple(state["returned"]))
