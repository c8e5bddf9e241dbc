"""Log-probabilities, entropies and values of just the tokens that the loss looks at.

Axes: T tokens of a batch end to end, K of them in the loss, H hidden units, V vocabulary, R x C the model's input.
The output layer is the dear part of a small model (and the large part of the memory of any): it is applied to the K
positions that predict a loss token, in chunks whose logits are computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from roll.algorithms.types import TokenScores
from roll.data.batch import Batch, unset_value
from roll.data.packing import (
    ModelInput,
    PackedSequences,
    make_micro_batches,
    make_packs,
    packed_row,
    rectangle,
    row_with_shared_prompts,
    take_micro_batch,
)
from roll.data.shared_prompts import AttentionPlan, make_shared_batches, worth_sharing
from roll.models import planned_attention
from roll.models.comparison import Comparison, OutputLayer, TeacherView, WholeVocabulary, top_tokens
from roll.models.routing import ExpertRouting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from roll.models.heads import ValueHead

MAX_CHUNK_LOGITS = 2**25
"""Logits held at a time (128 MiB in float32); a micro-batch with more goes through the output layer in chunks."""

TOP_COLUMNS = ("top_ids_TK", "top_logprobs_TK", "tail_T")
"""Names of what ``top_tokens`` finds in ``TokenScores``."""


class TokenScorer(nn.Module):
    """A causal language model, or a trunk with a value head, that scores loss tokens.

    It is a module so that FSDP2's root hooks run around everything that it does.

    Args:
        model: a causal language model; with ``value_head``, its trunk (what ``AutoModel`` loads).
        temperature: divides the logits; 0 (greedy sampling) counts as 1.
        returns_hidden: also gives the hidden states that the tokens are predicted from.
        marks_hits: also tells which tokens are the model's first choice.
        sums_squares: also gives the sums of squared probabilities.
        top_k: also tells so many of the likeliest tokens in each place (a teacher).
        num_ids: with ``top_k``, only ids below this count; ``None``: all.
        routes: takes the choice of experts that inputs bring; without gradient, and without one, it tells its own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float = 1.0,
        value_head: ValueHead | None = None,
        returns_hidden: bool = False,
        marks_hits: bool = False,
        sums_squares: bool = False,
        top_k: int = 0,
        num_ids: int | None = None,
        routes: bool = False,
    ) -> None:
        super().__init__()
        self.routing = ExpertRouting(model) if routes else None
        self._takes_plans = planned_attention.enable(model)
        self.returns_hidden = returns_hidden
        self.marks_hits = marks_hits
        self.sums_squares = sums_squares
        self.top_k = top_k
        self.num_ids = num_ids
        self.reference_layer: OutputLayer | None = None
        """The reference's, where the KL to it is wanted: it makes a distribution of the reference's hidden states."""
        self.comparison: Comparison | None = None
        """Comparison of the model with its teacher, where it has one."""
        self.model = model
        self.value_head = value_head
        self.inverse_temperature = 1.0 / temperature if temperature > 0 else 1.0
        if value_head is None and model.get_output_embeddings() is None:
            raise ValueError(f"{type(model).__name__} has no output layer; expected a causal language model")
        self._finish_logits = logit_transform(model.config)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def forward(
        self,
        input_ids_RC: Tensor,
        position_ids_RC: Tensor | None,
        source_K: Tensor,
        target_K: Tensor,
        ref_hidden_KH: Tensor | None = None,
        attention: AttentionPlan | PackedSequences | None = None,
        teacher: TeacherView | None = None,
        experts_NE: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Scores one ``ModelInput``.

        Args:
            ref_hidden_KH: the reference's hidden states for the same tokens.
            attention: for a shared row the model must be prepared
                (``planned_attention.enable_sharing``).
            teacher: what a teacher says of the same tokens.

        Returns:
            float32 [K] (hidden states [K, H], told experts [N, E]) under their names in ``TokenScores``: of a critic
            the values, else log-probabilities and entropies, and, where wanted, the KL to the reference, the divergence
            from the teacher, the hits, the hidden states, the top tokens or the experts.
            A plain dictionary, because FSDP2 finds the tensors to hook in it.

        Raises:
            ValueError: ``ref_hidden_KH`` without the reference's output layer, ``teacher`` without a ``comparison``.
        """
        trunk = self.model if self.value_head is not None else self.model.base_model
        if isinstance(attention, PackedSequences) and not (self._takes_plans and input_ids_RC.device.type == "cpu"):
            attention = None  # the positions tell the model; a GPU has kernels that go by them (flash attention)
        if self.routing is not None:
            self.routing.replay(experts_NE)
        device = input_ids_RC.device
        planned = {} if attention is None else planned_attention.plan_arguments(attention, device)
        output = trunk(input_ids=input_ids_RC, position_ids=position_ids_RC, use_cache=False, **planned)
        hidden_KH = output.last_hidden_state.flatten(0, 1).index_select(0, source_K)
        if self.value_head is not None:
            return {"values_T": self.value_head(hidden_KH)}
        scores = self._score(hidden_KH, target_K, ref_hidden_KH, teacher)
        if self.returns_hidden:
            scores["hidden_TH"] = hidden_KH.float()
        if self.routing is not None and experts_NE is None and not torch.is_grad_enabled():
            scores["experts_TE"] = self.routing.chosen_NE
        return scores

    def _score(
        self,
        hidden_KH: Tensor,
        target_K: Tensor,
        ref_hidden_KH: Tensor | None = None,
        teacher: TeacherView | None = None,
    ) -> dict[str, Tensor]:
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        score = in_chunks(self._score_chunk, vocabulary)
        return score(hidden_KH, target_K, ref_hidden_KH, teacher)

    def _score_chunk(
        self, hidden_KH: Tensor, target_K: Tensor, ref_hidden_KH: Tensor | None, teacher: TeacherView | None
    ) -> dict[str, Tensor]:
        all_logprobs_KV = self._all_logprobs(self.model.get_output_embeddings()(hidden_KH))
        probabilities_KV = all_logprobs_KV.exp()
        scores = {
            "logprobs_T": -nn.functional.nll_loss(all_logprobs_KV, target_K, reduction="none"),
            "entropy_T": -(probabilities_KV * all_logprobs_KV).sum(-1),
        }
        if self.marks_hits:
            with torch.no_grad():
                scores["hit_T"] = (scores["logprobs_T"] >= all_logprobs_KV.amax(-1)).float()
        if self.sums_squares:
            scores["squares_T"] = probabilities_KV.detach().square().sum(-1)
        if ref_hidden_KH is not None:
            if self.reference_layer is None:
                raise ValueError("kl_penalty 'full': this model holds no output layer of the reference to compare with")
            ref_logprobs_KV = self._all_logprobs(self.reference_layer(ref_hidden_KH))
            scores["kl_T"] = (probabilities_KV * (all_logprobs_KV - ref_logprobs_KV)).sum(-1)
        if teacher is not None:
            if self.comparison is None:
                raise ValueError("distillation: this model was not told how to compare itself with a teacher")
            scores["divergence_T"] = self.comparison(all_logprobs_KV, teacher)
        if self.top_k:
            found = top_tokens(all_logprobs_KV, self.top_k, self.num_ids, WholeVocabulary())
            scores |= dict(zip(TOP_COLUMNS, found, strict=True))
        return scores

    def _all_logprobs(self, logits_KV: Tensor) -> Tensor:
        """Log-probabilities of all tokens, float32, from what an output layer gave."""
        logits_KV = self._finish_logits(logits_KV.float())
        if self.inverse_temperature != 1.0:
            logits_KV = logits_KV * self.inverse_temperature
        return torch.log_softmax(logits_KV, dim=-1)


def in_chunks(
    score: Callable[[Tensor, Tensor, Tensor | None, TeacherView | None], dict[str, Tensor]], vocabulary: int
) -> Callable[[Tensor, Tensor, Tensor | None, TeacherView | None], dict[str, Tensor]]:
    """Scoring of so many tokens at a time that few logits are held, which are computed again in the backward pass.

    Args:
        score: maps hidden states, targets, and what a reference and a teacher say of them to scores by name.
    """

    def whole(
        hidden_KH: Tensor, target_K: Tensor, ref_hidden_KH: Tensor | None, teacher: TeacherView | None
    ) -> dict[str, Tensor]:
        distributions = 1 + (ref_hidden_KH is not None) + 2 * (teacher is not None)
        size = max(1, MAX_CHUNK_LOGITS // (vocabulary * distributions))
        if len(target_K) <= size:
            return score(hidden_KH, target_K, ref_hidden_KH, teacher)
        number = -(-len(target_K) // size)
        chunks = zip(
            hidden_KH.split(size),
            target_K.split(size),
            [None] * number if ref_hidden_KH is None else ref_hidden_KH.split(size),
            [None] * number if teacher is None else teacher.split(size),
            strict=True,
        )
        parts = [checkpoint(score, *chunk, use_reentrant=False) for chunk in chunks]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    return whole


def score_input(
    scorer: nn.Module,
    inputs: ModelInput,
    num_tokens: int,
    ref_hidden_TH: Tensor | None = None,
    teacher: TeacherView | None = None,
) -> TokenScores:
    """Runs one micro-batch; returns scores with gradient, on the model's device.

    Args:
        ref_hidden_TH: the reference's hidden states; the scores then hold the KL to it.
        teacher: what a teacher says of the micro-batch's tokens; the scores then hold the divergence from it.
    """
    device = next(scorer.parameters()).device
    view = None if teacher is None else teacher.take(inputs.token_K, device)
    ref_hidden_KH = None if ref_hidden_TH is None else ref_hidden_TH[inputs.token_K].to(device, non_blocking=True)
    moved = inputs.to(device)
    outputs = scorer(
        moved.input_ids_RC,
        moved.position_ids_RC,
        moved.source_K,
        moved.target_K,
        ref_hidden_KH,
        moved.attention,
        view,
        moved.experts_NE,
    )
    experts_NE = outputs.pop("experts_TE", None)
    flat = {
        name: values.new_zeros(num_tokens, *values.shape[1:]).index_put((moved.token_K,), values)
        for name, values in outputs.items()
    }
    return TokenScores(**flat, experts_TE=None if experts_NE is None else experts_NE[moved.cell_T])


def split_batch(
    batch: Batch,
    *,
    max_sequences: int | None,
    max_tokens: int | None,
    round_to: int = 1,
    packing: bool = False,
    sharing: bool = False,
) -> list[Tensor]:
    """Row indices per micro-batch, as shared rows where that saves enough, as rectangles or as packed rows.

    ``max_sequences`` counts samples: pairs, where there are any, and these are never cut.
    """
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
    round_to: int = 1,
    packing: bool = False,
) -> TokenScores:
    """Scores a whole batch without gradient, micro-batch by micro-batch.

    Returns:
        Flat [T] scores in the batch's own order, 0 where the loss mask is 0.
    """
    groups = split_batch(batch, max_sequences=max_sequences, max_tokens=max_tokens, round_to=round_to, packing=packing)
    parts = []
    for index in range(max(1, len(groups))):
        micro_batch = take_micro_batch(batch, groups, index)
        inputs = layout(micro_batch, round_to=round_to, packing=packing)
        views = (micro_batch.ref_hidden_TH, TeacherView.of(micro_batch))
        parts.append(score_input(scorer, inputs, micro_batch.num_tokens, *views))
    return gather_scores(batch, groups, parts)


def gather_scores(batch: Batch, groups: Sequence[Tensor], parts: Sequence[TokenScores]) -> TokenScores:
    """Puts the scores of micro-batches back into the batch's order, on the CPU.

    Args:
        parts: scores per micro-batch; at least one. Those past the last group are padding, and ignored.
    """
    columns = {}
    for name in (f.name for f in fields(TokenScores)):
        first = getattr(parts[0], name)
        if first is None:
            continue
        flat = torch.full((batch.num_tokens, *first.shape[1:]), unset_value(name), dtype=first.dtype)
        for rows, part in zip(groups, parts, strict=False):
            flat[batch.token_index(rows)] = getattr(part, name).cpu()
        columns[name] = flat
    return TokenScores(**columns)


def logit_transform(config: object) -> Callable[[Tensor], Tensor]:
    """Change that some architectures make to the output layer's result (Gemma 2, Granite, Cohere)."""
    softcap = getattr(config, "final_logit_softcapping", None)
    if softcap:
        return lambda logits: torch.tanh(logits / softcap) * softcap
    factor = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    return (lambda logits: logits * factor) if factor != 1.0 else (lambda logits: logits)


@torch.no_grad()
def check_output_layer(model: PreTrainedModel) -> None:
    """Compares a model's own logits with those that ``TokenScorer`` makes of its hidden states.

    Raises:
        ValueError: they differ: code of the model's own does something to them that nobody else knows.
    """
    ids_RC = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size
    hidden_RCH = model.base_model(input_ids=ids_RC, use_cache=False).last_hidden_state
    ours = logit_transform(model.config)(model.get_output_embeddings()(hidden_RCH).float())
    theirs = model(input_ids=ids_RC, use_cache=False).logits.float()
    if not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2 * float(theirs.abs().max())):
        raise ValueError(
            f"{type(model).__name__} changes what its output layer gives, in code of its own; expected a model whose "
            "logits are those of its output layer, which is what is trained"
        )
