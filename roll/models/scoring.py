"""Log-probs, entropies and values of only the tokens that the loss needs.

Axes: T tokens of a batch end to end, K of them in the loss, H hidden units, V vocabulary, R x C the model's input.
The output layer is the dear part of a small model (and the large part of the memory of any): it is applied to the K
positions that predict a loss token, in chunks whose logits are computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from roll.algorithms.quantities import BASIC, Comparison, Distribution, Given, Quantity, WholeVocabulary, keep
from roll.algorithms.types import TokenScores
from roll.data.batch import Batch
from roll.data.kept_sets import KeptSets
from roll.data.packing import (
    AttentionPlan,
    ModelInput,
    PackedSequences,
    make_micro_batches,
    make_packs,
    make_shared_batches,
    packed_row,
    rectangle,
    row_with_shared_prompts,
    rows_by_pictures,
    take_micro_batch,
    worth_sharing,
)
from roll.models import planned_attention
from roll.models.heads import OutputHead, ValueHead, trunk_of
from roll.models.pictures import PictureInput, Tower
from roll.models.planned_attention import StateLayers
from roll.models.products import linear
from roll.models.routing import ExpertRouting
from roll.utils.progress import advance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from roll.models.own_forward import OwnForward

MAX_CHUNK_LOGITS = 2**25
"""Logits held at a time (128 MiB in float32); a micro-batch with more goes through the output layer in chunks."""
BYTES_PER_CHUNK_LOGIT = 256
"""On a GPU of so many bytes for each, there may be more: 1.2 GiB in float32 with 80 GB."""

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Bound for the difference from the model's own forward pass (``own_forward``), by the number format of its logits.

In float32 of the largest (relative to a tenth of the log-probability, where that is beyond -10). In 16 bits single
tokens of a right model are up to 0.13 and 0.03 apart (SmolLM2-135M), and the bound is for a sequence's median; so it is
where there are experts, as rounding alone may tip a router's near tie."""


class TokenScorer(nn.Module):
    """A causal language model, or a trunk with a value head, that computes log-probs or values of loss tokens.

    It is a module so that FSDP2's root hooks run around everything that it does.

    Args:
        model: a causal language model; with ``value_head``, its trunk (what ``AutoModel`` loads).
        temperature: divides the logits; 0 (greedy sampling) counts as 1.
        needs: what a language model computes of each token's distribution; comparisons are ``prepared`` later.
        routes: takes the choice of experts that inputs bring; without gradient, and without one, it tells its own.
        tower: of a model that takes pictures; every forward pass goes through it once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float = 1.0,
        value_head: ValueHead | None = None,
        needs: Sequence[Quantity] = BASIC,
        routes: bool = False,
        tower: Tower | None = None,
    ) -> None:
        super().__init__()
        self.tower = tower
        self.routing = ExpertRouting(model) if routes else None
        self.state_layers = StateLayers(model)
        self._takes_plans = planned_attention.enable(model)
        self.needs = tuple(needs)
        self.model = model
        self.value_head = value_head
        self.temperature = temperature if temperature > 0 else 1.0
        self.head = OutputHead(model) if value_head is None else None

    @property
    def device(self) -> torch.device:
        return self.model.device

    def forward(
        self,
        input_ids_RC: Tensor,
        position_ids_RC: Tensor | None,
        source_K: Tensor,
        target_K: Tensor,
        given: Given | None = None,
        attention: AttentionPlan | PackedSequences | None = None,
        experts_NE: Tensor | None = None,
        pictures: PictureInput | None = None,
        *,
        own_arguments: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Scores one ``ModelInput``.

        Args:
            given: what the batch says of the same tokens.
            attention: for a shared row the model must be prepared
                (``planned_attention.enable_sharing``).
            pictures: with a tower.
            own_arguments: gives log-probabilities alone, those of the model's whole forward pass on one row (or the
                values of its last hidden states) with these arguments beside the ids, and the ``bound`` for a
                difference from them.

        Returns:
            Columns of ``TokenScores`` for the K tokens: of a critic the values, else the quantities in ``needs``, and
            where it routes by itself its experts [N, E].
            A plain dictionary, because FSDP2 finds the tensors to hook in it.
        """
        if own_arguments is not None:
            return self._score_by_own_forward(input_ids_RC, source_K, target_K, experts_NE, own_arguments)
        trunk = self.model if self.value_head is not None else trunk_of(self.model)
        self.state_layers.set_borders(attention)
        if isinstance(attention, PackedSequences) and not self._takes_plans:
            attention = None  # the positions tell the model
        if isinstance(attention, PackedSequences) and self.tower is not None and self.tower.both_ways:
            assert pictures is not None
            attention = PackedSequences(attention.lengths, pictures.cells_RC[0])
        if self.routing is not None:
            self.routing.replay(experts_NE)
        device = input_ids_RC.device
        arguments = {} if attention is None else planned_attention.plan_arguments(attention, device)
        arguments["position_ids"] = position_ids_RC
        if self.tower is not None:
            assert pictures is not None
            arguments |= self.tower.see(pictures)
        output = trunk(input_ids=input_ids_RC, use_cache=False, **arguments)
        if not torch.is_grad_enabled():
            self.state_layers.set_borders(None)  # the model may go on without this scorer
        hidden_KH = output.last_hidden_state.flatten(0, 1).index_select(0, source_K)
        if self.value_head is not None:
            return {"values_T": self.value_head(hidden_KH)}
        scores = self._score(hidden_KH, target_K, given or Given())
        if self.routing is not None and experts_NE is None and not torch.is_grad_enabled():
            scores["experts_TE"] = self.routing.chosen_NE
        return scores

    def _score(self, hidden_KH: Tensor, target_K: Tensor, given: Given) -> dict[str, Tensor]:
        layer = self.model.get_output_embeddings()
        # An engine may have the weight in parts, and hooks that bring them together.
        is_whole = type(layer) is nn.Linear and type(layer.weight.data) is Tensor and not layer._forward_pre_hooks
        weight_VH = layer.weight if is_whole else None
        return score_hidden(
            self._distribution, self.needs, hidden_KH, target_K, given, layer.weight.shape[0], weight_VH
        )

    def _distribution(
        self, hidden_KH: Tensor, target_K: Tensor, given: Given, weight_VH: Tensor | None
    ) -> Distribution:
        layer = None
        if weight_VH is not None:
            bias = self.model.get_output_embeddings().bias
            layer = partial(linear, weight=weight_VH, bias=bias)
        read = partial(self._read, kept=given.kept)
        return Distribution(
            read(hidden_KH, layer),
            target_K,
            hidden_KH,
            WholeVocabulary(),
            temperature=self.temperature,
            read=read,
            given=given,
        )

    def _read(
        self, hidden_KH: Tensor, layer: Callable[[Tensor], Tensor] | None, kept: KeptSets | None = None
    ) -> Tensor:
        assert self.head is not None
        return self._all_logprobs(keep(self.head(hidden_KH, layer), kept, 0))

    def _all_logprobs(self, logits_KV: Tensor) -> Tensor:
        """Log-probabilities of all tokens, float32, from logits."""
        if self.temperature != 1.0:
            logits_KV = logits_KV * (1.0 / self.temperature)
        return torch.log_softmax(logits_KV, dim=-1)

    def _score_by_own_forward(
        self,
        ids_1C: Tensor,
        source_K: Tensor,
        target_K: Tensor,
        experts_NE: Tensor | None,
        arguments: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        if self.routing is not None:
            self.routing.replay(experts_NE)
        self.state_layers.set_borders(None)
        if self.value_head is not None:
            output = self.model(input_ids=ids_1C, use_cache=False, **arguments)
            hidden_KH = output.last_hidden_state[0, source_K]
            bound = BOUNDS.get(hidden_KH.dtype, BOUNDS[torch.float32])
            values_T = self.value_head(hidden_KH)
            return {"values_T": values_T, "bound": values_T.new_tensor([bound])}
        taken, formats = [], []

        def take_scored(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
            if args[0].shape[:-1] != ids_1C.shape:
                return None
            taken.append(True)
            return (args[0][:, source_K],)  # all logits of a long row would not fit

        layer = self.model.get_output_embeddings()
        hooks = [
            layer.register_forward_pre_hook(take_scored),
            layer.register_forward_hook(lambda _, __, logits: formats.append(logits.dtype)),
        ]
        try:
            logits_KV = self.model(input_ids=ids_1C, use_cache=False, **arguments).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        all_logprobs_KV = self._all_logprobs((logits_KV if taken else logits_KV[source_K]).float())
        bound = BOUNDS.get((formats or [logits_KV.dtype])[0], BOUNDS[torch.float32])
        return {
            "logprobs_T": -nn.functional.nll_loss(all_logprobs_KV, target_K, reduction="none"),
            "bound": all_logprobs_KV.new_tensor([bound]),
        }


ScoreChunk: TypeAlias = Callable[[Tensor, Tensor, Given, Tensor | None], dict[str, Tensor]]
"""Maps hidden states, targets, what the batch says of them, and the output layer's weight to scores."""


def score_hidden(
    distribution: Callable[[Tensor, Tensor, Given, Tensor | None], Distribution],
    needs: Sequence[Quantity],
    hidden_KH: Tensor,
    target_K: Tensor,
    given: Given,
    vocabulary: int,
    weight_VH: Tensor | None,
) -> dict[str, Tensor]:
    """The quantities of tokens, from hidden states.

    Args:
        distribution: makes the distributions of a chunk, of the arguments of a ``ScoreChunk``.
        vocabulary: logits of a token on this rank.
        weight_VH: see ``in_chunks``.
    """
    wanted = [
        each for each in needs if not isinstance(each, Comparison) or all(name in given.columns for name in each.reads)
    ]

    def score(hidden_KH: Tensor, target_K: Tensor, given: Given, weight_VH: Tensor | None) -> dict[str, Tensor]:
        p = distribution(hidden_KH, target_K, given, weight_VH)
        return {name: column for quantity in wanted for name, column in quantity(p).items()}

    width = 1 + sum(each.width for each in wanted if isinstance(each, Comparison))
    return in_chunks(score, vocabulary * width, hidden_KH, target_K, given, weight_VH)


def in_chunks(
    score: ScoreChunk, logits: int, hidden_KH: Tensor, target_K: Tensor, given: Given, weight_VH: Tensor | None = None
) -> dict[str, Tensor]:
    """Scores so many tokens at a time that few logits are held, which are computed again in the backward pass.

    Args:
        logits: held for a token.
        weight_VH: handed on to ``score``. In 16 bits its gradient is added up in float32 over the chunks: rounded after
            each, some digits of a gradient of many chunks are lost.
    """
    size = max(1, chunk_logits(hidden_KH.device) // logits)
    if len(target_K) <= size:
        return score(hidden_KH, target_K, given, weight_VH)
    number = -(-len(target_K) // size)
    chunks = (hidden_KH.split(size), target_K.split(size), given.split(size, number), _uses(weight_VH, number))
    parts = [checkpoint(score, *chunk, use_reentrant=False) for chunk in zip(*chunks, strict=True)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def chunk_logits(device: torch.device) -> int:
    """Logits held at a time on a device."""
    if device.type != "cuda":
        return MAX_CHUNK_LOGITS
    return max(MAX_CHUNK_LOGITS, torch.cuda.get_device_properties(device).total_memory // BYTES_PER_CHUNK_LOGIT)


def _uses(weight: Tensor | None, number: int) -> list[Tensor | None]:
    """A weight for each of its uses."""
    if weight is None or weight.dtype == torch.float32 or not (weight.requires_grad and torch.is_grad_enabled()):
        return [weight] * number
    gradients = _Gradients(number)
    return [_Use.apply(weight, gradients) for _ in range(number)]


class _Gradients:
    """Gradients of the uses of one weight, added up in float32."""

    def __init__(self, number: int) -> None:
        self._number = self._missing = number
        self._sum: Tensor | None = None

    def add(self, gradient: Tensor) -> Tensor | None:
        """The sum after the last one."""
        self._sum = gradient.float() if self._sum is None else self._sum.add_(gradient)
        self._missing -= 1
        if self._missing:
            return None
        total, self._sum, self._missing = self._sum, None, self._number
        return total.to(gradient.dtype)


class _Use(torch.autograd.Function):
    """The weight itself; its gradient goes to ``_Gradients``, and the last use has the sum."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradients: _Gradients) -> Tensor:
        ctx.gradients = gradients
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override]
        return ctx.gradients.add(gradient), None


def score_input(scorer: nn.Module, inputs: ModelInput, num_tokens: int, given: Given | None = None) -> TokenScores:
    """Runs one micro-batch; returns scores with gradient, on the model's device.

    Args:
        scorer: a ``TokenScorer``, or an engine around it.
        given: what the micro-batch says of its tokens, for comparisons with other models.

    Raises:
        ValueError: pictures for a model that was loaded without its tower.
    """
    device = next(scorer.parameters()).device
    owner: Any = getattr(scorer, "module", scorer)
    pictures = None if owner.tower is None else owner.tower.of_batch(inputs)
    if pictures is None and inputs.pictured is not None:
        raise ValueError(f"pictures for {type(owner.model).__name__}, which was loaded without a vision tower")
    given_K = None if given is None else given.take(inputs.token_K, device)
    moved = inputs.to(device)
    outputs = scorer(
        moved.input_ids_RC,
        moved.position_ids_RC,
        moved.source_K,
        moved.target_K,
        given_K,
        moved.attention,
        moved.experts_NE,
        pictures,
    )
    experts_NE = outputs.pop("experts_TE", None)
    flat = {
        name: values.new_zeros(num_tokens, *values.shape[1:]).index_put((moved.token_K,), values)
        for name, values in outputs.items()
    }
    if experts_NE is not None:
        flat["experts_TE"] = experts_NE[moved.cell_T]
    return TokenScores.of(**flat)


def split_batch(
    batch: Batch,
    *,
    max_sequences: int | None,
    max_tokens: int | None,
    max_pixels: int | None = None,
    round_to: int = 1,
    packing: bool = False,
    sharing: bool = False,
) -> list[Tensor]:
    """Row indices per micro-batch, as shared rows where that saves enough, as rectangles or as packed rows.

    ``max_sequences`` counts samples: pairs, where there are any, and these are never cut. ``max_pixels`` counts each
    picture of a micro-batch once.
    """
    if max_pixels is not None and batch.items_I is not None:
        limits: dict[str, Any] = {"max_sequences": max_sequences, "max_tokens": max_tokens, "round_to": round_to}
        parts = rows_by_pictures(batch, max_pixels)
        each = (split_batch(batch.select(rows), **limits, packing=packing, sharing=sharing) for rows in parts)
        return [rows[group] for rows, groups in zip(parts, each, strict=True) for group in groups]
    if sharing and worth_sharing(batch):
        return make_shared_batches(batch, max_sequences=max_sequences, max_tokens=max_tokens)
    samples = batch.samples
    lengths, rows_each = batch.lengths_B[samples], samples.shape[1]
    if packing:
        groups = make_packs(lengths.sum(1), max_sequences=max_sequences, max_tokens=max_tokens)
    else:
        per_row = None if max_tokens is None else max(1, max_tokens // rows_each)
        groups = make_micro_batches(lengths.amax(1), max_sequences=max_sequences, max_tokens=per_row, round_to=round_to)
    return [samples[group].flatten() for group in groups]


LAYOUTS = ("padded", "packed", "shared", "padded, replayed", "packed, replayed", "shared, replayed")
"""Of a micro-batch, and whether its experts are given."""


def new_layouts(
    batch: Batch, groups: Sequence[Tensor], known: Collection[str], *, packing: bool, sharing: bool
) -> dict[str, Batch]:
    """The first micro-batch with a loss token of each of ``LAYOUTS`` that is not known."""
    replayed = "" if batch.experts_TE is None else ", replayed"
    shared, found = "shared" + replayed, dict[str, Batch]()
    done = {*known} if sharing and worth_sharing(batch) else {*known, shared}
    for group in groups:
        # A row of one sequence shows nothing about packing.
        plain = ("packed" if packing and len(group) > 1 else "padded") + replayed
        if {plain, shared} <= done:
            continue
        micro_batch = batch.select(group)
        if batch.kept_I is not None:  # the model's own forward pass knows no kept sets
            micro_batch = micro_batch.replace(kept_I=None, rollout_logprobs_T=None)
        name = shared if sharing and worth_sharing(micro_batch) else plain
        if name not in done and bool(micro_batch.loss_mask_T.any()):
            found[name] = micro_batch
            done.add(name)
    return found


def layout(micro_batch: Batch, *, round_to: int = 1, packing: bool = False, sharing: bool = False) -> ModelInput:
    """One micro-batch as the model's input."""
    if sharing and worth_sharing(micro_batch):
        return row_with_shared_prompts(micro_batch)
    return packed_row(micro_batch) if packing else rectangle(micro_batch, round_to)


@torch.no_grad()
def score_batch(
    scorer: TokenScorer,
    batch: Batch,
    *,
    max_sequences: int | None = None,
    max_tokens: int | None = None,
    max_pixels: int | None = None,
    round_to: int = 1,
    packing: bool = False,
    check: OwnForward | None = None,
) -> TokenScores:
    """Scores a whole batch without gradient, micro-batch by micro-batch.

    Args:
        check: compares the first micro-batch with the model's own forward pass.

    Returns:
        Flat [T] scores in the batch's own order, 0 where the loss mask is 0.
    """
    limits: dict[str, Any] = {"max_sequences": max_sequences, "max_tokens": max_tokens, "max_pixels": max_pixels}
    groups = split_batch(batch, **limits, round_to=round_to, packing=packing)
    if check is not None:
        for name, micro_batch in new_layouts(batch, groups, check.compared, packing=packing, sharing=False).items():
            check.compare(micro_batch, name)
    parts = []
    for index in range(max(1, len(groups))):
        micro_batch = take_micro_batch(batch, groups, index)
        inputs = layout(micro_batch, round_to=round_to, packing=packing)
        parts.append(score_input(scorer, inputs, micro_batch.num_tokens, Given.of(micro_batch, scorer.needs)))
        advance()
    return TokenScores.gathered(batch.num_tokens, map(batch.token_index, groups), parts)
