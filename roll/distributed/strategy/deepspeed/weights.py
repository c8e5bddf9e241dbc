"""A DeepSpeed engine's parameters, gradients and moments, for every ZeRO stage.

Each trained parameter has a ``Fragment`` on the ranks that update a part of it. A fragment lies in a flat float32
partition of the optimizer, which the optimizer's state is keyed by. DeepSpeed has helpers for whole tensors
(``safe_get_full_…``), but none that covers every stage, reads a state before the first step, or takes a parameter
whose size the ranks do not divide.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roll.distributed.strategy.base import States
from roll.distributed.strategy.training.checkpoint import to_device
from roll.distributed.strategy.training.exchange import ShardLayout, Slice, everywhere, find_regions
from roll.distributed.strategy.training.optim import ADAM_STATE, MASTER
from roll.models.scoring import TokenScorer

ENGINE_STATES = {
    States.WEIGHTS: ("lp_params",),
    States.GRADS: ("lp_grads", "contiguous_grad_buffer"),
    States.OPTIMIZER: ("hp_params", "optim_states"),
}
"""Our names for what can leave the device, and DeepSpeed's."""


@dataclass(frozen=True)
class Fragment:
    """The part of a parameter that this rank updates."""

    partition: Tensor
    """Flat float32 weights of many parameters; padding may hold anything."""
    start: int
    """Index in ``partition`` at which the part begins."""
    offset: int
    """Index in the flattened parameter at which it begins."""
    size: int

    def cut(self, tensor: Tensor) -> Tensor:
        """The part's view of a tensor shaped like ``partition``."""
        return tensor.detach().view(-1).narrow(0, self.start, self.size)


class EngineWeights(ABC):
    """A ``ModuleWeights``, as far as all stages are alike. ``fragments`` is empty without an optimizer."""

    copies = 1
    """Ranks that update the same part of a parameter, each in its own copy."""

    def __init__(self, engine: Any, scorer: TokenScorer, device: torch.device) -> None:
        self.engine = engine
        self.scorer = scorer
        self.device = device
        self.parameters: dict[str, nn.Parameter] = dict(scorer.named_parameters())
        self.trains = engine.basic_optimizer is not None
        self.trained = [name for name, p in self.parameters.items() if p.requires_grad and self.trains]
        """Names of the parameters that the optimizer changes."""
        self._away = States(0)
        self.locate()

    @property
    def optimizer(self) -> Any:
        """DeepSpeed's own, around the one that takes the steps."""
        return self.engine.optimizer

    @property
    def states(self) -> dict[Tensor, dict[str, Any]]:
        """Adam's state by partition."""
        states: dict[Tensor, dict[str, Any]] = self.engine.basic_optimizer.state
        return states

    def locate(self) -> None:
        """Finds the fragments; again after DeepSpeed has moved its buffers."""
        found = {name: self._fragment(self.parameters[name]) for name in self.trained}
        self.fragments = {name: fragment for name, fragment in found.items() if fragment is not None}

    def shape(self, name: str) -> torch.Size:
        parameter = self.parameters[name]
        shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
        return shape

    def kinds(self, name: str) -> Sequence[str]:
        return ADAM_STATE

    @abstractmethod
    def drop_gradients(self) -> None:
        """Forgets the gradients, wherever in an optimizer step the engine is."""

    @abstractmethod
    def gradient(self, name: str) -> Tensor:
        """The fragment's gradient after the last backward pass, summed up; writing to it changes the coming step."""

    @abstractmethod
    def _fragment(self, parameter: nn.Parameter) -> Fragment | None:
        """The part of a trained parameter that this rank updates, if it updates any."""

    def share(self, name: str) -> Tensor:
        """The fragment's float32 weights, a flat view."""
        return self._kept(self.fragments[name], MASTER)

    def gradients_changed(self) -> None:
        """Called when gradients were written to: with offload, DeepSpeed took their norms while it copied them."""
        optimizer = self.optimizer
        if getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
            for name in self.fragments:
                parameter = self.parameters[name]
                optimizer.norm_for_param_grads[optimizer.get_param_id(parameter)] = self.gradient(name).norm()

    def spread(self, name: str, kind: str, dtype: torch.dtype) -> ShardLayout:
        """Flat."""
        # What the model computes with may be as exact as the number format asks.
        stored = name not in self.trained or self.parameters[name].dtype in (dtype, torch.float32)
        return self._stored(name, dtype) if kind == MASTER and stored else self._optimized(name, kind, dtype)

    def places(self, name: str, kind: str) -> Sequence[ShardLayout]:
        found = [self._stored(name, torch.float32)] if kind == MASTER else []
        return [*found, self._optimized(name, kind, torch.float32)] if name in self.trained else found

    def _stored(self, name: str, dtype: torch.dtype) -> ShardLayout:
        """What the model computes with."""
        shape = (self.shape(name).numel(),)
        return ShardLayout(shape, dtype, self.device, self.stored_regions(name), lambda: self.stored_part(name))

    def _optimized(self, name: str, kind: str, dtype: torch.dtype) -> ShardLayout:
        """What the optimizer has."""
        shape, regions = (self.shape(name).numel(),), self._updated[name]
        return ShardLayout(shape, dtype, self.device, regions, lambda: self._kept(self.fragments[name], kind))

    def stored_regions(self, name: str) -> Sequence[Slice]:
        """Regions of the flat parameter that the model computes with, and the ranks that have them."""
        return everywhere((self.shape(name).numel(),))

    def stored_part(self, name: str) -> Tensor:
        """This rank's part of it, flat."""
        return self.parameters[name].detach().view(-1)

    @cached_property
    def _updated(self) -> dict[str, Sequence[Slice]]:
        """Regions of the flat parameters, and the ranks that update them."""
        return find_regions({name: ((f.offset,), (f.size,)) for name, f in self.fragments.items()})

    def leave(self, what: States) -> None:
        """Takes states to host memory."""
        self.move(what, torch.device("cpu"), away=True)

    def come_back(self, what: States) -> None:
        """Takes states back to the device."""
        self.move(what, self.device, away=False)

    def move(self, what: States, device: torch.device, *, away: bool) -> None:
        """Takes states to host memory, or back."""
        if away and not hasattr(self.optimizer, "offload_states"):
            raise ValueError("ZeRO stage 1 in bf16: its optimizer cannot leave the device; expected stage 2 or 3")
        self._away = self._away | what if away else self._away & ~what
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

        names = [name for state, names in ENGINE_STATES.items() if state in self._away for name in names]
        gone = {OffloadStateTypeEnum(name) for name in names}
        if away:
            self.engine.offload_states(include=gone)
            return
        # DeepSpeed brings back everything that it has noted as away.
        noted: set[OffloadStateTypeEnum] = self.optimizer.offloaded_states
        staying = noted & gone
        noted -= staying
        self.engine.reload_states()
        noted |= staying
        if not self._away:
            self.locate()

    def _move_moments(self, device: torch.device) -> None:
        for state in self.states.values():
            state.update({kind: to_device(state[kind], device) for kind in ADAM_STATE})

    def _kept(self, fragment: Fragment, kind: str) -> Tensor:
        """The fragment's weights or moment, a flat view."""
        partition = fragment.partition
        return fragment.cut(partition if kind == MASTER else self.states[partition][kind])

    def reset_moments(self) -> None:
        """Makes Adam's state as it is before the first step.

        It is allocated here, so that a lack of memory shows at setup and a fresh optimizer is saved like any other.
        """
        for partition in dict.fromkeys(fragment.partition for fragment in self.fragments.values()):
            moments = {kind: torch.zeros_like(partition, requires_grad=False) for kind in ADAM_STATE}
            self.states[partition] = {"step": self._steps(0, partition.device), **moments}

    def set_steps(self, steps: int) -> None:
        for partition, state in self.states.items():
            state["step"] = self._steps(steps, partition.device)

    def _steps(self, steps: int, device: torch.device) -> Any:
        is_torch = isinstance(self.engine.basic_optimizer, torch.optim.AdamW)
        return torch.tensor(float(steps), device=device) if is_torch else steps


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

    def places(self, name: str, kind: str) -> Sequence[ShardLayout]:
        if kind == MASTER:  # what is whole since a forward pass would stay as it was
            self.parameters[name].partition()  # type: ignore[attr-defined]
        return super().places(name, kind)

    def stored_regions(self, name: str) -> Sequence[Slice]:
        size, whole = self._part(name).numel(), self.shape(name).numel()
        parts = {rank: min(size, whole - rank * size) for rank in range(dist.get_world_size())}
        return [Slice((rank * size,), (valid,), (rank,)) for rank, valid in parts.items() if valid > 0]

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
