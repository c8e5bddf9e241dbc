"""Routers of Transformers' mixtures of experts for the oracle of the parity tests: two experts in each layer."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from roll.data.batch import Batch
from tests.support.pictured import unmodified


@contextmanager
def given_experts(model: Any, one: Batch) -> Iterator[None]:
    """Routers that take the experts of a sequence as its batch has them."""
    if one.experts_TE is None or bool((one.experts_TE < 0).all()):
        yield
        return
    experts_TLK = one.experts_TE.long().view(one.num_tokens, -1, 2)

    def route(gate: Any, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.reshape(one.num_tokens, -1) @ gate.weight.T
        chosen = experts_TLK[:, layer]
        each = torch.arange(one.num_tokens)[:, None]
        if hasattr(gate, "e_score_correction_bias"):  # DeepSeek-V3's
            weights = logits.sigmoid()[each, chosen]
            return logits, gate.routed_scaling_factor * weights / (weights.sum(-1, keepdim=True) + 1e-20), chosen
        weights = logits.softmax(-1)[each, chosen]
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    gates = [block.gate for block in model.modules() if hasattr(block, "experts")]
    for number, gate in enumerate(gates):
        gate.forward = partial(route, gate, number)
    try:
        yield
    finally:
        for gate in gates:
            del gate.forward


@torch.no_grad()
def chosen_experts(model: Any, batch: Batch) -> Tensor | None:
    """The two experts of each token and layer that the model itself chooses, for a batch that brings others."""
    if batch.experts_TE is None:
        return None
    gates, found = [block.gate for block in model.modules() if hasattr(block, "experts")], []
    hooks = [
        gate.register_forward_hook(lambda _, __, result: found.append(result[2].sort(-1).values)) for gate in gates
    ]
    rows = []
    for row in range(batch.num_sequences):
        found.clear()
        model(**unmodified(batch.select([row]), model.config.model_type), use_cache=False)
        rows.append(torch.cat(found, dim=1))
    for hook in hooks:
        hook.remove()
    return torch.cat(rows)
