"""Hugging Face models as training engines run them: made without weights, prepared for scoring and recomputation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from roll.distributed.strategy.base import StrategyContext
from roll.distributed.strategy.engines import require_engine
from roll.models import planned_attention
from roll.models.freezing import freeze
from roll.models.heads import ValueHead
from roll.models.liger import use_liger_kernels
from roll.models.loading import classifier_entries, make_skeleton
from roll.models.lora import inject_adapter, left_out
from roll.models.packing_support import check_packing, has_own_code, packing_problem
from roll.models.scoring import TokenScorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

ATTENTION = {"auto": None, "fa2": "flash_attention_2"}


def make_scorer(context: StrategyContext, dtype: torch.dtype, names: Sequence[str]) -> TokenScorer:
    """The role's model with unset weights, wrapped for scoring, with an unset adapter if the role trains one.

    Args:
        names: of the tensors in its folder.

    Raises:
        ImportError: an adapter without peft, or Liger's kernels without liger-kernel.
        ValueError: the adapter's targets, or parts to freeze, are not in the model, Liger's kernels cannot run,
            Transformers has no classifier of a reward model's kind, or the model is not known to keep packed sequences
            apart.
    """
    args = context.worker.model_args
    model = make_skeleton(
        context.head,
        context.model_path,
        dtype=dtype,
        attn_implementation=ATTENTION.get(args.attn_implementation, args.attn_implementation),
        config_kwargs=args.model_config_kwargs,
        trust_remote_code=args.trust_remote_code,
        names=names,
    )
    if context.worker.use_sequence_packing:
        check_packing(model, context.role)
    if args.use_liger_kernel:
        use_liger_kernels(model)
    if context.lora is not None:
        require_engine("peft", extra="lora", strategy=context.worker.strategy_args.strategy_name)
        if context.rank == 0 and (left := left_out(model, context.lora.targets, context.lora.excluded)):
            logger.warning("%s.model_args.lora_target leaves without adapter: %s", context.role, left)
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
        needs=context.needs,
        routes=context.router_replay != "disable",
    )


def may_share(model: PreTrainedModel, role: str) -> bool:
    """Prepares a model for rows that share prompts, if it is known to compute them right; warns where that is all that
    is missing."""
    if not planned_attention.enable_sharing(model):
        return False
    problem = packing_problem(model.config, own_code=has_own_code(model))
    if problem:
        logger.warning("%s.share_prompts: off, as %s %s", role, model.config.model_type, problem)
    return not problem


def recompute_activations(scorer: TokenScorer) -> None:
    """Keeps only the layers' inputs and computes the rest again in the backward pass."""
    scorer.model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in decoder_layers(scorer):
        # transformers recomputes only in training mode. Set on the layers alone, so that dropout inside them stays off:
        # the log-probabilities of one policy must not depend on who computes them.
        layer.training = True


def decoder_layers(scorer: TokenScorer) -> list[torch.nn.Module]:
    """The blocks that the model's own class says must not be split: each is one unit of sharding and recomputation.

    Not one with the input embedding (BERT's family): tied to the output layer, it belongs into that layer's unit.
    """
    names, embedding = set(scorer.model._no_split_modules or ()), scorer.model.get_input_embeddings()
    # By base classes too: fully_shard makes a QwenLayer an FSDPQwenLayer.
    named = [module for module in scorer.model.modules() if names & {cls.__name__ for cls in type(module).__mro__}]
    layers = [module for module in named if all(part is not embedding for part in module.modules())]
    if not layers:
        raise ValueError(f"{type(scorer.model).__name__} names no decoder layers (_no_split_modules); cannot shard it")
    return layers
