"""An engine's parameters, gradients and moments in each of the ZeRO stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roll.distributed.strategy.base import States
from roll.distributed.strategy.deepspeed.weights import EngineWeights, Fragment
from roll.distributed.strategy.training.pieces import Region
from roll.distributed.strategy.training.snapshots import to_device
from roll.models.scoring import TokenScorer


class ReplicatedWeights(EngineWeights):
    """ZeRO stage 0: every rank holds everything."""

    def __init__(self, engine: Any, scorer: TokenScorer, device: torch.device) -> None:
        super().__init__(engine, scorer, device)
        self.copies = dist.get_world_size()

    def gradient(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad.view(-1)

    def drop_gradients(self) -> None:
        self.engine.zero_grad()

    def move(self, what: States, device: torch.device, *, away: bool) -> None:
        if States.WEIGHTS in what:
            self.scorer._apply(partial(to_device, device=device))
        if States.OPTIMIZER in what and self.trains:
            self._move_moments(device)

    def _fragment(self, parameter: nn.Parameter) -> Fragment:
        return Fragment(parameter, 0, 0, parameter.numel())


class PartitionedOptimizer(EngineWeights):
    """ZeRO stages 1 and 2: every rank holds all weights, and updates a part of them."""

    def gradient(self, name: str) -> Tensor:
        parameter: Any = self.parameters[name]
        found: Tensor = parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group).view(-1)
        fragment = self.fragments[name]
        # DeepSpeed's bf16 optimizer keeps the whole gradient.
        return found if found.numel() == fragment.size else found.narrow(0, fragment.offset, fragment.size)

    def move(self, what: States, device: torch.device, *, away: bool) -> None:
        super().move(what, device, away=away)
        if States.WEIGHTS in what:  # an adapter's base weights too: DeepSpeed moves what its optimizer has
            for parameter in self.parameters.values():
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(device, copy=True)

    def drop_gradients(self) -> None:
        optimizer = self.optimizer
        optimizer.zero_grad()
        if not hasattr(optimizer, "averaged_gradients"):  # the bf16 optimizer
            return
        optimizer.micro_step_id = -1
        for kept in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            kept.update(dict.fromkeys(kept))
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
            optimizer._offload_accumulated_param_ids = set()
            for partition in optimizer.single_partition_of_fp32_groups:
                partition.grad.zero_()

    def _fragment(self, parameter: Any) -> Fragment | None:
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        optimizer, index = self.optimizer, mapping.param_group_index
        partitions = getattr(optimizer, "single_partition_of_fp32_groups", None) or optimizer.fp32_groups_flat_partition
        address = mapping.get_hp_fragment_address()
        return Fragment(partitions[index], address.start, mapping.lp_fragment_address.start, address.numel)


class PartitionedWeights(EngineWeights):
    """ZeRO stage 3: every rank holds a part of each parameter."""

    def store(self, name: str, whole: Tensor) -> None:
        import deepspeed

        parameter = self.parameters[name]
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if dist.get_rank() == 0:
                parameter.detach().copy_(whole)

    def stored_regions(self, name: str) -> Sequence[Region]:
        size, whole = self._part(name).numel(), self.shape(name).numel()
        parts = {rank: min(size, whole - rank * size) for rank in range(dist.get_world_size())}
        return [Region((rank * size,), (valid,), (rank,)) for rank, valid in parts.items() if valid > 0]

    def stored_part(self, name: str) -> Tensor:
        part = self._part(name)
        return part.narrow(0, 0, min(part.numel(), self.shape(name).numel() - dist.get_rank() * part.numel()))

    def _part(self, name: str) -> Tensor:
        """This rank's part of a parameter; those of the last ranks are padded."""
        part: Tensor = self.parameters[name].ds_tensor  # type: ignore[attr-defined]
        return part.detach().view(-1)

    def gradient(self, name: str) -> Tensor:
        fragment, optimizer = self.fragments[name], self.optimizer
        if optimizer.offload_optimizer:
            assert fragment.partition.grad is not None
            return fragment.cut(fragment.partition.grad)
        group, position = self._positions[name]
        gradient: Tensor = optimizer.averaged_gradients[group][position]
        return gradient.view(-1).narrow(0, 0, fragment.size)

    def drop_gradients(self) -> None:
        optimizer = self.optimizer
        optimizer.zero_grad()
        optimizer.averaged_gradients = {}
        optimizer._offload_boundary_param_ids = set()
        if optimizer.offload_optimizer:
            optimizer.reset_cpu_buffers()
            for partition in optimizer.fp32_partitioned_groups_flat:
                partition.grad.zero_()

    def move(self, what: States, device: torch.device, *, away: bool) -> None:
        if self.trains and (buffers := what & self._movable):
            super().move(buffers, device, away=away)
        if States.WEIGHTS in what and not self._parameters_in_host_memory:
            self._move_parts(device)
        if States.OPTIMIZER in what and self.trains and not self.optimizer.offload_optimizer:
            self._move_moments(device)
            for partition in self.optimizer.fp32_partitioned_groups_flat:
                if not self._is_part_of_the_model(partition):
                    partition.data = to_device(partition.data, device)

    @property
    def _movable(self) -> States:
        """States left to DeepSpeed to move: it cannot move weights of which some are frozen, nor PyTorch's Adam."""
        return States(0) if self._parameters_in_host_memory else States.GRADS

    @property
    def _parameters_in_host_memory(self) -> bool:
        offload = self.engine.zero_offload_param()
        return offload is not None and offload.device != "none"

    def _move_parts(self, device: torch.device) -> None:
        """The ranks' parts of the parameters; those that are trained lie in one buffer, in the order of the groups."""
        optimizer = self.optimizer
        optimizer.empty_partition_cache()
        for parameter in self.parameters.values():
            if not (self.trains and parameter.requires_grad):
                part: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
                part.data = part.data.to(device, copy=True)
        if not self.trains:
            return
        buffer, offset = optimizer.lp_param_buffer, 0
        buffer.data = buffer.data.to(device, copy=True)
        for part in optimizer._get_parameter_partitions():
            part.data = buffer.narrow(0, offset, part.numel())
            offset += part.numel()
        optimizer.fp16_partitioned_groups_flat.clear()
        optimizer._set_fp16_partitioned_groups_flat()
        groups = optimizer.fp16_partitioned_groups_flat
        for master, group in zip(optimizer.fp32_partitioned_groups_flat, groups, strict=True):
            if self._is_part_of_the_model(master):
                master.data = group

    def _is_part_of_the_model(self, partition: Tensor) -> bool:
        """In fp32 the optimizer's weights are those that the model computes with, unless one of them is offloaded."""
        if self._parameters_in_host_memory or self.optimizer.offload_optimizer:
            return False
        return bool(partition.dtype == self.optimizer.lp_param_buffer.dtype)

    def locate(self) -> None:
        super().locate()
        if self.trains:
            names = {id(parameter): name for name, parameter in self.parameters.items()}
            groups = enumerate(self.optimizer.fp16_groups)
            self._positions = {names[id(p)]: (i, j) for i, group in groups for j, p in enumerate(group)}

    def _fragment(self, parameter: Any) -> Fragment | None:
        optimizer = self.optimizer
        group, start, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        offset = size * dist.get_rank()
        valid = min(size, parameter.ds_numel - offset)  # the last parts are padded
        return Fragment(optimizer.fp32_partitioned_groups_flat[group], start, offset, valid) if valid > 0 else None


WEIGHTS = (ReplicatedWeights, PartitionedOptimizer, PartitionedOptimizer, PartitionedWeights)
"""The view of an engine by its stage."""
