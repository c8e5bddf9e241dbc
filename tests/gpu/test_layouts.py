"""The parity suite's layouts on GPUs: those of one process on one, the others wherever there are enough.

GPU kernels add up in another order than a CPU's, and some matrix products round to TF32: the bounds are wider.
"""

from pathlib import Path

import pytest
import torch

from roll.configs.engines import packages
from tests.support.harness import MEASURES, Figures, Layout, as_row, measure
from tests.support.layouts_deepspeed import LAYOUTS as DEEPSPEED
from tests.support.layouts_deepspeed import zero
from tests.support.layouts_fsdp2 import LAYOUTS as FSDP2
from tests.support.layouts_megatron import LAYOUTS as MEGATRON

PACKAGES = packages()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")]
BF16 = {"model_args": {"dtype": "bf16"}}
ALONE = [
    Layout(f"alone-zero{stage}{'-bf16' if options else ''}", "deepspeed_train", 1, zero(stage), **options)
    for stage in range(4)
    for options in ({}, BF16)
]
"""DeepSpeed's own rows all have several processes."""
GROUPED = Layout("alone-moe-bf16", "megatron_train", 1, model="qwen3_moe", bounds={"weights": 2**-7}, **BF16)
"""With TransformerEngine, one product for all experts."""
LAYOUTS = [*ALONE, *FSDP2, *DEEPSPEED, *MEGATRON, GROUPED]
FP32_BOUND = 2e-4


@pytest.fixture(scope="session")
def figures() -> dict[str, Figures]:
    return {}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(row, marks=pytest.mark.xdist_group(f"{row.strategy}-{row.world_size}"), id=row.id)
        for row in LAYOUTS
    ],
)
def test_layout_on_gpus(layout, figures, tmp_path_factory):
    package = PACKAGES.get(layout.strategy)
    if package is not None and not package.installed:
        pytest.skip(f"{package.module} is not installed (extra {package.extra})")
    if layout.world_size > torch.cuda.device_count():
        pytest.skip(f"needs {layout.world_size} GPUs, there are {torch.cuda.device_count()}")
    if layout.id not in figures:
        members = [m for m in LAYOUTS if (m.strategy, m.world_size) == (layout.strategy, layout.world_size)]
        figures |= measure(members, Path(tmp_path_factory.mktemp("gpus")), on_gpus=True)
    found = figures[layout.id]
    assert not found.error, found.error
    for name in MEASURES:
        assert getattr(found, name) <= max(FP32_BOUND, layout.bound(name)), f"{name}: {as_row(found)}"
