"""Megatron-Core on machines without an accelerator.

Megatron names CUDA where it means "this process's device". Where there is none, ``enable`` gives Megatron's modules and
nothing else in the process a ``torch`` of their own that answers with the CPU. With an accelerator it does nothing.
Known to be enough for megatron-core 0.16.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roll.distributed.replaced import replaced

MODULES = (
    "distributed",
    "models.gpt.gpt_layer_specs",
    "optimizer",
    "parallel_state",
    "pipeline_parallel.schedules",
    "tensor_parallel.random",
    "transformer.moe.moe_layer",
    "transformer.moe.shared_experts",
)
"""Modules of ``megatron.core`` that import all others that the strategy uses."""

FACTORIES = ("arange", "empty", "eye", "full", "ones", "rand", "randn", "tensor", "zeros")


def enable() -> None:
    """Imports Megatron, and redirects it to the CPU where there is no accelerator. May be called again at any time."""
    if torch.cuda.is_available():
        return
    # Megatron compiles its element-wise functions, which takes longer here than a test of them.
    with replaced(torch, compile=lambda function: function), warnings.catch_warnings():
        # They are for GPUs; without one, nobody can do anything about it.
        warnings.filterwarnings("ignore", "(Transformer Engine and )?Apex (is|are) not installed", UserWarning)
        for name in MODULES:
            importlib.import_module(f"megatron.core.{name}")
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = CPU_TORCH  # type: ignore[attr-defined]
    _redirect_functions()
    _redirect_type_checks()


class _Namespace(types.ModuleType):
    """A module with some of its names replaced."""

    def __init__(self, module: types.ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(replaced, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Stream:
    """A CUDA stream or event on a machine that computes in order anyway."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def _nothing(self, *args: object, **kwargs: object) -> _Stream:
        return self

    wait_stream = wait_event = record_event = synchronize = record = wait = _nothing


def _device() -> torch.device:
    return torch.device("cpu")


def _nothing(*args: object, **kwargs: object) -> None:
    pass


def _get_generator_state(*args: object, **kwargs: object) -> Tensor:
    return torch.get_rng_state()


def _set_generator_state(state: Tensor, *args: object, **kwargs: object) -> None:
    torch.set_rng_state(state)


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Tensor:
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = _device()
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _all_gather(outputs: list[Tensor], mine: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """All ranks' tensors, which need not be of one size as they must for Gloo."""
    if len({output.shape for output in outputs}) == 1:
        return dist.all_gather(outputs, mine, group, async_op)
    for rank, output in enumerate(outputs):
        if rank == dist.get_rank(group):
            output.copy_(mine)
        dist.broadcast(output, group=group, group_src=rank)
    return None


def _reduce_scatter(output: Tensor, parts: list[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
    """The sum of all ranks' tensors for each rank, which need not be of one size either."""
    for rank, part in enumerate(parts):
        total = part.clone(memory_format=torch.contiguous_format)
        dist.reduce(total, op=op, group=group, group_dst=rank)
        if rank == dist.get_rank(group):
            output.copy_(total)


_STREAM = _Stream()

CPU_CUDA = _Namespace(
    torch.cuda,
    {
        "Event": _Stream,
        "Stream": _Stream,
        "current_device": _device,
        "current_stream": lambda *args: _STREAM,
        "default_stream": lambda *args: _STREAM,
        "empty_cache": _nothing,
        "get_rng_state": _get_generator_state,
        "manual_seed": torch.manual_seed,
        "set_device": _nothing,
        "set_rng_state": _set_generator_state,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": _nothing,
    },
)
_NO_STATE = torch.empty(0, dtype=torch.uint8)
CPU_TORCH = _Namespace(
    torch,
    {
        "cuda": CPU_CUDA,
        "distributed": _Namespace(dist, {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter}),
        # The one generator is what Megatron takes for CUDA's; a second of the CPU would be warned of when it moves.
        "get_rng_state": lambda: _NO_STATE,
        "set_rng_state": _nothing,
        **{name: _on_cpu(getattr(torch, name)) for name in FACTORIES},
    },
)
"""Stand-in that Megatron's modules see as ``torch``."""


def _redirect_functions() -> None:
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = _get_generator_state
    random._set_cuda_rng_state = _set_generator_state
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = _to_host
    layers: Any = importlib.import_module("megatron.core.tensor_parallel.layers")
    # Or it advises an environment variable of CUDA's.
    layers.linear_with_grad_accumulation_and_async_allreduce.warned = True


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's own turns only a tensor that is on a GPU into NumPy's, where it needs numbers."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _redirect_type_checks() -> None:
    """Redirects the places where Megatron asks tensors themselves whether they are CUDA's, or makes them so."""
    optimizer = importlib.import_module("megatron.core.optimizer.optimizer")
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    language_module = importlib.import_module("megatron.core.models.common.language_module.language_module")
    rotary = importlib.import_module("megatron.core.models.common.embeddings.rotary_pos_embedding")
    for owner, name in (
        (optimizer.Float16OptimizerWithFloat16Params, "__init__"),
        (distributed.DistributedOptimizer, "__init__"),
        (language_module.LanguageModule, "setup_embeddings_and_output_layer"),
        (rotary, "get_pos_emb_on_this_cp_rank"),
    ):
        function = getattr(owner, name)
        if not hasattr(function, "__wrapped__"):
            setattr(owner, name, _with_cuda_tensors(function))


def _with_cuda_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, during which tensors say that they are CUDA's."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        type_ = Tensor.type

        def cuda_type(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            found = type_(tensor, *arguments, **options)
            return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

        with replaced(Tensor, type=cuda_type, cuda=lambda tensor, *a, **k: tensor):
            return function(*args, **kwargs)

    return call
