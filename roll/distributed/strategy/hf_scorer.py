"""Hugging Face models as training engines run them: made without weights, prepared for scoring and recomputation."""

from __future__ import annotations

import contextlib

import torch

from roll.algorithms.types import TokenScores
from roll.data.batch import Batch
from roll.distributed.strategy.base import StrategyContext
from roll.distributed.strategy.trainer import Limits
from roll.models.heads import ValueHead
from roll.models.loading import make_skeleton
from roll.models.scoring import TokenScorer, layout, score_input

ATTENTION = {"auto": None, "fa2": "flash_attention_2"}


def make_scorer(context: StrategyContext, dtype: torch.dtype) -> TokenScorer:
    """The role's model on the meta device, wrapped for scoring."""
    args = context.worker.model_args
    model = make_skeleton(
        context.head,
        context.model_path,
        dtype=dtype,
        attn_implementation=ATTENTION.get(args.attn_implementation, args.attn_implementation),
        config_kwargs=args.model_config_kwargs,
    )
    value = context.head == "value"
    return TokenScorer(
        model,
        temperature=context.temperature,
        value_head=ValueHead(model.config.get_text_config().hidden_size, dtype) if value else None,
        returns_hidden=context.returns_hidden,
    )


def score_micro_batch(
    scorer: torch.nn.Module,
    micro_batch: Batch,
    limits: Limits,
    context: contextlib.AbstractContextManager[object] | None = None,
) -> TokenScores:
    """Lays a micro-batch out and runs the model over it, inside ``context``."""
    inputs = layout(micro_batch, round_to=limits.round_to, packing=limits.packing, sharing=limits.sharing)
    with context or contextlib.nullcontext():
        return score_input(scorer, inputs, micro_batch.num_tokens, micro_batch.ref_hidden_TH)
