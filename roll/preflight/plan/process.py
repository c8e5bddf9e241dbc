"""Memory of a run's processes beside what they hold of a model; ``benchmarks/plan_memory.py`` measures it on a CPU."""

PROCESS_BYTES = 480 * 2**20
"""Resident memory of a worker that has imported Ray, PyTorch and Transformers and computed something, on a CPU."""
HEAP_SHARES, HEAP_BYTES = {"train": 0.6, "logprobs": 0.3}, 256 * 2**20
"""Freed memory that the C library keeps and what libraries take beside PyTorch, in parts of what a phase uses, and at
most (``roll.utils.memory.KEPT_BYTES``). The shares are fitted to measurements."""
LIGHT_BYTES = 350 * 2**20
"""Of a worker without a model: environments, rewards; and of Ray's own processes, each. An estimate."""
CONTEXT_BYTES = 700 * 2**20
"""Device memory of a CUDA context with the libraries of PyTorch. An estimate."""
