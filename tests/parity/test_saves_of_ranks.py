"""Four ranks fit together while they save, in the background too, and load; `test_parity.py` compares all else."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from roll.configs.engines import packages
from roll.distributed.strategy import STRATEGIES
from tests.parity.test_parity import LAYOUTS
from tests.support.collectives import compare, counts, read, recording
from tests.support.harness import TASKS, Layout, make_context, make_model
from tests.support.ranks import enter_rank, run_ranks

NAMES = {
    "fsdp2_train": ("hsdp2x2", "shard2-tp2"),
    "deepspeed_train": ("zero1-ranks4", "zero3-ranks4-ulysses2"),
    "megatron_train": ("dp2-tp2-sp", "tp2-sp-ep2", "tp2-sp-pp2-lora"),
}


def save_and_load(rank: int, port: int, layouts: list[Layout], folder: Path) -> None:
    enter_rank(port)
    with recording(folder / f"entered-{rank}.jsonl") as recorder:
        for layout in layouts:
            trainer: Any = STRATEGIES.get(layout.strategy)(make_context(layout, folder / layout.model, rank))
            info, task, out = trainer.setup(), TASKS[layout.task], folder / layout.id
            batch = task.batch(0)
            share = batch.select(batch.split(info.dp_size)[info.dp_rank])
            recorder.part = layout.id
            trainer.train_step(share, task.loss)
            trainer.save(out / "first")
            saving = trainer.start_save(out / "second")
            trainer.train_step(share, task.loss)
            saving.result()
            trainer.save_model(out / "model")
            dist.barrier()  # all files are there
            trainer.load(out / "first")
            trainer.train_step(share, task.loss)
        dist.barrier()
        os._exit(0)


@pytest.mark.slow  # four processes each
@pytest.mark.parametrize("strategy", NAMES)
def test_ranks_that_save_and_load_enter_the_same_collectives(tmp_path, strategy):
    package = packages().get(strategy)
    if package is not None and not package.installed:
        pytest.skip(f"{package.module} is not installed (extra {package.extra})")
    layouts = [each for each in LAYOUTS if each.strategy == strategy and each.name in NAMES[strategy]]
    for kind in {layout.model for layout in layouts}:
        make_model(tmp_path / kind, kind)
    run_ranks(save_and_load, 4, layouts, tmp_path)
    records = {rank: read(tmp_path / f"entered-{rank}.jsonl") for rank in range(4)}
    assert [problem.text for problem in compare(records)] == []
    assert all(counts(records)[layout.id]["messages"] for layout in layouts)
