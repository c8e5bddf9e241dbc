"""Muon's orthogonalisation is its polynomial of the singular values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roll.distributed.strategy.fsdp2.muon import COEFFICIENTS, STEPS, orthogonalise


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6), (1, 4)])
def test_singular_values_go_through_the_quintic(shape: tuple[int, int]) -> None:
    """The iteration multiplies matrices; the oracle puts the values of an SVD into ``a s + b s³ + c s⁵`` in float64."""
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    left, values, right = np.linalg.svd(matrix.numpy(), full_matrices=False)
    values = values / np.linalg.norm(values)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        values = a * values + b * values**3 + c * values**5
    found = orthogonalise(matrix)
    np.testing.assert_allclose(found.numpy(), left @ np.diag(values) @ right, rtol=1e-9, atol=1e-12)
    assert found.is_contiguous() and values.min() > 0.6 and values.max() < 1.3
    assert torch.allclose(orthogonalise(matrix.bfloat16()).double(), found, atol=0.05)


def test_no_gradient_moves_nothing() -> None:
    assert torch.equal(orthogonalise(torch.zeros(3, 4)), torch.zeros(3, 4))
