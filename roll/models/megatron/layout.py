"""Part of a model that one rank holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelLayout:
    """One rank's place, or that of one of its model chunks where pipeline stages are virtual.

    Example: the second of two stages of a four-layer model, first of two tensor-parallel ranks:
    ``ParallelLayout(layers=(2, 3), first_stage=False, tp_rank=0, tp_size=2)``.
    """

    layers: tuple[int, ...]
    """Whole-model number of each layer held, from 0, in order (a layer's ``layer_number`` counts from 1)."""
    first_stage: bool = True
    """Holds the embedding (the model's ``pre_process``)."""
    last_stage: bool = True
    """Holds the last normalisation and the output layer (the model's ``post_process``)."""
    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    """Experts are dealt out in blocks: rank r holds those from ``r * num_experts / ep_size``."""
    expert_tp_rank: int | None = None
    """Tensor parallelism within an expert; ``None``: as outside."""
    expert_tp_size: int | None = None

    def tensor_rank(self, *, expert: bool) -> tuple[int, int]:
        """Rank and size of the tensor-parallel group that shares a parameter."""
        if expert and self.expert_tp_size is not None and self.expert_tp_rank is not None:
            return self.expert_tp_rank, self.expert_tp_size
        return self.tp_rank, self.tp_size

    def experts(self, num_experts: int) -> range:
        """Whole-model numbers of the routed experts held."""
        held = num_experts // self.ep_size
        return range(self.ep_rank * held, (self.ep_rank + 1) * held)
