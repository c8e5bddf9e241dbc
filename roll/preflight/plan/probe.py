"""Prints the rates of one core: operations per second of float32 products, bytes per second of a copy.

A program of its own, since the number of threads that NumPy works with is settled when it is imported.
"""

from __future__ import annotations

import os
import time

SECONDS = 0.25
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def rates() -> tuple[float, float]:
    """The fastest of what was tried in ``SECONDS``."""
    import numpy as np

    size, best_product, best_copy = 512, float("inf"), float("inf")
    matrix = np.ones((size, size), dtype=np.float32)
    block = np.ones(2**23, dtype=np.float32)
    target = np.empty_like(block)
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        matrix @ matrix
        middle = time.perf_counter()
        target[:] = block
        best_product = min(best_product, middle - start)
        best_copy = min(best_copy, time.perf_counter() - middle)
    return 2 * size**3 / best_product, 2 * block.nbytes / best_copy


if __name__ == "__main__":
    os.environ |= dict.fromkeys(THREADS, "1")
    print(*rates())
