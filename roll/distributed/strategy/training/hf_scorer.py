"""Hugging Face models as training engines run them: made without weights, prepared for scoring and recomputation."""

from __future__ import annotations

import contextlib

import torch

from roll.algorithms.types import TokenScores
from roll.data.batch import Batch
from roll.distributed.strategy.base import RankInfo, StrategyContext
from roll.distributed.strategy.engines import require_engine
from roll.distributed.strategy.training.scorer import Limits
from roll.models.comparison import TeacherView
from roll.models.freezing import freeze
from roll.models.heads import ValueHead
from roll.models.liger import use_liger_kernels
from roll.models.loading import classifier_entries, make_skeleton
from roll.models.lora import inject_adapter
from roll.models.scoring import TokenScorer, layout, score_input
from roll.models.ulysses import SequenceGroup, enable, make_group, score_shared_input

ATTENTION = {"auto": None, "fa2": "flash_attention_2"}


def make_scorer(context: StrategyContext, dtype: torch.dtype) -> TokenScorer:
    """The role's model with unset weights, wrapped for scoring, with an unset adapter if the role trains one.

    Raises:
        ImportError: an adapter without peft, or Liger's kernels without liger-kernel.
        ValueError: the adapter's targets, or parts to freeze, are not in the model, Liger's kernels cannot run, or
            Transformers has no classifier of a reward model's kind.
    """
    args = context.worker.model_args
    model = make_skeleton(
        context.head,
        context.model_path,
        dtype=dtype,
        attn_implementation=ATTENTION.get(args.attn_implementation, args.attn_implementation),
        config_kwargs=args.model_config_kwargs,
        trust_remote_code=args.trust_remote_code,
    )
    if args.use_liger_kernel:
        use_liger_kernels(model)
    if context.lora is not None:
        require_engine("peft", extra="lora", strategy=context.worker.strategy_args.strategy_name)
        inject_adapter(model, context.lora)
    if args.frozen_prefixes:
        freeze(model, args.frozen_prefixes, head=context.head != "lm")
    head = None
    if context.head != "lm":
        if context.head == "score":
            classifier_entries(model.config.model_type)  # to be told before it is trained, not when it is saved
        stored = dtype if context.lora is None else torch.float32  # as the adapter that it is trained beside
        head = ValueHead(model.config.get_text_config().hidden_size, stored, bias=context.head == "value")
    return TokenScorer(
        model,
        temperature=context.temperature,
        value_head=head,
        returns_hidden=context.returns_hidden,
        marks_hits=context.marks_hits,
        sums_squares=context.sums_squares,
        top_k=context.top_k,
        num_ids=context.num_ids,
        routes=context.router_replay != "disable",
    )


def share_sequences(context: StrategyContext, scorer: TokenScorer, tensor_size: int = 1) -> SequenceGroup | None:
    """Prepares model and ranks for ``ulysses_size`` (collective; after ``planned_attention.enable_sharing``).

    Returns:
        This rank's group for ``score_micro_batch``; ``None`` with an ``ulysses_size`` of 1.

    Raises:
        ValueError: the ranks or the heads cannot be dealt out, or the model has another kind of attention.
    """
    size = context.worker.model_args.ulysses_size
    if size == 1:
        return None
    enable(scorer.model, size, tensor_size)
    return make_group(size, tensor_size)


def rank_info(context: StrategyContext, ranks_per_share: int) -> RankInfo:
    """This rank's place when so many neighbouring ranks work on the same data."""
    return RankInfo(
        context.rank,
        context.world_size,
        dp_rank=context.rank // ranks_per_share,
        dp_size=context.world_size // ranks_per_share,
    )


def score_micro_batch(
    scorer: torch.nn.Module,
    micro_batch: Batch,
    limits: Limits,
    context: contextlib.AbstractContextManager[object],
    group: SequenceGroup | None,
) -> TokenScores:
    """Lays a micro-batch out and runs the model over it, inside ``context``; ``group`` shares its sequences."""
    inputs = layout(micro_batch, round_to=limits.round_to, packing=limits.packing, sharing=limits.sharing)
    views = (micro_batch.ref_hidden_TH, TeacherView.of(micro_batch))
    with context:
        if group is not None:
            return score_shared_input(scorer, inputs, micro_batch.num_tokens, group, *views)
        return score_input(scorer, inputs, micro_batch.num_tokens, *views)


def recompute_activations(scorer: TokenScorer) -> None:
    """Keeps only the layers' inputs and computes the rest again in the backward pass."""
    scorer.model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in decoder_layers(scorer):
        # transformers recomputes only in training mode. Set on the layers alone, so that dropout inside them stays off:
        # the log-probabilities of one policy must not depend on who computes them.
        layer.training = True


def decoder_layers(scorer: TokenScorer) -> list[torch.nn.Module]:
    """The blocks that the model's own class says must not be split: each is one unit of sharding and recomputation."""
    names = set(scorer.model._no_split_modules or ())
    # By base classes too: fully_shard makes a QwenLayer an FSDPQwenLayer.
    layers = [module for module in scorer.model.modules() if names & {cls.__name__ for cls in type(module).__mro__}]
    if not layers:
        raise ValueError(f"{type(scorer.model).__name__} names no decoder layers (_no_split_modules); cannot shard it")
    return layers
