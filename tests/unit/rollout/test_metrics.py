"""How old a step's rollouts are, against loops over its tokens."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.rollout.admission import Admission
from roll.rollout.metrics import overlap_metrics
from tests.support.algorithms_batches import random_episodes, rows_of, to_batch
from tests.support.examples import examples


@examples(60)
@given(seed=st.integers(0, 2**32 - 1), history=st.booleans())
def test_lags_are_those_of_the_oldest_token_of_each_group_and_of_all_tokens(seed: int, history: bool) -> None:
    batch = to_batch(random_episodes(seed, empty_masks=False), history, seed)
    if not batch.loss_mask_T.any():
        return
    version, rng = 7, np.random.default_rng(seed)
    rows = rows_of(batch, batch.loss_mask_T)
    versions = [0] * batch.num_tokens
    for row in rows:  # weights come in the middle of rows
        for token, sampled_by in zip(row, sorted(rng.integers(4, version + 1, len(row))), strict=True):
            versions[token] = int(sampled_by)
    batch = batch.replace(rollout_versions_T=torch.tensor(versions))
    admission = Admission(4, ready={1, 2, 3}, running={5})

    metrics = overlap_metrics(batch, admission, version)

    groups: defaultdict[int, list[int]] = defaultdict(list)
    assert batch.group_B is not None
    for row, group in zip(rows, batch.group_B.tolist(), strict=True):
        groups[group] += [version - versions[token] for token in row]
    oldest = [max(lags) for lags in groups.values() if lags]
    every = [lag for lags in groups.values() for lag in lags]
    expected = {
        "async/lag_mean": sum(oldest) / len(oldest),
        "async/lag_max": max(oldest),
        "async/token_lag": sum(every) / len(every),
        "async/mixed": sum(len({versions[token] for token in row}) > 1 for row in rows) / len(rows),
        "async/buffer_groups": 3,
        "async/running_groups": 1,
    }
    expected |= {f"async/lag_{lag}": every.count(lag) / len(every) for lag in range(max(every) + 1)}
    assert metrics == pytest.approx(expected)
