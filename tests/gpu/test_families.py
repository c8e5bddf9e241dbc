"""Model families on one GPU: the steps of the parity suite, packed rows in bf16, pictures, and greedy tokens.

Bounds are wider than on a CPU: kernels add up in another order. In bf16, packing may not make the error much larger
than it is without.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.parity import test_families as families
from tests.parity import test_pictures as pictures
from tests.support.harness import VOCABULARY, Figures, Layout, as_row, measure, record
from tests.support.known_families import KNOWN, make_known

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")]
served = families.served
PICTURES = "_pictures"
"""End of the names of families that are shown pictures."""
GROUPS = 4
"""Processes that share the rows, each with a start of its own."""
FP32_BOUNDS = {name: max(2e-4, 10 * bound) for name, bound in families.BOUNDS.items()}


def layouts_of(name: str) -> list[Layout]:
    """Each row alone and packed, in float32 and in bf16."""
    family = name.removesuffix(PICTURES)
    if name == family:
        rows = [families.row(family, "fsdp2_train", variant) for variant in ("whole", "packed")]
    else:
        rows = [pictures.row(family, "fsdp2_train", variant) for variant in ("whole", "packed")]
        rows = [replace(row, name=f"{name}-{row.name}", model=name) for row in rows]
    return [*rows, *map(in_bf16, rows)]


def in_bf16(row: Layout) -> Layout:
    return replace(row, name=f"{row.name}-bf16", model_args=row.model_args | {"dtype": "bf16"}, saved=False)


NAMES = [*KNOWN, *(f"{family}{PICTURES}" for family in pictures.FAMILIES)]


@pytest.fixture(scope="session")
def figures() -> dict[str, Figures]:
    return {}


def measured(family: str, figures: dict[str, Figures], folder: Path) -> list[Figures]:
    """Figures of ``layouts_of`` a family; all of its group are measured in one process."""
    layouts = layouts_of(family)
    if layouts[0].id not in figures:
        group = NAMES[NAMES.index(family) % GROUPS :: GROUPS]
        for name in group:
            if name in KNOWN:
                make_known(folder / name, name, VOCABULARY)
            else:
                pictures.make_model(folder / name, name.removesuffix(PICTURES))
        figures |= measure([layout for name in group for layout in layouts_of(name)], folder, on_gpus=True)
    return [figures[layout.id] for layout in layouts]


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.xdist_group(f"families-{i % GROUPS}")) for i, name in enumerate(NAMES)],
)
def test_a_trainer_takes_the_same_steps(family, figures, tmp_path_factory):
    found = measured(family, figures, Path(tmp_path_factory.mktemp("families")))
    for layout, each in zip(layouts_of(family), found, strict=True):
        record("gpu", {"layout": layout.id} | as_row(each))
    whole, packed, whole_bf16, packed_bf16 = found
    refused = "use_sequence_packing: true, expected false"
    for each in (whole, packed):
        if each is packed and refused in each.error:
            continue
        assert not each.error, each.error
        for name, bound in FP32_BOUNDS.items():
            assert getattr(each, name) <= bound, f"{name}: {as_row(each)}"
    assert not whole_bf16.error, whole_bf16.error
    if refused not in packed_bf16.error:
        assert not packed_bf16.error, packed_bf16.error
        assert packed_bf16.logprobs <= 2 * whole_bf16.logprobs + 0.02, (as_row(whole_bf16), as_row(packed_bf16))


@pytest.mark.parametrize("family", KNOWN)
def test_hf_infer_generates_as_the_unmodified_model(served, family):
    assert families.generated(*served(family, "hf_infer")) <= FP32_BOUNDS["logprobs"]
