"""Every trainer and layout takes the same steps as plain Hugging Face in float64; ranks that save fit together, too."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.collectives import compare, counts, read, recording
from tests.support.harness import (
    TASKS,
    Layout,
    Measured,
    as_row,
    cases,
    check,
    make_model,
    needs,
    record,
    share,
    started,
)
from tests.support.layouts_deepspeed import LAYOUTS as DEEPSPEED
from tests.support.layouts_fsdp2 import LAYOUTS as FSDP2
from tests.support.layouts_megatron import LAYOUTS as MEGATRON
from tests.support.ranks import run_ranks

LAYOUTS = [*FSDP2, *DEEPSPEED, *MEGATRON]


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return Measured(LAYOUTS, tmp_path_factory)


@pytest.mark.parametrize("layout", cases(LAYOUTS))
def test_parity(layout, measured):
    found = measured.of(layout)
    assert not found.error, found.error
    record("layout", asdict(layout) | as_row(found))
    check(layout, found)


SAVED = {
    "fsdp2_train": ("hsdp2x2", "shard2-tp2"),
    "deepspeed_train": ("zero1-ranks4", "zero3-ranks4-ulysses2"),
    "megatron_train": ("dp2-tp2-sp", "tp2-sp-ep2", "tp2-sp-pp2-lora"),
}


def save_and_load(rank: int, layouts: list[Layout], folder: Path) -> None:
    with recording(folder / f"entered-{rank}.jsonl") as recorder:
        for layout in layouts:
            trainer = started(layout, folder / layout.model, rank)
            task, out = TASKS[layout.task], folder / layout.id
            batch = share(trainer, task.batch(0))
            recorder.part = layout.id
            trainer.train_step(batch, task.loss)
            trainer.save(out / "first")
            saving = trainer.start_save(out / "second")
            trainer.train_step(batch, task.loss)
            saving.result()
            trainer.save_model(out / "model")
            dist.barrier()  # all files are there
            trainer.load(out / "first")
            trainer.train_step(batch, task.loss)


@pytest.mark.slow  # four processes each
@pytest.mark.parametrize("strategy", SAVED)
def test_ranks_that_save_and_load_enter_the_same_collectives(tmp_path, strategy):
    needs(strategy)
    layouts = [each for each in LAYOUTS if each.strategy == strategy and each.name in SAVED[strategy]]
    for kind in {layout.model for layout in layouts}:
        make_model(tmp_path / kind, kind)
    run_ranks(save_and_load, 4, layouts, tmp_path)
    records = {rank: read(tmp_path / f"entered-{rank}.jsonl") for rank in range(4)}
    assert [problem.text for problem in compare(records)] == []
    assert all(counts(records)[layout.id]["messages"] for layout in layouts)
