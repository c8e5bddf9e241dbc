"""Rollouts as a run makes them: environment workers and an engine with an untrained tiny model on a local Ray."""

import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from roll.agentic.env.base import StepResult, TextEnv
from roll.configs.env import CustomEnvConfig
from roll.data.batch import Batch
from roll.data.requests import SamplingParams
from roll.demo.scripted_play import ScriptedPlay
from roll.distributed.cluster.cluster import Cluster
from roll.distributed.cluster.resources import RoleRequest
from roll.pipeline.workers import InferWorker
from roll.rollout.env_manager import LengthLimits
from roll.rollout.env_worker import EnvironmentWorker, EnvWorkerContext
from roll.rollout.plans import GroupPlan, GroupSpec
from roll.rollout.rows import groups_to_batch
from roll.rollout.scheduler import RolloutScheduler
from roll.rollout.types import EpisodeEnd, RolloutGroup
from tests.support.clusters import local_clusters
from tests.support.sizes import tiny_folder
from tests.support.steps import usual_step
from tests.support.trainers import make_context

BOARD = {"min_solution": 1, "max_solution": 4, "num_walls": 4, "max_steps": 4}


class FaultyEnv(TextEnv):
    """Three turns.

    Args:
        fault: what the second step does: ``crash``, ``hang`` (for a while), ``kill`` (the process), or nothing.
        once: this file, while it is there, is removed by the first fault; without it there is none.
        slow: seconds of a step.
    """

    def __init__(self, fault: str = "", once: str = "", slow: float = 0.0) -> None:
        self.fault, self.once, self.slow = fault, once, slow

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.num_steps = 0
        return f"{seed}", {"state_key": f"{seed}"}

    def step(self, action: str) -> StepResult:
        self.num_steps += 1
        time.sleep(self.slow)
        if self.num_steps == 2 and self.fault and self._now():
            if self.fault == "kill":
                os._exit(1)
            elif self.fault == "crash":
                raise RuntimeError("the floor gave way")
            time.sleep(2.5)
        return usual_step(f"step {self.num_steps}", action, action, terminated=self.num_steps == 3)

    def _now(self) -> bool:
        if not self.once:
            return True
        try:
            Path(self.once).unlink()  # which only one of several threads can do
        except FileNotFoundError:
            return False
        return True


def faulty(**env_config: Any) -> CustomEnvConfig:
    return CustomEnvConfig(env_type=f"{__name__}:FaultyEnv", step_timeout=1.0, env_config=env_config)


def sokoban(**config: Any) -> CustomEnvConfig:
    return CustomEnvConfig(env_type="sokoban", max_steps=4, agent_system_template="Sokoban", env_config=BOARD, **config)


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("orders")


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory, orders: Path) -> EnvWorkerContext:
    return EnvWorkerContext(
        envs={
            "Step": sokoban(env_manager_cls="step"),
            "Traj": sokoban(env_manager_cls="traj"),
            "CrashOnce": faulty(fault="crash", once=str(orders / "crash")),
            "HangOnce": faulty(fault="hang", once=str(orders / "hang")),
            "KillOnce": faulty(fault="kill", once=str(orders / "kill")),
            "Unequal": faulty(slow=0.05),
        },
        tokenizer_path=str(tiny_folder(tmp_path_factory, seed=1)),
        template="native",
        params=SamplingParams(max_new_tokens=6, temperature=1.0),
        limits=LengthLimits(prompt_length=200, sequence_length=400),
        retries=1,
    )


@pytest.fixture(scope="module")
def clusters(context: EnvWorkerContext) -> Iterator[tuple[Cluster, Cluster]]:
    workers = {
        RoleRequest("envs", None, world_size=1): EnvironmentWorker,
        RoleRequest("infer", None, world_size=1): InferWorker,
    }
    with local_clusters(workers) as (envs, infer):
        options = {"model_args": {"attn_implementation": "sdpa"}, "temperature": 1.0, "sequence_length": 400}
        generator = make_context(Path(context.tokenizer_path), "hf_infer", role="infer", **options)
        refs = envs.submit("setup", context), infer.submit("setup", generator)
        envs.gather(refs[0], call="setup")
        infer.gather(refs[1], call="setup")
        envs.call("set_engines", infer.handles)
        yield envs, infer


@pytest.fixture
def play(clusters: tuple[Cluster, Cluster]) -> Callable[..., list[RolloutGroup]]:
    """Plays groups side by side."""

    def play(*specs: GroupSpec) -> list[RolloutGroup]:
        envs, _ = clusters
        refs = [envs.handles[0].run_group.remote(spec) for spec in specs]
        return envs.gather(refs, call="run_group", ranks=[0] * len(refs), timeout=60)

    return play


def tokens(group: RolloutGroup) -> list[list[list[int]]]:
    return [[turn.completion.token_ids.tolist() for turn in t.turns] for t in group.trajectories]


@pytest.mark.parametrize("tag", ["Step", "Traj"])
def test_a_group_shares_its_start_and_repeats_itself(tag, play):
    spec = GroupSpec(3, tag, env_seed=11, group_size=4)
    (alone,) = play(spec)
    company = [GroupSpec(n, "Step", env_seed=n, group_size=4) for n in range(4, 8)]
    again, *_ = play(spec, *company)
    assert (alone.group_id, alone.tag, alone.dropped, alone.errors) == (3, tag, 0, ())
    assert [t.member for t in alone.trajectories] == [0, 1, 2, 3]
    assert len({t.turns[0].observation for t in alone.trajectories}) == 1
    assert len({str(member) for member in tokens(alone)}) == 4  # members sample on their own
    assert tokens(again) == tokens(alone)  # whatever else the engine has in its batch
    greedy, greedy_again = play(replace(spec, greedy=True), replace(spec, greedy=True))
    assert tokens(greedy) == tokens(greedy_again)
    assert len({str(member) for member in tokens(greedy)}) == 1


def test_the_rows_of_a_real_rollout_hold_what_was_sampled(play):
    groups = play(GroupSpec(0, "Step", 5, 2), GroupSpec(1, "Traj", 5, 2))
    batch = groups_to_batch(groups, ["Traj", "Step"])
    sampled = [token for group in groups for member in tokens(group) for turn in member for token in turn]
    assert batch.tokens_T[batch.loss_mask_T].tolist() == sampled
    assert batch.tag_B is not None and batch.traj_B is not None and batch.rollout_logprobs_T is not None
    assert batch.tag_B.unique().tolist() == [0, 1]
    assert batch.traj_B.unique().tolist() == [0, 1, 2, 3]
    assert (batch.rollout_logprobs_T[batch.loss_mask_T] < 0).all()
    trajectory = groups[1].trajectories[0]
    assert trajectory.history and trajectory.end in (EpisodeEnd.TRUNCATED, EpisodeEnd.TERMINATED)
    for earlier, later in zip(trajectory.turns, trajectory.turns[1:], strict=False):
        prefix = [*earlier.prompt_ids, *earlier.completion.token_ids]
        assert later.prompt_ids[: len(prefix)].tolist() == prefix


def test_with_redundancy_the_first_to_finish_count(play):
    (group,) = play(GroupSpec(0, "Unequal", 5, group_size=2, redundancy=3))
    members = [trajectory.member for trajectory in group.trajectories]
    assert len(members) == 2 and members == sorted(members) and set(members) <= set(range(5))
    assert (group.dropped, group.errors) == (0, ())


@pytest.mark.parametrize(
    ("tag", "message"),
    [("CrashOnce", "raised RuntimeError: the floor gave way"), ("HangOnce", "took longer than step_timeout=1s")],
)
def test_a_fault_that_passes_costs_one_more_attempt(tag, message, orders, play):
    (orders / tag.removesuffix("Once").lower()).touch()
    (group,) = play(GroupSpec(4, tag, 0, 3))
    assert [t.member for t in group.trajectories] == [0, 1, 2]
    assert all(t.success and len(t.turns) == 3 for t in group.trajectories)
    assert group.dropped == 0
    (error,) = group.errors
    assert f"environment step {message}" in error


def test_scripted_groups_solve_their_boards_without_the_engine(play):
    (group,) = play(GroupSpec(0, "Step", 5, group_size=6, player=ScriptedPlay(expert_share=1.0)))
    assert all(t.success and t.end is EpisodeEnd.TERMINATED for t in group.trajectories)
    assert {turn.completion.weight_version for t in group.trajectories for turn in t.turns} == {-1}


def test_groups_of_a_worker_that_died_are_played_again_alike(clusters, context, orders, play):
    envs, infer = clusters
    recovered: list[BaseException] = []

    def recover(error: BaseException) -> None:
        recovered.append(error)
        envs.restart(0)
        envs.call("setup", context)
        envs.call("set_engines", infer.handles)

    plan = GroupPlan(("Step", "KillOnce"), (2, 1), group_size=2, redundancy=0, seed=0, name="train")
    undisturbed = [play(plan.spec(n))[0] for n in range(6)]
    (orders / "kill").touch()
    groups = RolloutScheduler(plan, envs, recover, rpc_timeout=60.0).collect(6)
    assert len(recovered) == 1
    assert [group.group_id for group in groups] == list(range(6))
    assert [tokens(group) for group in groups] == [tokens(group) for group in undisturbed]


def test_a_batch_travels_through_the_object_store_without_a_copy(clusters):
    @ray.remote(num_cpus=0)
    def look(refs: list[ray.ObjectRef]) -> tuple[bool, int, int]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return _share_memory(*refs), int(ray.get(refs[0]).tokens_T.sum()), len(ray.get(refs[0]).split(2)[0])

    lengths = torch.full((4000,), 250)
    mask, logprobs = torch.ones(1_000_000, dtype=torch.bool), -torch.rand(1_000_000)
    batch = Batch(lengths, torch.arange(1_000_000), mask, rollout_logprobs_T=logprobs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ref = ray.put(batch)
        assert _share_memory(ref)
    assert torch.equal(ray.get(ref).tokens_T, batch.tokens_T)
    assert ray.get(look.remote([ref])) == (True, 499_999_500_000, 2000)


def _share_memory(ref: ray.ObjectRef) -> bool:
    """Whether what two readers get is the same piece of memory: the store's own. Of what is not sent in fewer bytes."""
    first, second = ray.get(ref), ray.get(ref)
    return bool(first.rollout_logprobs_T.data_ptr() == second.rollout_logprobs_T.data_ptr())
