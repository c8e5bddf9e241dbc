"""No rank has more of a model in memory than its part and a tensor, when it loads or exports."""

import pytest

from benchmarks.large_models import MIB, report, write_model
from tests.support.choice import needs

ROOM = 40 * MIB
"""For what a process makes once, and tensors that wait to be written."""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed", "megatron"])
def test_a_rank_has_its_part_of_a_frozen_model_and_one_tensor(tmp_path, engine):
    needs(f"{engine}_train")
    write_model(tmp_path / "tiny", 1e6)
    write_model(tmp_path / "model", 6e7)
    rows = report(engine, tmp_path, 2, trains=False)
    over = {row["phase"]: row["over"] // MIB for row in rows if "over" in row}
    assert max(over.values()) * MIB < ROOM, over
