"""How a role's trainers come together."""

from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from roll.distributed.strategy.training.trainer import join_group
from tests.support.harness import Layout, make_context


def test_ranks_wait_for_each_other_as_long_as_a_call_may_take(monkeypatch):
    given = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: given.append(args))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    context = make_context(Layout("two", "fsdp2_train", 2, {}), Path("model"), 0)
    object.__setattr__(context, "timeout", 77.0)
    join_group(context, alone=False)
    assert given == [("gloo", "tcp://127.0.0.1:1", timedelta(seconds=77))]
