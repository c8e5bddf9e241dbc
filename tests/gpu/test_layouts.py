"""The parity suite's layouts on GPUs: those of one process on one, the others wherever there are enough.

GPU kernels add up in another order than a CPU's, and some matrix products round to TF32: the bounds are wider.
"""

from dataclasses import replace

import pytest
import torch

from tests.support.harness import Layout, Measured, check
from tests.support.layouts_deepspeed import LAYOUTS as DEEPSPEED
from tests.support.layouts_deepspeed import zero
from tests.support.layouts_fsdp2 import LAYOUTS as FSDP2
from tests.support.layouts_megatron import LAYOUTS as MEGATRON

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
LAYOUTS = [replace(each, slow=False) for each in (*ALONE, *FSDP2, *DEEPSPEED, *MEGATRON, GROUPED)]
FP32_BOUND = 2e-4


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return Measured(LAYOUTS, tmp_path_factory, on_gpus=True)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(row, marks=pytest.mark.xdist_group(f"{row.strategy}-{row.world_size}"), id=row.id)
        for row in LAYOUTS
    ],
)
def test_layout_on_gpus(layout, measured):
    if layout.world_size > torch.cuda.device_count():
        pytest.skip(f"needs {layout.world_size} GPUs, there are {torch.cuda.device_count()}")
    check(layout, measured.of(layout), FP32_BOUND)
