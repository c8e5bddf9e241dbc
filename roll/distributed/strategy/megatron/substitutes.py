"""Substitutes for what Megatron-Core expects and may not find: an accelerator, TransformerEngine's modules.

Megatron names CUDA where it means "this process's device". Without one, ``redirect_to_cpu`` gives Megatron's modules,
and nothing else in the process, a ``torch`` of their own that answers with the CPU. With one it does nothing.
Known to be enough for megatron-core 0.16.

``CoreAttention`` takes TransformerEngine's place on CPUs and GPUs and computes what Megatron's own module refuses:
packed sequences and context parallelism. Both are exact. Packed sequences are attended to one by one (no mask over the
whole row). With context parallelism each rank gathers the keys and values of its group, which costs memory for them in
the length of the whole sequence; TransformerEngine passes them around a ring instead. In a row that holds common
prompts once, tokens attend as its plan says.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from roll.data.packing import AttentionPlan
from roll.models.megatron.config import transformers_class
from roll.models.planned_attention import attend_by_block
from roll.utils.foreign import replaced

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


KINDS = {"linear_attention": "GatedDeltaNet", "full_attention": "Attention"}
"""Ends of the names of their classes, by the kinds of layers of a configuration."""


class TransformersMixer(nn.Module):
    """What mixes the tokens of a row in one of Transformers' layers, in the place of Megatron's attention.

    Axes: S positions, B rows, H hidden units.
    """

    def __init__(self, config: Any, hf_config: PreTrainedConfig, layer_number: int, **_: object) -> None:
        super().__init__()
        text = copy.copy(hf_config)
        text._attn_implementation = "sdpa"  # causal without a mask
        index = layer_number - 1
        kind: Any = transformers_class(text, KINDS[text.layer_types[index]])
        self.module: nn.Module = kind(text, index)
        self._attends = text.layer_types[index] == "full_attention"

    def forward(
        self,
        hidden_SBH: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: Any = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Within each row, or one after another within each of a packed row's sequences; [S, B, H] and no bias.

        Args:
            rotary_pos_emb: [S, 1 or B, 1, D]: angles of each token, or fewer: of a sequence's first tokens.
        """
        lengths = [len(hidden_SBH)] if packed_seq_params is None else packed_seq_params.cu_seqlens_q.diff().tolist()
        angles = [rotary_pos_emb] * len(lengths)
        if len(rotary_pos_emb) == len(hidden_SBH):
            angles = list(rotary_pos_emb.split(lengths))
        pairs = zip(hidden_SBH.split(lengths), angles, strict=True)
        return torch.cat([self._mix(*pair) for pair in pairs]), None

    def _mix(self, hidden_SBH: Tensor, angles_SB1D: Tensor) -> Tensor:
        hidden_BSH = hidden_SBH.transpose(0, 1)
        if not self._attends:
            mixed: Tensor = self.module(hidden_BSH)
        else:
            angles_BSD = angles_SB1D[: len(hidden_SBH), :, 0].transpose(0, 1)
            cosine, sine = (turn(angles_BSD).to(hidden_BSH.dtype) for turn in (torch.cos, torch.sin))
            mixed = self.module(hidden_BSH, position_embeddings=(cosine, sine), attention_mask=None)[0]
        return mixed.transpose(0, 1)


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


def redirect_to_cpu() -> None:
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


@dataclass(frozen=True, eq=False)
class PlannedRow:
    """A row that holds common prompts once; it travels through Megatron's layers where ``PackedSeqParams`` does."""

    plan: AttentionPlan
    positions_C: Tensor
    """int64: place of each token in its sequence, which its rotary embedding goes by."""
    max_seqlen_q: int
    """More than any position: Megatron makes so many rotary embeddings."""
    qkv_format: str = "sbhd"
    """States keep the axis of rows, and rotary embeddings are given for each token."""
    cp_group: None = None

    @property
    def max_seqlen_kv(self) -> int:
        return self.max_seqlen_q

    def to(self, device: torch.device) -> PlannedRow:
        """The same on ``device``."""
        positions_C = self.positions_C.to(device, non_blocking=True)
        return PlannedRow(self.plan.to(device), positions_C, self.max_seqlen_q)


class RmsNorm(nn.Module):
    """RMS normalisation whose weight's gradient Megatron sums over sequence-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.from_zero = bool(config.layernorm_zero_centered_gamma)
        """Factors are one more than the weight."""
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        if self.from_zero:
            exact = functional.rms_norm(hidden.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps)
            return exact.type_as(hidden)
        return functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class CoreAttention(nn.Module):
    """Causal attention with PyTorch's kernels. Axes: S positions held here, B rows, N heads, G key heads, D width."""

    softmax_offset: nn.Parameter | None
    """[N]: logits of what each head may look at beside the tokens, of no value (gpt-oss)."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        pg_collection: Any = None,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__()
        from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
        from megatron.core.transformer.utils import is_layer_window_attention

        self._scale = softmax_scale
        self._group = pg_collection.cp
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window: int | None = config.window_size[0] + 1 if windowed else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // pg_collection.tp.size()
            self.softmax_offset = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query_SBND: Tensor,
        key_SBGD: Tensor,
        value_SBGD: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Any = None,
        **_: object,
    ) -> Tensor:
        """Attends within each row, by the plan of a row, or within each of a packed row's sequences.

        A packed row's tensors have no axis B.

        Returns:
            [S, B, N * D], or [S, 1, N * D] of a packed row.
        """
        if isinstance(packed_seq_params, PlannedRow):
            query, key, value = (x[:, 0] for x in (query_SBND, key_SBGD, value_SBGD))
            return attend_by_block(query, key, value, packed_seq_params.plan, self._attend_block).flatten(1)[:, None]
        group, size = self._group, self._group.size()
        if packed_seq_params is None:
            lengths = [query_SBND.shape[0] * size]
        else:
            lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
            query_SBND, key_SBGD, value_SBGD = (x.unsqueeze(1) for x in (query_SBND, key_SBGD, value_SBGD))
        if size == 1:
            pieces = zip(*(x.split(lengths) for x in (query_SBND, key_SBGD, value_SBGD)), strict=True)
            attended = [self._attend(*piece) for piece in pieces]
        else:
            attended = self._attend_across(query_SBND, _gather(key_SBGD, group), _gather(value_SBGD, group), lengths)
        return torch.cat(attended).flatten(2)

    def _attend_across(self, query_SBND: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> list[Tensor]:
        """As ``_attend`` for this rank's two chunks of each sequence, to keys and values of the whole group."""
        size, rank = self._group.size(), self._group.rank()
        # Keys and values come in the ranks' columns end to end.
        gathered = torch.cat([held_columns(lengths, other, size) for other in range(size)])
        order = gathered.argsort().to(key.device)
        key, value = key[order], value[order]
        attended = []
        start = 0
        queries = iter(query_SBND.split([length // (2 * size) for length in lengths for _ in range(2)]))
        for length in lengths:
            chunk = length // (2 * size)
            for number in (rank, 2 * size - 1 - rank):
                stop = start + (number + 1) * chunk
                attended.append(self._attend(next(queries), key[start:stop], value[start:stop]))
            start += length
        return attended

    def _attend_block(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
        """See ``attend_by_block``. Kernels that take a mask want as many heads of keys as of queries."""
        if (times := query.shape[1] // key.shape[1]) > 1:
            key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
        attended = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, is_causal=visible is None, scale=self._scale
        )
        return attended.transpose(1, 2)

    def _attend(self, query_SBND: Tensor, key_SBGD: Tensor, value_SBGD: Tensor) -> Tensor:
        """Attention of the last positions to all up to their own; shape of ``query``."""
        queries, keys = query_SBND.shape[0], key_SBGD.shape[0]
        mask, window = None, self._window or keys
        if queries != keys or keys > window or self.softmax_offset is not None:
            mask = torch.ones(queries, keys, dtype=torch.bool, device=query_SBND.device).tril(keys - queries)
            mask = mask.triu(keys - queries - window + 1)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_SBND, key_SBGD, value_SBGD))
        if mask is not None and self.softmax_offset is not None:
            return _attend_with_sinks(query, key, value, mask, self.softmax_offset, self._scale).permute(2, 0, 1, 3)
        attended = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended.permute(2, 0, 1, 3)


def _attend_with_sinks(
    query_BNSD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, mask: Tensor, sinks_N: Tensor, scale: float | None
) -> Tensor:
    """Attention in which each head has one more logit, whose share of the softmax goes to nothing."""
    times = query_BNSD.shape[1] // key_BGSD.shape[1]
    key, value = (x.repeat_interleave(times, dim=1) for x in (key_BGSD, value_BGSD))
    scale = query_BNSD.shape[-1] ** -0.5 if scale is None else scale
    scores = (query_BNSD @ key.mT * scale).masked_fill(~mask, -torch.inf)
    sinks = sinks_N[None, :, None, None].expand(*scores.shape[:-1], 1)
    shares = torch.cat([scores, sinks], dim=-1).float().softmax(-1)[..., :-1]
    return shares.to(value.dtype) @ value


def held_columns(lengths: list[int], rank: int, size: int) -> Tensor:
    """Columns of a row that one context-parallel rank holds, in its order.

    Each sequence is cut into ``2 * size`` chunks, of which rank r holds number r and ``2 * size - 1 - r``, so that all
    have the same work under a causal mask. This is Megatron's and TransformerEngine's own order.

    Args:
        lengths: of the row's sequences; multiples of ``2 * size``.
    """
    if size == 1:
        return torch.arange(sum(lengths))
    columns, start = [], 0
    for length in lengths:
        chunk = length // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            columns.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
        start += length
    return torch.cat(columns)


def layer_specs(config: Any, vp_stage: int | None, hf_config: PreTrainedConfig, *, mixers: bool) -> Any:
    """Modules that the layers of a model chunk are made of.

    Args:
        mixers: attention is Transformers'.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.spec_utils import ModuleSpec

    engine = config.transformer_impl == "transformer_engine"
    block = get_gpt_decoder_block_spec(config, engine, "RMSNorm", vp_stage=vp_stage)
    if engine:
        return block
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # megatron-core 0.16 asks whether it is None, but forgets to define it
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False  # 0.16 takes the import of what wraps TransformerEngine for its presence
    block.layer_norm = RmsNorm
    for spec in block.layer_specs:
        layer = spec.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = RmsNorm
        if mixers:
            layer.self_attention = ModuleSpec(TransformersMixer, {"hf_config": hf_config})
            continue
        attention = layer.self_attention.submodules
        attention.core_attention = CoreAttention
        if config.multi_latent_attention:
            # Of layers that are cut, Megatron loses part of the gradient of the keys' rotated part.
            attention.linear_q_down_proj = attention.linear_kv_down_proj = multi_latent_attention.Linear
        for name in ("q_layernorm", "kv_layernorm" if config.multi_latent_attention else "k_layernorm"):
            if config.qk_layernorm:
                setattr(attention, name, RmsNorm)
    return block


def _gather(x: Tensor, group: Any) -> Tensor:
    """All ranks' positions; gradients go back to the rank that they belong to, summed."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    gathered: Tensor = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)
    return gathered
