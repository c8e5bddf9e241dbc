"""One model's parameters on several ranks, sharded by FSDP2 or one replica on each, and checkpoints of their shards.

Both classes show an optimizer the same thing: ``trained``, this rank's share of every trained parameter as a plain
tensor. Plain tensors rather than DTensors, because each foreach call on DTensors costs more than the arithmetic of a
small model.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from roll.distributed.strategy.training.checkpoint import to_device
from roll.distributed.strategy.training.exchange import (
    Part,
    ShardLayout,
    Slice,
    everywhere,
    find_regions,
    raise_on_all_ranks,
)
from roll.distributed.strategy.training.optim import MASTER, MOMENTS
from roll.models.heads import decoder_layers
from roll.models.loading import resolve_dtype
from roll.models.lora import is_adapter
from roll.models.scoring import TokenScorer
from roll.models.tensor_parallel import split_layers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from roll.configs.engines.fsdp2 import Fsdp2Config


class Weights(ABC):
    """A ``ModuleWeights``, as far as sharded and replicated ones are alike."""

    copies: list[int]
    """For each share in ``trained``, the ranks that hold the same, and after ``reduce_gradients`` the same gradient."""
    optimizer: torch.optim.Optimizer
    """A trainer's, over ``trained``."""

    def __init__(self, scorer: TokenScorer, device: torch.device) -> None:
        self.scorer = scorer
        self.device = device
        self.parameters: dict[str, nn.Parameter] = {}
        self.local: dict[str, nn.Parameter] = {}

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Of ``local``, what an optimizer changes."""
        return {name: share for name, share in self.local.items() if share.requires_grad}

    def shape(self, name: str) -> torch.Size:
        return self.parameters[name].shape

    def forward_context(self) -> contextlib.AbstractContextManager[object]:
        """Entered around every forward pass."""
        return contextlib.nullcontext()

    def after_scoring(self) -> None:  # noqa: B027 (optional to override)
        """Called after forward passes that no backward pass follows."""

    def before_backward(self, *, last: bool) -> None:  # noqa: B027 (optional to override)
        """Called before each micro-batch's forward pass; ``last`` of an optimizer step."""

    def square_norm(self, tensors: list[Tensor]) -> Tensor:
        """This rank's part of the sum of squares of tensors like ``trained``, float64; all ranks' parts add up."""
        squares = torch.stack(torch._foreach_norm(tensors)).double().square()
        return (squares / torch.tensor(self.copies, dtype=torch.float64, device=squares.device)).sum()

    @abstractmethod
    def reduce_gradients(self) -> list[Tensor]:
        """After the last micro-batch: makes every share's ``.grad`` the sum over all ranks, and returns them."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Forgets the gradients."""

    @abstractmethod
    def share(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a tensor shaped like the parameter."""

    @abstractmethod
    def move(self, device: torch.device) -> None:
        """Moves the parameters; the optimizer's shares follow."""

    def spread(self, name: str, kind: str, dtype: torch.dtype) -> ShardLayout:
        share = self.local[name]
        # With cpu_offload too, weights are made whole on the device: over its links, and where generators are. Moments
        # are only written to files.
        device = self.device if kind == MASTER else share.device

        def own() -> Tensor:
            return self._kept(name, kind).view(self._unpacked(name, share.shape))

        return ShardLayout(self._unpacked(name, self.shape(name)), dtype, device, self._regions(name), own)

    @abstractmethod
    def _regions(self, name: str) -> Sequence[Slice]:
        """Regions of a parameter, whose shape is ``_unpacked``, and the ranks that have them (collective)."""

    def _unpacked(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a parameter, or of a share of it, in which a share is one block of the whole."""
        return tuple(shape)

    def places(self, name: str, kind: str) -> Sequence[ShardLayout]:
        return [self.spread(name, kind, torch.float32)]

    def kinds(self, name: str) -> Sequence[str]:
        state = self.optimizer.state[self.local[name]]
        return [kind for kind in MOMENTS if kind in state]

    def set_steps(self, steps: int) -> None:
        for share in self.trained.values():
            if "step" in (state := self.optimizer.state[share]):
                state["step"].fill_(steps)

    def _kept(self, name: str, kind: str) -> Tensor:
        share = self.local[name]
        return share if kind == MASTER else cast(Tensor, self.optimizer.state[share][kind])


class ReplicatedWeights(Weights):
    """Every rank holds all parameters; one all-reduce of one flat buffer sums the gradients.

    Args:
        scorer: the model, in the number format that the optimizer works in.
        compute_dtype: format of matrix products (autocast); float32 means as stored.
    """

    def __init__(self, scorer: TokenScorer, device: torch.device, *, compute_dtype: torch.dtype, trained: bool) -> None:
        super().__init__(scorer, device)
        scorer.to(device)
        self.parameters = self.local = dict(scorer.named_parameters())
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.copies = [self._ranks] * len(self.trained)
        stored = next(iter(self.parameters.values())).dtype
        self._autocast = compute_dtype if compute_dtype != stored else None
        self._flat_gradient = torch.empty(0)
        if trained:
            self._allocate_gradients()

    def forward_context(self) -> contextlib.AbstractContextManager[object]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)

    def before_backward(self, *, last: bool) -> None:
        self._allocate_gradients()

    def reduce_gradients(self) -> list[Tensor]:
        self._allocate_gradients()  # a rank may have had no row
        if self._ranks > 1:
            dist.all_reduce(self._flat_gradient)
        return [cast(Tensor, parameter.grad) for parameter in self.trained.values()]

    def drop_gradients(self) -> None:
        self._flat_gradient.zero_()

    def _regions(self, name: str) -> Sequence[Slice]:
        return everywhere(self.shape(name))

    def share(self, name: str, whole: Tensor) -> Tensor:
        return whole

    def move(self, device: torch.device) -> None:
        for parameter in self.local.values():
            parameter.grad = None
        self._flat_gradient = torch.empty(0)  # until the next backward pass
        self.scorer._apply(partial(to_device, device=device))

    def _allocate_gradients(self) -> None:
        """Makes every ``.grad`` a view of one buffer, unless they are: so a sum over ranks is one call."""
        if self._flat_gradient.numel():
            return
        parameters = list(self.trained.values())
        sizes = [parameter.numel() for parameter in parameters]
        self._flat_gradient = torch.zeros(sum(sizes), device=parameters[0].device)
        for parameter, gradient in zip(parameters, self._flat_gradient.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)


class ShardedWeights(Weights):
    """Every decoder layer, and the rest as a whole, is sharded with ``fully_shard`` (FSDP2).

    Args:
        scorer: the model, in the number format that the optimizer works in.
        compute_dtype: format of the gathered weights and of activations.
        config: sharding options; ``fsdp_size`` smaller than the world replicates groups of shards (HSDP).
    """

    def __init__(
        self, scorer: TokenScorer, device: torch.device, *, compute_dtype: torch.dtype, config: Fsdp2Config
    ) -> None:
        super().__init__(scorer, device)
        data_mesh, tensor_mesh = _make_meshes(device, config)
        reduce_dtype = torch.float32 if config.reduce_dtype is None else resolve_dtype(config.reduce_dtype)
        self._sync_always = config.reshard_after_forward
        _forget_values(scorer)
        partial: set[str] = set()
        if tensor_mesh is not None:
            partial = split_layers(scorer.model, tensor_mesh)
            self._tensor_group = tensor_mesh.get_group()
        self._root = _shard(scorer, data_mesh, compute_dtype, reduce_dtype, config)
        _allocate(scorer, torch.device("cpu") if config.cpu_offload else device, device)
        self.parameters = dict(scorer.named_parameters())
        self.local = {name: nn.Parameter(_local(p), p.requires_grad) for name, p in self.parameters.items()}
        self._partial = [name for name in self.trained if name.removeprefix("model.") in partial]
        self.copies = [_copies(self.parameters[name]) for name in self.trained]

    def after_scoring(self) -> None:
        # The root (and without reshard_after_forward, each layer) keeps its gathered weights after a forward pass,
        # expecting a backward pass to free them; without one, the next forward pass would compute with stale weights
        # if they changed in between.
        for module in self.scorer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def before_backward(self, *, last: bool) -> None:
        # Gradients that are not scattered at once wait unsharded, which costs the memory that reshard_after_forward
        # is there to save.
        self._root.set_requires_gradient_sync(self._sync_always or last)
        self._root.set_requires_all_reduce(last)
        self._root.set_is_last_backward(last)

    def reduce_gradients(self) -> list[Tensor]:
        trained = self.trained
        for name, share in trained.items():
            parameter = self.parameters[name]
            share.grad = torch.zeros_like(share) if parameter.grad is None else _local(parameter.grad)
        for name in self._partial:
            dist.all_reduce(self.local[name].grad, group=self._tensor_group)
        return [cast(Tensor, share.grad) for share in trained.values()]

    def drop_gradients(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = self.local[name].grad = None

    def _regions(self, name: str) -> Sequence[Slice]:
        return self._shards[name]

    @cached_property
    def _shards(self) -> dict[str, Sequence[Slice]]:
        """Regions of the parameters, and the ranks that have them."""
        return find_regions({name: self._part(name) for name in self.parameters})

    def _part(self, name: str) -> Part:
        """This rank's share of a parameter, whose shape is ``_unpacked``."""
        (chunk,) = cast("DTensor", self.parameters[name]).__create_chunk_list__()
        offsets = list(chunk.offsets)
        if (packed := self._packed(name)) is not None:
            offsets.insert(packed[0], 0)
        return tuple(offsets), self._unpacked(name, chunk.sizes)

    def _unpacked(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        if (packed := self._packed(name)) is None:
            return tuple(shape)
        dim, factor = packed
        return (*shape[:dim], factor, shape[dim] // factor, *shape[dim + 1 :])

    def _packed(self, name: str) -> tuple[int, int] | None:
        """Dimension and number of matrices that lie one behind the other in a parameter, each cut for itself.

        Such are the experts' gate and up projections under tensor parallelism. (Where a later axis of the mesh cuts the
        same dimension, ``_StridedShard`` says something else: the order of the cuts.)
        """
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.placement_types import _StridedShard

        placement, *earlier = reversed(cast("DTensor", self.parameters[name]).placements)
        if not isinstance(placement, _StridedShard):
            return None
        assert not any(isinstance(other, Shard) and other.dim == placement.dim for other in earlier)
        return placement.dim, int(placement.split_factor)

    def share(self, name: str, whole: Tensor) -> Tensor:
        from torch.distributed.tensor import distribute_tensor

        like = cast("DTensor", self.parameters[name])
        # src_data_rank=None: every rank has the whole tensor and cuts its own part, nothing is sent.
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()

    def move(self, device: torch.device) -> None:
        self.scorer._apply(partial(to_device, device=device))
        self.parameters = dict(self.scorer.named_parameters())
        for name, parameter in self.parameters.items():
            self.local[name].data = _local(parameter)


def _shard(
    scorer: TokenScorer,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    config: Fsdp2Config,
) -> FSDPModule:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    mp_policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    pinned = torch.cuda.is_available()
    offload_policy = CPUOffloadPolicy(pin_memory=pinned) if config.cpu_offload else OffloadPolicy()
    for layer in decoder_layers(scorer.model):
        fully_shard(
            layer,
            mesh=mesh,
            reshard_after_forward=config.reshard_after_forward,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
        )
    root = fully_shard(scorer, mesh=mesh, mp_policy=mp_policy, offload_policy=offload_policy)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            # The losses' shares already add up: sum, do not average. By default the sum is a premultiplied one, which
            # gloo lacks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return cast(FSDPModule, root)


def _make_meshes(device: torch.device, config: Fsdp2Config) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The ranks over which weights are sharded (and before them, replicated), and a tensor-parallel group's."""
    from torch.distributed.device_mesh import init_device_mesh

    world, tensor_size = dist.get_world_size(), config.tensor_parallel_size
    if world % tensor_size:
        raise ValueError(
            f"strategy_config.tensor_parallel_size: {tensor_size}, expected a divisor of the {world} workers"
        )
    groups = world // tensor_size
    size = groups if config.fsdp_size == -1 else config.fsdp_size
    if groups % size:
        what = "workers" if tensor_size == 1 else "tensor-parallel groups"
        raise ValueError(f"strategy_config.fsdp_size: {size}, expected a divisor of the {groups} {what}")
    sizes = {"replicate": groups // size, "shard": size, "tensor": tensor_size}
    data = ["shard"] if size == groups else ["replicate", "shard"]
    names = data if tensor_size == 1 else [*data, "tensor"]
    mesh = init_device_mesh(device.type, tuple(sizes[name] for name in names), mesh_dim_names=tuple(names))
    return (mesh, None) if tensor_size == 1 else (mesh[tuple(data)], mesh["tensor"])


def _forget_values(scorer: TokenScorer) -> None:
    """Makes every parameter a placeholder without memory; buffers, which no checkpoint holds, stay."""
    replaced: dict[int, nn.Parameter] = {}
    for module in scorer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            key = id(parameter)
            if key not in replaced:  # tied ones stay tied
                replaced[key] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            setattr(module, name, replaced[key])


def _allocate(scorer: TokenScorer, device: torch.device, compute_device: torch.device) -> None:
    """Gives this rank's shares memory on ``device``, not yet set."""
    buffers = {name: buffer.to(compute_device) for name, buffer in scorer.named_buffers()}
    scorer.to_empty(device=device)
    for name, buffer in buffers.items():
        path, _, last = name.rpartition(".")
        setattr(scorer.get_submodule(path), last, buffer)


def _copies(parameter: nn.Parameter) -> int:
    """Number of ranks that hold the same share of a parameter."""
    like = cast("DTensor", parameter)
    sizes = zip(like.placements, like.device_mesh.shape, strict=True)
    return dist.get_world_size() // math.prod(size for placement, size in sizes if not placement.is_replicate())


def _local(tensor: Tensor) -> Tensor:
    return cast("DTensor", tensor).to_local().detach()


Shards: TypeAlias = dict[str, Tensor]


def shards_of(weights: Weights, *, moments: bool = True) -> Shards:
    """Weights and moments as they lie on the ranks, but for what an adapter is added to; writing changes them.

    With ``cpu_offload`` beside a GPU they are copies, as a DTensor lies on the devices of its mesh.
    """
    return {name: _placed(share, like) for name, share, like in _shares(weights, moments)}


class ShardCopies:
    """Copies of ``shards_of`` in host memory, which is reused."""

    def __init__(self) -> None:
        self._kept: Shards | None = None

    @torch.no_grad()
    def take(self, shards: Shards) -> Shards:
        """Copies all; what was returned before is written over."""
        gpu = torch.cuda.is_available()
        if self._kept is None:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            options = StagingOptions(gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=gpu)
            # Only PyTorch makes a DTensor that lies beside its mesh; at a millisecond for each, it is asked once.
            self._kept = cast(Shards, DefaultStager(options).stage(shards))
            return self._kept
        for name, tensor in shards.items():
            _own_part(self._kept[name]).copy_(_own_part(tensor), non_blocking=gpu)
        if gpu:
            torch.cuda.synchronize()
        return self._kept


def save_shards(path: Path, state: Shards, group: dist.ProcessGroup | None) -> None:
    """Writes the shards of weights and moments into a folder (collective over the group, or all ranks).

    Raises:
        OSError: on every rank, when one cannot write.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
    try:
        with _quiet():
            dcp.save(state, storage_writer=writer, process_group=group, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise OSError(f"checkpoint {path}: {error}") from error


def load_shards(path: Path, weights: Weights, *, moments: bool) -> None:
    """Sets weights, and ``moments`` too if wanted, to what ``save_shards`` wrote (collective).

    Earlier versions left out what is frozen, which then stays as it is.

    Raises:
        ValueError: a part is missing or belongs to another model.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader

    reader = HuggingFaceStorageReader(str(path))
    state = shards_of(weights, moments=moments)
    if frozen := state.keys() & weights.local.keys() - weights.trained.keys():
        with raise_on_all_ranks():
            for name in frozen - reader.read_metadata().state_dict_metadata.keys():
                del state[name]
    try:
        with _quiet():
            dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    except (CheckpointException, RuntimeError) as error:
        raise ValueError(f"checkpoint {path}: {error}; expected the shards of this model") from error
    for name, share, _ in _shares(weights, moments):
        if name in state and (loaded := _own_part(state[name])).device != share.device:
            share.copy_(loaded)


def _quiet() -> warnings.catch_warnings:
    """Without the warning that a lone worker is alone."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def _shares(weights: Weights, moments: bool) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, this rank's share, and the parameter that it is shaped like."""
    trained = weights.trained
    for name, share in (trained if any(map(is_adapter, trained)) else weights.local).items():
        parameter = weights.parameters[name]
        yield name, share.detach(), parameter
        for kind in weights.kinds(name) if moments and name in trained else ():
            yield f"{name}.{kind}", weights.optimizer.state[share][kind], parameter


def _placed(share: Tensor, like: Tensor) -> Tensor:
    """A share as the part of a whole tensor that it is."""
    from torch.distributed.tensor import DTensor

    if not isinstance(like, DTensor):
        return share
    whole = cast("DTensor", like)
    return DTensor.from_local(
        share, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _own_part(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
