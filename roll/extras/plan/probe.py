"""Prints the rates of one core, a line for each try: operations per second of float32 products, bytes per second of a
copy.

Time is that of the processor, which other programs on a busy machine do not add to. A program of its own, since the
number of threads that NumPy works with is settled when it is imported.
"""

from __future__ import annotations

import os
import time

TRIES, SECONDS = 5, 0.08
"""Seconds of the processor that a try takes."""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def rates() -> list[tuple[float, float]]:
    """The fastest product and copy of each try."""
    import numpy as np

    size = 512
    matrix = np.ones((size, size), dtype=np.float32)
    block = np.ones(2**23, dtype=np.float32)
    target = np.ones_like(block)
    found = []
    for _ in range(TRIES):
        best_product = best_copy = float("inf")
        end = time.thread_time() + SECONDS
        while time.thread_time() < end:
            start = time.thread_time()
            matrix @ matrix
            middle = time.thread_time()
            target[:] = block
            best_product = min(best_product, middle - start)
            best_copy = min(best_copy, time.thread_time() - middle)
        found.append((2 * size**3 / best_product, 2 * block.nbytes / best_copy))
    return found


if __name__ == "__main__":
    os.environ |= dict.fromkeys(THREADS, "1")
    for flops, bandwidth in rates():
        print(flops, bandwidth)
