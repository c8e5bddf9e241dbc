"""Choice of experts in Megatron's routers: recorded and replayed.

Megatron asks ``TopKRouter.router_replay`` for the largest k of the scores. Which micro-batch a router works on is known
during its forward pass; where a layer is computed again in the backward pass, micro-batches come in the same order.

Axes: T tokens of a micro-batch, N of them on this rank, L layers with experts in the whole model, K experts of a token
in a layer, E = L x K.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roll.configs.engines.megatron import MegatronConfig
from roll.data.columns import UNKNOWN
from roll.data.packing import experts_of_cells
from roll.distributed.strategy.megatron.input import MegatronInput
from roll.distributed.strategy.megatron.model import MegatronModel
from roll.models.routing import STORED


class ExpertRouting:
    """The routers that this rank holds.

    Raises:
        ValueError: the model has no experts.
    """

    def __init__(self, model: MegatronModel, options: MegatronConfig) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        if not model.converted.num_experts:
            raise ValueError("router_replay: the model has no layers with experts; expected disable")
        self._cuts_tokens = options.sequence_parallel
        self.per_token: int = model.config.moe_router_topk
        numbers = [number for number, has in enumerate(_has_experts(model.config), 1) if has]
        self.num_layers = len(numbers)
        self.current: MegatronInput | None = None
        """Micro-batch of the forward pass that runs; ``None`` in a backward pass."""
        routers = [module for chunk in model.chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
        self._layers = {numbers.index(router.layer_number): router for router in routers}
        for layer, router in self._layers.items():
            router.router_replay = LayerRouting(self, layer)

    @contextlib.contextmanager
    def at(self, one: MegatronInput) -> Iterator[None]:
        """The forward pass of a micro-batch."""
        self.current = one
        try:
            yield
        finally:
            self.current = None

    def given(self, one: MegatronInput, layer: int) -> Tensor | None:
        """[N, K]: the experts that a micro-batch brings for this rank's tokens."""
        if one.micro_batch.experts_TE is None:
            return None
        columns = slice(layer * self.per_token, (layer + 1) * self.per_token)
        experts_TK = one.micro_batch.experts_TE[:, columns].to(one.place_T.device, torch.int64)
        return experts_of_cells(experts_TK, self._own(one), one.input_ids_RS.numel() // self._tensor_size)

    def told(self, one: MegatronInput) -> Tensor:
        """``STORED`` [T, E]: the experts that all ranks chose for the micro-batch (collective)."""
        from megatron.core import parallel_state

        own_T = self._own(one)
        shape = len(own_T), self.num_layers, self.per_token
        told_TLK = torch.full(shape, UNKNOWN, dtype=torch.int32, device=own_T.device)
        for layer, chosen_NK in one.chosen.items():
            told_TLK[own_T >= 0, layer] = chosen_NK[own_T[own_T >= 0]].int()
        groups = [parallel_state.get_context_parallel_group(), parallel_state.get_pipeline_model_parallel_group()]
        if self._cuts_tokens:
            groups.append(parallel_state.get_tensor_model_parallel_group())
        for group in groups:
            dist.all_reduce(told_TLK, dist.ReduceOp.MAX, group=group)
        return told_TLK.flatten(1).to(STORED)

    def _own(self, one: MegatronInput) -> Tensor:
        """int64 [T]: where each token lies among this rank's N; -1 elsewhere."""
        from megatron.core import parallel_state

        size = one.input_ids_RS.numel() // self._tensor_size
        first = size * parallel_state.get_tensor_model_parallel_rank() if self._cuts_tokens else 0
        here_T = (one.place_T >= first) & (one.place_T < first + size)
        return torch.where(here_T, one.place_T - first, -1)

    @property
    def _tensor_size(self) -> int:
        from megatron.core import parallel_state

        return parallel_state.get_tensor_model_parallel_world_size() if self._cuts_tokens else 1


class LayerRouting:
    """Answers of one router, in place of Megatron's ``RouterReplay``, which leaves no token to the router."""

    def __init__(self, routing: ExpertRouting, layer: int) -> None:
        self._routing, self._layer = routing, layer
        self._again: deque[MegatronInput] = deque()
        """Micro-batches that are computed again in their backward passes."""

    def get_replay_topk(
        self,
        scores_NX: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        find: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """The scores of the chosen experts, and these."""
        one = self._routing.current
        if one is None:
            one = self._again.popleft()
        elif one.trains and not torch.is_grad_enabled():
            self._again.append(one)
        _, chosen_NK = find(scores_NX, topk, num_groups=num_groups, group_topk=group_topk)
        given_NK = self._routing.given(one, self._layer)
        if given_NK is not None:
            chosen_NK = torch.where(given_NK == UNKNOWN, chosen_NK, given_NK)
        if not one.trains:
            one.chosen[self._layer] = chosen_NK
        return scores_NX.gather(1, chosen_NK), chosen_NK


def _has_experts(config: Any) -> list[bool]:
    """Whether each layer of the whole model has experts."""
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [number % frequency == 0 for number in range(config.num_layers)]
    return [bool(has) for has in frequency]
