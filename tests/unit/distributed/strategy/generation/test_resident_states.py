"""What of a generator is on its device, as it is told to leave and to come back."""

from roll.distributed.strategy.base import States
from roll.distributed.strategy.generation.generator import ResidentStates

BOTH = States.WEIGHTS | States.CACHE


def test_states_leave_and_come_back_once_the_cache_with_the_weights():
    states = ResidentStates()
    assert states.leave(States.WEIGHTS) == BOTH
    assert states.come_back(States.WEIGHTS) == States.WEIGHTS
    assert states.away == States.CACHE
    assert states.come_back(States.ALL) == States.CACHE
    assert not states.away
    states = ResidentStates()
    assert states.leave(States.CACHE) == States.CACHE
    assert states.leave(States.ALL) == States.WEIGHTS
    assert not states.leave(States.ALL)
    assert states.come_back(States.ALL) == BOTH
    assert not states.come_back(States.ALL)
    states = ResidentStates()
    assert not states.leave(States.GRADS | States.OPTIMIZER)
    assert not states.away
