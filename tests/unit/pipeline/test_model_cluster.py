"""How a batch is spread over the ranks of a model role and how its results come back together.

The ranks run in this process, behind the same pickling as over Ray; real clusters: ``tests/integration``.
"""

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll.algorithms.correction import mismatch_by_lag, mismatch_metrics
from roll.algorithms.selection import select_for_policy
from roll.algorithms.shaping import with_old_policy
from roll.algorithms.types import LossFn, TokenScores
from roll.configs.algorithm import AlgorithmConfig
from roll.configs.offline import SFTConfig
from roll.configs.worker import WorkerConfig
from roll.data.batch import Batch
from roll.distributed.strategy.base import Metrics, RankInfo, StrategyContext
from roll.models.tiny import make_tiny_model
from roll.pipeline.model_cluster import ModelCluster, plan_optimizer_steps, rows_trained_later
from roll.pipeline.roles import Roles
from roll.pipeline.workers import TrainWorker

WORKER = WorkerConfig(strategy_args={"strategy_name": f"{__name__}:EchoStrategy"})


class EchoStrategy:
    """Scores a token by its id, and writes down what it is given to train on.

    ``copies`` ranks next to each other share a ``dp_rank``, as the parts of one split model do; only the first of them
    tells the truth, as nobody should read the others.
    """

    copies = 1
    scores_values = False

    def __init__(self, context: StrategyContext) -> None:
        self.context = context
        self.trained: list[list[int]] = []
        self.scored: list[int] = []

    def setup(self) -> RankInfo:
        rank, world_size = self.context.rank, self.context.world_size
        return RankInfo(rank, world_size, rank // self.copies, world_size // self.copies)

    def logprobs(self, batch: Batch) -> TokenScores:
        assert batch.group_B is not None
        self.scored = batch.group_B.tolist()
        scale = 1.0 if self.context.rank % self.copies == 0 else float("nan")
        scores = batch.tokens_T * scale
        return TokenScores(values_T=scores) if self.scores_values else TokenScores(-scores, scores / 2)

    def train_step(self, batch: Batch, loss_fn: LossFn) -> Metrics:
        assert batch.group_B is not None
        assert batch.tokens_T.tolist() == [
            10 * group + position
            for group, length in zip(batch.group_B.tolist(), batch.lengths_B.tolist(), strict=True)
            for position in range(length)
        ]
        self.trained.append(batch.group_B.tolist())
        return {"steps": float(len(self.trained)), "rows_max": float(batch.num_sequences)}


class Ref(int):
    """Stands in for ``ray.ObjectRef``."""


class InProcessCluster:
    """Stands in for ``Cluster``: the same calls, in this process, one after the other."""

    name = "actor_train"

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.workers = [TrainWorker("actor_train", rank, world_size, {}) for rank in range(world_size)]
        self.received: list[int] = []
        """Tokens that the last call sent to each rank."""

    def rendezvous(self) -> None: ...

    def submit_each(self, method: str, per_rank_args: Sequence[tuple[Any, ...]]) -> list[Any]:
        assert len(per_rank_args) == self.world_size
        given = [[ray.get([arg])[0] if type(arg) is Ref else arg for arg in args] for args in per_rank_args]
        self.received = [arg.num_tokens for args in given for arg in args if isinstance(arg, Batch)]
        return [
            pickle.loads(pickle.dumps(getattr(worker, method)(*pickle.loads(pickle.dumps(args)))))
            for worker, args in zip(self.workers, given, strict=True)
        ]

    def gather(self, refs: list[Any], *, call: str) -> list[Any]:
        return refs


def make_model(world_size: int, *, copies: int = 1, values: bool = False) -> tuple[ModelCluster, list[EchoStrategy]]:
    EchoStrategy.copies, EchoStrategy.scores_values = copies, values
    cluster = InProcessCluster(world_size)
    model = ModelCluster(cluster)
    model.setup(StrategyContext(WORKER, "actor_train", ""))
    for worker in cluster.workers:
        worker.set_loss(lambda: lambda *_: None)
    return model, [worker.strategy for worker in cluster.workers]


@pytest.fixture(autouse=True, scope="module")
def workers_without_an_object_store_who_leave_the_collector_alone() -> Iterator[None]:
    """They would look at all that the tests before have left in this process, which takes a second each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("roll.pipeline.workers.freeze_startup_objects", lambda: None)
        store: list[Any] = []
        patch.setattr(ray, "put", lambda value: store.append(value) or Ref(len(store) - 1))
        patch.setattr(ray, "get", lambda refs: [store[ref] for ref in refs])
        yield


def make_batch(lengths: Sequence[int]) -> Batch:
    """Sequence g holds the tokens 10 g, 10 g + 1, …"""
    lengths_B = torch.tensor(lengths, dtype=torch.int64)
    rows = range(len(lengths))
    tokens = torch.tensor([10 * row + i for row in rows for i in range(lengths[row])], dtype=torch.int64)
    return Batch(lengths_B, tokens, tokens > 0, group_B=torch.arange(len(lengths)))


def test_of_maxima_the_greatest_of_all_ranks_counts():
    model, _ = make_model(3)
    history = model.train(make_batch([1, 1, 1, 1]), [torch.tensor([0, 1, 2, 3]), torch.tensor([0])])
    assert history == [{"steps": 1.0, "rows_max": 2.0}, {"steps": 2.0, "rows_max": 1.0}]


lengths_strategy = st.lists(st.integers(1, 10), min_size=1, max_size=12)


@given(lengths_strategy, st.integers(1, 5), st.integers(1, 3), st.booleans(), st.data())
def test_scores_of_the_rows_that_are_asked_for_come_back_in_the_order_of_the_batch(
    lengths, dp_size, copies, values, data
):
    batch, every = make_batch(lengths), range(len(lengths))
    rows = data.draw(st.none() | st.sets(st.sampled_from(every), min_size=1).map(sorted))
    model, strategies = make_model(dp_size * copies, copies=copies, values=values)
    assert (model.size, model.dp_size) == (dp_size * copies, dp_size)
    scores = model.logprobs(batch) if rows is None else model.submit_logprobs(batch, torch.tensor(rows))()
    expected_T = batch.tokens_T.float() * torch.isin(batch.rows_T, torch.tensor(rows or every))
    if values:
        assert scores.logprobs_T is None and scores.entropy_T is None and scores.values_T is not None
        assert torch.equal(scores.values_T, expected_T)
    else:
        assert scores.values_T is None and scores.logprobs_T is not None and scores.entropy_T is not None
        assert torch.equal(scores.logprobs_T, -expected_T)
        assert torch.equal(scores.entropy_T, expected_T / 2)
    shares = [strategy.scored for strategy in strategies]
    assert all(shares[rank] == shares[rank - rank % copies] for rank in range(model.size))
    assert sorted(row for share in shares[::copies] for row in share) == list(rows or every)


def test_the_mismatch_of_rows_and_its_metrics_do_not_depend_on_the_layout():
    batch = make_batch([7, 100, 3, 1, 50, 9])
    batch = batch.replace(rollout_logprobs_T=-batch.tokens_T.float() + torch.sin(batch.tokens_T * 1.7))
    expected = mismatch_metrics(batch.replace(old_logprobs_T=-batch.tokens_T.float()))
    for num_ranks in (1, 2, 4):
        model, _ = make_model(num_ranks)
        scored = model.store(batch)
        scores = model.logprobs(scored)
        assert scores.mismatch_BVK is not None
        scored = scored.replace(old_logprobs_T=scores.as_they_are["logprobs_T"], mismatch_BVK=scores.mismatch_BVK)
        assert mismatch_metrics(pickle.loads(pickle.dumps(scored))) == expected
    assert expected["mismatch/logprob_diff_mean"] > 0.5


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("level", ["token", "segment", "geometric", "sequence"])
def test_weights_rejections_and_the_distance_by_age_come_from_ranks_and_the_driver_reads_no_log_prob(level, normalised):
    batch = make_batch([7, 100, 3, 1, 50, 9])
    batch = batch.replace(
        rollout_logprobs_T=-batch.tokens_T.float() + torch.sin(batch.tokens_T * 1.7),
        rollout_versions_T=3 + (batch.positions_T >= 5).long() + (batch.positions_T >= 30).long(),
        turn_T=batch.positions_T // 20,
        advantages_T=torch.ones(batch.num_tokens),
    )
    is_weight = {"enabled": True, "weight_type": level, "batch_normalize": normalised}
    low, high = (0.9, 1.1) if level == "geometric" else (0.8, 1.2) if level == "segment" else (0.4, 1.6)
    bounds = {"enabled": True, "agg_type": level, "ratio_low": low, "ratio_high": high, "whole_rows": normalised}
    config = AlgorithmConfig(train_infer_correction={"is_weight": is_weight, "filters": [bounds]})
    correction, parts = config.train_infer_correction, config.parts
    whole = batch.replace(old_logprobs_T=-batch.tokens_T.float())
    expected, weighed = mismatch_by_lag(whole, 5, parts.correction), select_for_policy(whole, parts, 0)
    assert len(expected) == 12 and 0 < weighed[1]["mismatch/is_weight_capped_frac"] < 1
    assert 0 < weighed[1]["mismatch/rejected_frac"] < 1
    for num_ranks in (1, 2, 4):
        model, _ = make_model(num_ranks)
        model.compare(correction, by_age=True)
        stored = pickle.loads(pickle.dumps(model.store(batch)))
        scores = model.logprobs(stored).as_they_are
        names = ("mismatch_BVK", "importance_T", "rejected_T")
        scored = stored.replace(old_logprobs_T=scores["logprobs_T"], **{name: scores[name] for name in names})
        found, metrics = select_for_policy(scored, parts, 0)
        assert mismatch_by_lag(scored, 5, parts.correction) == pytest.approx(expected, rel=1e-12)
        assert mismatch_metrics(scored) == pytest.approx(mismatch_metrics(whole), rel=1e-12)
        assert metrics == pytest.approx(weighed[1], rel=1e-6)
        for name in ("old_logprobs_T", "rollout_logprobs_T", "weights_T"):
            assert "value" not in vars(vars(found)[name]), name
        assert torch.equal(found.loss_mask_T, weighed[0].loss_mask_T)
        on_policy_B = torch.arange(batch.num_sequences) == 2  # as if nobody had scored it
        known, without = (with_old_policy(each.replace(on_policy_B=on_policy_B)) for each in (scored, whole))
        for measure in (mismatch_metrics, lambda rows: mismatch_by_lag(rows, 5, parts.correction)):
            assert measure(known) == pytest.approx(measure(without), rel=1e-12)
        assert all("value" not in vars(vars(known)[name]) for name in ("old_logprobs_T", "rollout_logprobs_T"))
        # Rounded to float32 once more before a division by the mean.
        torch.testing.assert_close(found.weights_T, weighed[0].weights_T, rtol=2**-23 if normalised else 0, atol=0)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 4))
def test_rows_of_the_first_optimizer_step_alone_are_not_trained_later(num_rows, steps, epochs):
    first, *later = plan_optimizer_steps(num_rows, steps, epochs, seed=0)
    found = rows_trained_later([first, *later]).tolist()
    assert found == sorted({row for rows in later for row in rows.tolist()})
    assert len(found) == (num_rows if epochs > 1 else num_rows - len(first))


@given(lengths_strategy, st.integers(1, 5), st.integers(1, 2), st.integers(1, 6), st.integers(1, 2))
def test_each_optimizer_step_reaches_the_ranks_in_disjoint_shares(lengths, dp_size, copies, steps_per_epoch, epochs):
    model, strategies = make_model(dp_size * copies, copies=copies)
    batch = model.store(make_batch(lengths))
    steps = plan_optimizer_steps(len(lengths), steps_per_epoch, epochs, seed=0)
    history = model.train(batch, steps)
    assert [each["steps"] for each in history] == [float(number) for number in range(1, len(steps) + 1)]
    for strategy in strategies:
        # Ranks without rows take part as well: a step is a collective act.
        assert len(strategy.trained) == len(steps)
    for number, rows in enumerate(steps):
        shares = [strategy.trained[number] for strategy in strategies]
        assert all(shares[rank] == shares[rank - rank % copies] for rank in range(model.size))
        assert sorted(row for share in shares[::copies] for row in share) == sorted(rows.tolist())


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 4), st.integers(0, 3))
def test_every_epoch_sees_every_row_once_in_steps_of_nearly_equal_size(num_rows, steps_per_epoch, epochs, seed):
    steps = plan_optimizer_steps(num_rows, steps_per_epoch, epochs, seed)
    per_epoch = min(num_rows, steps_per_epoch)
    assert len(steps) == per_epoch * epochs
    for epoch in range(epochs):
        part = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert Counter(row for rows in part for row in rows.tolist()) == Counter(range(num_rows))
        sizes = [len(rows) for rows in part]
        assert not sizes or max(sizes) - min(sizes) <= 1


def test_epochs_are_shuffled_anew_and_the_seed_repeats_them():
    def orders(seed: int) -> list[list[int]]:
        return [rows.tolist() for rows in plan_optimizer_steps(50, 1, 3, seed)]

    first = orders(1)
    assert len({tuple(order) for order in first}) == 3
    assert orders(1) == first
    assert orders(2) != first
    state = torch.random.get_rng_state()
    orders(1)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_rank_gets_only_the_rows_that_it_trains_on():
    """What travels is its share, once, however many epochs there are."""
    model, _ = make_model(4)
    steps: list[Tensor] = [torch.arange(8)] * 3
    model.train(make_batch([5] * 8), steps)
    assert model.cluster.received == [10] * 4


@pytest.mark.parametrize(("shares_of", "rows"), [("tokens", [2, 3]), ("work", [1, 4])])
def test_ranks_get_equal_shares_of_what_balance_ranks_by_names(shares_of, rows, tmp_path, monkeypatch):
    monkeypatch.setattr("roll.pipeline.roles.OffloadManager", lambda _: None)  # all is on the devices
    make_tiny_model(tmp_path, seed=0, num_heads=2)
    EchoStrategy.copies, EchoStrategy.scores_values = 1, False
    cluster = InProcessCluster(2)
    trained = {"data_args": {"file_name": "a"}, "device_mapping": [0]}
    config = SFTConfig(balance_ranks_by=shares_of, max_steps=1, actor_train=trained)
    roles = Roles(config, {"actor_train": cluster})
    roles.actor.setup(StrategyContext(WORKER, "actor_train", str(tmp_path)))
    roles.actor.logprobs(make_batch([800, 400, 400, 400, 400]))
    scored = [each.strategy.scored for each in cluster.workers]
    assert sorted(map(len, scored)) == rows
