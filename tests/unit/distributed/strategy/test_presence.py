"""What of a generator is on its device, as it is told to leave and to come back."""

from __future__ import annotations

from roll.distributed.strategy.base import States
from roll.distributed.strategy.generation.requests import Presence

BOTH = States.WEIGHTS | States.CACHE


def test_the_cache_leaves_with_the_weights_and_comes_back_by_itself() -> None:
    presence = Presence()
    assert presence.leave(States.WEIGHTS) == BOTH
    assert presence.come_back(States.WEIGHTS) == States.WEIGHTS
    assert presence.away == States.CACHE
    assert presence.come_back(States.ALL) == States.CACHE
    assert not presence.away


def test_nothing_leaves_or_comes_back_twice() -> None:
    presence = Presence()
    assert presence.leave(States.CACHE) == States.CACHE
    assert presence.leave(States.ALL) == States.WEIGHTS
    assert not presence.leave(States.ALL)
    assert presence.come_back(States.ALL) == BOTH
    assert not presence.come_back(States.ALL)


def test_a_generator_has_no_gradients_and_no_optimizer() -> None:
    presence = Presence()
    assert not presence.leave(States.GRADS | States.OPTIMIZER)
    assert not presence.away
