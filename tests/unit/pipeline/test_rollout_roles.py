"""Who is brought back after a death in a rollout or an evaluation, without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from roll.distributed.cluster.errors import WorkerDiedError
from roll.pipeline.roles import RestartBudget
from roll.pipeline.rollout_workers import RolloutWorkers
from roll.utils.signals import SignalGuard


class Workers:
    """A cluster of one, or the replicas of one."""

    world_size = 1

    def __init__(self, name: str) -> None:
        self.name = name
        self.restarts = [0]
        self.lives = True
        self.cluster = self

    def alive(self) -> list[bool]:
        return [self.lives]

    def restart(self, ranks: Any) -> None:
        self.restarts[0] += 1
        self.lives = True

    def call_rank(self, rank: int, method: str, *args: Any) -> None:
        assert method == "setup"


class Connected(RolloutWorkers):
    connections = 0

    def connect(self) -> None:
        self.connections += 1


def started(limit: int = 9) -> tuple[Connected, Workers, Workers, Workers]:
    """Roles of rollout workers, the generator and the evaluator."""
    players, generator, evaluator = (Workers(name) for name in ("rollout", "actor_infer", "val_infer"))
    models = SimpleNamespace(
        on_replaced=[], rollout_replicas=generator, evaluation_replicas=evaluator, restarts=RestartBudget(limit)
    )
    run: Any = SimpleNamespace(clusters={"rollout": players}, roles=models, signals=SignalGuard())
    roles = Connected(cast(Any, None), run, {"rollout": ()})
    return roles, players, generator, evaluator


LOST = RuntimeError("lost")


def test_a_death_that_hits_an_evaluation_and_the_rollouts_beside_it_is_repaired_once_for_both() -> None:
    roles, players, _, _ = started()
    players.lives = False
    roles.recover(LOST, evaluates=True)
    assert (players.restarts, roles.connections) == ([1], 1)
    roles.recover(LOST, evaluates=False)  # the rollouts hear of it when the next batch is taken
    assert (players.restarts, roles.connections) == ([1], 1)
    for evaluates in (True, False):
        with pytest.raises(RuntimeError, match="lost"):  # nobody has died since
            roles.recover(LOST, evaluates=evaluates)


@pytest.mark.parametrize("evaluates", [True, False])
def test_only_those_who_generate_for_the_lost_groups_are_brought_back(evaluates: bool) -> None:
    """The trainer may have moved on since the others got their weights, and cannot send these any more."""
    roles, _, generator, evaluator = started()
    generator.lives = evaluator.lives = False
    roles.recover(LOST, evaluates=evaluates)
    assert (generator.restarts, evaluator.restarts) == (([0], [1]) if evaluates else ([1], [0]))


def test_the_dead_are_replaced_as_often_as_is_allowed() -> None:
    roles, players, generator, _ = started(limit=1)
    players.lives = generator.lives = False
    with pytest.raises(WorkerDiedError, match="max_worker_restarts=1 is used up"):
        roles.recover(LOST, evaluates=False)
