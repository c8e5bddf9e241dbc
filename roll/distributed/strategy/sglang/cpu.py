"""Lets SGLang run without an accelerator; with one, it has no effect.

The package registry has no CPU kernels for SGLang. It falls back to plain PyTorch almost everywhere; what is left:

- It imports torchvision, which the registry has for CUDA only. Beside a CPU build of torch its operators are missing,
  and importing it fails at the two that it describes to the compiler. Language models call neither.
- Rotary position embeddings come from a kernel of vLLM's, which cannot live in the same environment.
- LoRA pins the memory that it copies to the device; without a device, there is nothing to pin it with.
- A tensor-parallel process wants to be told its cores, as there may be more of them than NUMA nodes.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_libraries: list[torch.library.Library] = []  # an operator lives as long as its library


def prepare() -> None:
    """Call in every process before it imports SGLang."""
    if torch.accelerator.is_available() or _libraries:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)
    package, kernels = ModuleType("vllm"), ModuleType("vllm._custom_ops")
    package.__path__ = []  # a package without any other module
    kernels.rotary_embedding = rotary_embedding  # type: ignore[attr-defined]
    sys.modules.update({"vllm": package, "vllm._custom_ops": kernels})
    for factory in ("tensor", "empty", "zeros", "arange"):
        setattr(torch, factory, _unpinned(getattr(torch, factory)))
    setattr(Tensor, "pin_memory", _unchanged)  # noqa: B010


def _unchanged(tensor: Tensor, device: object = None) -> Tensor:
    return tensor


def _unpinned(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return factory(*args, **options)

    return make


def rotary_embedding(
    positions_T: Tensor,
    query_TQ: Tensor,
    key_TK: Tensor | None,
    head_size: int,
    cos_sin_PR: Tensor,
    is_neox: bool = True,
) -> None:
    """Rotates queries and keys in place (RoFormer, Su et al. 2021), with the signature of vLLM's kernel.

    Args:
        query_TQ: Q = heads x head_size.
        key_TK: K = key heads x head_size.
        head_size: the first R dimensions of each head are rotated.
        cos_sin_PR: by position, R/2 cosines and R/2 sines.
        is_neox: pairs are (i, i + R/2), as in GPT-NeoX and Llama; otherwise (2i, 2i + 1), as in GPT-J.
    """
    cos_T1R, sin_T1R = cos_sin_PR[positions_T.flatten()].unsqueeze(1).chunk(2, dim=-1)
    half = cos_T1R.shape[-1]
    for states in (query_TQ, key_TK):
        if states is None:
            continue
        rotated = states.view(len(cos_T1R), -1, head_size)[..., : 2 * half]
        first, second = (
            (rotated[..., :half], rotated[..., half:]) if is_neox else (rotated[..., 0::2], rotated[..., 1::2])
        )
        turned = first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R
        first.copy_(turned[0])
        second.copy_(turned[1])


ENGINE_OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "lora_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,  # it hides the scheduler behind the work of a GPU
    "sleep_on_idle": True,  # else an idle engine takes a core
}
"""Arguments of ``ServerArgs`` that make the engine run on a CPU."""

PADDED_TO = 32
"""SGLang's weights on a CPU are this wide, times ``tp_size``, or padded."""


def environment(tp_size: int) -> dict[str, str]:
    """Environment of an engine of so many processes."""
    found = {"TORCHDYNAMO_DISABLE": "1"}  # compiling takes longer than what it saves
    if tp_size > 1:
        cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
        share = max(1, len(cores) // tp_size)
        groups = (itertools.islice(itertools.cycle(cores), rank * share, (rank + 1) * share) for rank in range(tp_size))
        found["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(",".join, groups))
    return found


def check_tensor_parallel(model_config: Any, tp_size: int, *, lora: bool) -> None:
    """Refuses a model that ``tp_size`` processes cannot share evenly: on a CPU, SGLang pads it and then cannot load it.

    Args:
        lora: whether it holds an adapter, which SGLang does not pad with the layers.

    Raises:
        ValueError: it does not divide.
    """
    widths = {"num_key_value_heads": tp_size}
    if lora:
        widths |= dict.fromkeys(("intermediate_size", "moe_intermediate_size"), PADDED_TO * tp_size)
    for name, unit in widths.items():
        size = getattr(model_config, name, None)
        if tp_size > 1 and size is not None and size % unit:
            raise ValueError(
                f"strategy_config.tp_size: {tp_size}, but the model has {name} {size}, expected a multiple of {unit} "
                "on a machine without a GPU; several workers in device_mapping have no such limit"
            )


def check_tower(model_config: Any, tp_size: int) -> None:
    """Refuses a vision tower that SGLang pads on a CPU and then cannot load; gated layers, as Qwen2.5-VL's, it can.

    Raises:
        ValueError: it is one.
    """
    size, unit = model_config.vision_config.intermediate_size, PADDED_TO * tp_size
    if size % unit and model_config.model_type != "qwen2_5_vl":
        raise ValueError(
            f"sglang: the vision tower has intermediate_size {size}, expected a multiple of {unit} on a machine "
            "without a GPU; vllm and hf_infer take any"
        )


def check_layers(model_config: Any, *, has_states: bool) -> None:
    """Refuses a model that SGLang computes on GPUs alone. Here it would fail, or without a word compute another one.

    Raises:
        ValueError: it is one.
    """
    kind, problem = model_config.model_type, ""
    if getattr(model_config, "attn_logit_softcapping", None) is not None:
        problem = f"attention leaves out the caps of scores of {kind}"
    elif getattr(model_config, "final_logit_softcapping", None) is not None:
        problem = f"there is no kernel for the cap of the logits of {kind}"
    elif kind == "gpt_oss":
        problem = "attention leaves out the sinks of gpt_oss"
    elif getattr(model_config, "kv_lora_rank", None):
        problem = f"attention does not read the latent keys of {kind}"
    elif has_states:
        problem = f"there are no kernels for the recurrent layers of {kind}"
    if problem:
        raise ValueError(f"sglang: on a machine without a GPU, {problem}; expected vllm or hf_infer")
