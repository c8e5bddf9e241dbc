"""Packed rows in the layers that look along a row: attention by a plan, and states that start afresh.

Attention is registered in Transformers' table of attention functions. Without a plan it is Transformers' ``sdpa``, or
for a model that ``sdpa`` cannot compute (sinks, caps of scores) the ``eager`` function of the model's own code. A
packed row's sequences are attended to one by one, or on a GPU in 16 bits by one call of PyTorch's kernel for sequences
of any length: nothing can leak, and the work is that of the sequences, where one dense call with a mask is quadratic in
the row. With an ``AttentionPlan``, queries, keys and values of the row are gathered into the plan's blocks, each block
is one ``sdpa``, and the results go back to the tokens' places.

Layers that carry a state along a row (gated delta nets, Mamba, short convolutions) run on one sequence of the row after
another; all other layers run on the whole row. In one call, Transformers' own code would need kernels for a GPU to
start each sequence without a state, and passes over the borders without them.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roll.data.packing import AttentionPlan, PackedSequences
from roll.models.heads import text_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel


NAME = "roll_planned"
EAGER = "roll_planned_eager"
LAYER_KINDS = {"full_attention", "sliding_attention", "linear_attention"}
"""The last one runs on one sequence after another (``StateLayers``), or the family has been measured to be wrong."""
VARLEN_DTYPES = (torch.bfloat16, torch.float16)
MAX_VARLEN_HEAD = 256
"""Largest head that PyTorch's ``varlen_attn`` takes (FlashAttention 2)."""


def enable(model: PreTrainedModel) -> bool:
    """Lets a model take the plan of a packed row, where its attention is in the table and ``takes_arguments``.

    Returns:
        Whether it does now. The model is unchanged otherwise.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = model.config.get_text_config()
    kernel = getattr(config, "_attn_implementation", None) or ""
    if kernel.endswith((NAME, EAGER)):
        return True
    own = hasattr(sys.modules[type(model).__module__], "eager_attention_forward")
    if not (kernel == "sdpa" or (kernel == "eager" and own)) or not takes_arguments(model):
        return False
    name, function = (NAME, _attention) if kernel == "sdpa" else (EAGER, _eager_attention)
    ALL_ATTENTION_FUNCTIONS.register(name, function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[kernel])
    config._attn_implementation = name
    return True


def enable_sharing(model: PreTrainedModel) -> bool:
    """As ``enable``, for rows that share prompts too: all layers must have full attention by ``sdpa`` alone."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if (
        kinds != {"full_attention"}
        or (getattr(config, "sliding_window", None) is not None and not hasattr(config, "layer_types"))
        or getattr(config, "attn_logit_softcapping", None) is not None
        or find_state_layers(model)
        or not (getattr(config, "_attn_implementation", None) or "").endswith(("sdpa", NAME))
    ):
        return False
    return enable(model)


def takes_arguments(model: PreTrainedModel) -> bool:
    """Tells whether attention goes through the table, is of a known kind, and gets the arguments of the forward."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    names = set(model._no_split_modules or ())
    layers = {type(module) for module in text_modules(model) if type(module).__name__ in names}
    return (
        bool(getattr(model, "_supports_attention_backend", False))
        and kinds <= LAYER_KINDS
        and all(_takes_any(kind) for kind in (type(model.base_model), *layers))
    )


def plan_arguments(plan: AttentionPlan | PackedSequences, device: torch.device) -> dict[str, Any]:
    """Arguments of the model's forward beside ids and positions. A mask of four axes keeps it from making its own."""
    return {"attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device), "attention_plan": plan}


def _takes_any(kind: type[nn.Module]) -> bool:
    parameters = inspect.signature(kind.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attention_plan: AttentionPlan | PackedSequences | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """States are [rows, heads, tokens, size], the result [rows, tokens, heads, size]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_plan is None:
        if _is_grouped_step(query, key, attention_mask, kwargs):
            # Transformers would copy all keys and values for each query head of a group; the results are equal.
            scale = kwargs.get("scaling")
            found = nn.functional.scaled_dot_product_attention(
                query, key, value, attention_mask, scale=scale, enable_gqa=True
            )
            return found.transpose(1, 2).contiguous(), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        found: Tensor = sdpa_attention_forward(module, q, k, v, visible, **kwargs)[0]
        return found

    if not isinstance(attention_plan, PackedSequences):
        return _by_block(query, key, value, attention_plan, attend), None
    if attention_plan.both_ways_N is None and _takes_one_call(query, value):
        return _in_one_call(query, key, value, attention_plan, kwargs), None
    return _by_sequence(query, key, value, attention_plan, kwargs.get("sliding_window"), attend), None


def _eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attention_plan: PackedSequences | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As ``_attention``, by the function of the model's own code; a mask is added to the scores."""
    attend = sys.modules[type(module).__module__].eager_attention_forward
    if attention_plan is None:
        result: tuple[Tensor, Tensor | None] = attend(module, query, key, value, attention_mask, **kwargs)
        return result

    def attend_alone(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        if visible is None:
            visible = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        hidden = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill(
            ~visible, torch.finfo(q.dtype).min
        )
        found: Tensor = attend(module, q, k, v, hidden, **kwargs)[0]
        return found

    return _by_sequence(query, key, value, attention_plan, kwargs.get("sliding_window"), attend_alone), None


def _is_grouped_step(query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> bool:
    """Tells a decode step on a CPU whose query heads share keys and values."""
    grouped = query.shape[2] == 1 and query.shape[1] != key.shape[1]
    plain = not kwargs.get("dropout") and kwargs.get("position_bias") is None
    return grouped and plain and mask is not None and query.device.type == "cpu"


def _takes_one_call(query: Tensor, value: Tensor) -> bool:
    size = query.shape[-1]
    return (
        query.is_cuda
        and len(query) == 1
        and query.dtype in VARLEN_DTYPES
        and value.shape[-1] == size <= MAX_VARLEN_HEAD
        and size % 8 == 0
    )


def _in_one_call(query: Tensor, key: Tensor, value: Tensor, plan: PackedSequences, kwargs: dict[str, Any]) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    window = kwargs.get("sliding_window")
    groups = query.shape[1] // key.shape[1]
    query_NHD, key_NHD, value_NHD = (
        states[0].transpose(0, 1) for states in (query, *(s.repeat_interleave(groups, 1) for s in (key, value)))
    )
    starts, longest = plan.starts(query.device), max(plan.lengths)
    result_NHD = varlen_attn(
        *(query_NHD, key_NHD, value_NHD, starts, starts, longest, longest),
        scale=kwargs.get("scaling"),
        window_size=(-1 if window is None else window - 1, 0),
    )
    assert isinstance(result_NHD, Tensor)
    return result_NHD[None]


def _by_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: PackedSequences,
    window: int | None,
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    """Attention of a packed row [1, heads, tokens, size], one sequence after another, as [1, tokens, heads, size].

    Args:
        window: tokens that each sees, itself included; ``None``: all before it.
        attend: attention of one sequence; the mask (``None``: causal) is bool [1, 1, tokens, tokens].
    """
    results = []
    parts = zip(*(states.split(plan.lengths, dim=2) for states in (query, key, value)), strict=True)
    for index, (q, k, v) in enumerate(parts):
        results.append(attend(q, k, v, plan.mask(index, window, q.device)))
    return torch.cat(results, dim=1)


def _by_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    assert query.shape[0] == 1, "a planned row is alone"
    query_NHD, key_NGD, value_NGD = (states[0].transpose(0, 1) for states in (query, key, value))
    return attend_by_block(query_NHD, key_NGD, value_NGD, plan, attend)[None]


def attend_by_block(
    query_NHD: Tensor,
    key_NGD: Tensor,
    value_NGD: Tensor,
    plan: AttentionPlan,
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    """Attention of one row's tokens by a plan: what is common to all engines.

    Args:
        attend: attention of [R, heads, tokens, size] with the mask [R, 1, Q, J] of what is seen (``None``: causal), as
            [R, Q, heads, size].

    Returns:
        [N, heads, size].
    """
    plan = plan.to(query_NHD.device)  # parameters that wait in host memory do not say where it runs
    blocks = plan.blocks
    query_index = torch.cat([block.query_RQ.flatten() for block in blocks])
    key_index = torch.cat([block.key_RJ.flatten() for block in blocks])
    queries = query_NHD.index_select(0, query_index).split([block.query_RQ.numel() for block in blocks])
    keys, values = (
        states.index_select(0, key_index).split([block.key_RJ.numel() for block in blocks])
        for states in (key_NGD, value_NGD)
    )
    results = []
    for block, q, k, v in zip(blocks, queries, keys, values, strict=True):
        visible = None if block.visible_RQJ is None else block.visible_RQJ[:, None]
        rows = (_as_rows(q, block.query_RQ), _as_rows(k, block.key_RJ), _as_rows(v, block.key_RJ))
        results.append(attend(*rows, visible).flatten(0, 1))
    return torch.cat(results).index_select(0, plan.result_N)


def _as_rows(cells: Tensor, like: Tensor) -> Tensor:
    """[R, heads, Q, size]."""
    return cells.view(*like.shape, *cells.shape[1:]).transpose(1, 2)


def find_state_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Every kind that Transformers has looks a few tokens back by a convolution of its own."""
    return [module for module in model.modules() if any(isinstance(part, nn.Conv1d) for part in module.children())]


class StateLayers:
    """Those of a model.

    Borders stay until the next are given, so that layers which are computed again in the backward pass see them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.modules = find_state_layers(model)
        self.lengths: tuple[int, ...] = ()
        """Of the sequences of the row that is computed; empty: it is one."""
        for module in self.modules:
            module.forward = functools.partial(self._run, module.forward)

    def set_borders(self, attention: object) -> None:
        """Sets what the next forward pass is cut by: a packed row's sequences, if it is one."""
        self.lengths = attention.lengths if isinstance(attention, PackedSequences) else ()

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if len(self.lengths) < 2:
            return forward(*args, **kwargs)
        states_RCH, *others = args or (kwargs.pop("hidden_states"),)
        parts = [forward(part, *others, **kwargs) for part in states_RCH.split(self.lengths, dim=1)]
        return torch.cat(parts, dim=1)
