"""Base of the engines that train a Hugging Face module (FSDP2, DeepSpeed): how it is made, adapter, checkpoints."""

from __future__ import annotations

import contextlib
import difflib
import logging
from abc import abstractmethod
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor, nn

from roll.algorithms.quantities import Given, OutputLayer, OutputLayers, moved, prepared
from roll.algorithms.types import TokenScores
from roll.data.batch import Batch
from roll.data.packing import ModelInput
from roll.distributed.strategy import require_engine
from roll.distributed.strategy.base import RankInfo, States, StrategyContext
from roll.distributed.strategy.evidence import buffer_settings, config_settings, pictures_seen
from roll.distributed.strategy.training.checkpoint import (
    MODEL_PREFIX,
    SourceFolder,
    Tensors,
    model_tensors,
    open_source,
)
from roll.distributed.strategy.training.exchange import WeightShard, raise_on_all_ranks
from roll.distributed.strategy.training.module_weights import (
    ModuleWeights,
    TrainedModule,
    adapter_pieces,
    buffer_pieces,
    copy_output_layer,
    head_pieces,
    hf_pieces,
    load_model,
    start_adapter,
    whole_layers,
)
from roll.distributed.strategy.training.trainer import MicroBatchLimits, Scorer, Trainer, join_group
from roll.models import planned_attention, ulysses
from roll.models.freezing import freeze, freeze_towers, freeze_unseen, own_rates, whole_name
from roll.models.heads import ValueHead, decoder_layers, load_output_layer
from roll.models.loading import check_rope, classifier_entries, load_config, make_skeleton, resolve_dtype, save_config
from roll.models.lora import adapter_dropout, adapter_off, inject_adapter, left_out
from roll.models.measured import check_packing, has_own_code, packing_problem
from roll.models.own_forward import OwnForward, of_module, own_scores
from roll.models.pictures import tower_of
from roll.models.routing import autocast_experts
from roll.models.scoring import TokenScorer, layout, score_input

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from roll.configs.worker import TrainingArguments

logger = logging.getLogger(__name__)


KEY = "model_args.use_liger_kernel"


def use_liger_kernels(model: PreTrainedModel) -> None:
    """Replaces the layers of one model that Liger has kernels for.

    Raises:
        ValueError: no GPU, or Liger does not know the architecture.
        ImportError: liger-kernel is not installed.
    """
    if not torch.cuda.is_available():
        raise ValueError(f"{KEY}: true, expected false on a machine without a GPU, where its kernels do not run")
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance
    except ImportError as error:
        raise ImportError(f"{KEY}: {error}; expected: pip install 'roll-rl[liger]'") from error

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        known = sorted(MODEL_TYPE_TO_APPLY_LIGER_FN)
        near = difflib.get_close_matches(kind, known, n=3) or known
        raise ValueError(f"{KEY}: Liger has no kernels for {kind!r}, expected false, or a model such as {near}")
    _apply_liger_kernel_to_instance(model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False)


ATTENTION = {"auto": None, "fa2": "flash_attention_2"}


def make_scorer(context: StrategyContext, dtype: torch.dtype) -> TokenScorer:
    """The role's model with unset weights, wrapped for scoring, with an unset adapter if the role trains one.

    Raises:
        ImportError: an adapter without peft, or Liger's kernels without liger-kernel.
        ValueError: the adapter's targets, or parts to freeze, are not in the model, Liger's kernels cannot run,
            Transformers has no classifier of a reward model's kind, the model is not known to keep packed sequences
            apart or to be right about pictures, or a row's positions depend on those beside it.
    """
    args = context.worker.model_args
    model = make_skeleton(
        context.head,
        context.model_path,
        dtype=dtype,
        attn_implementation=ATTENTION.get(args.attn_implementation, args.attn_implementation),
        config_kwargs=args.model_config_kwargs,
        trust_remote_code=args.trust_remote_code,
        pictures=context.pictures,
    )
    tower = None
    if context.pictures:
        tower, chosen = tower_of(model, context.model_path), context.worker.strategy_args
        if chosen.card is not None and (why := chosen.card.blind_to(model.config.model_type, context.worker)):
            raise ValueError(f"{context.role}: {chosen.strategy_name} {why}")
    check_rope(model.config, context.sequence_length)
    if context.worker.use_sequence_packing:
        check_packing(model, context.role)
    if args.use_liger_kernel:
        use_liger_kernels(model)
    if context.lora is not None:
        require_engine("peft", extra="lora", strategy=context.worker.strategy_args.strategy_name)
        if context.rank == 0 and (left := left_out(model, context.lora.targets, context.lora.excluded)):
            logger.warning("%s.model_args.lora_target leaves without adapter: %s", context.role, left)
        inject_adapter(model, context.lora)
    if tower is None:
        freeze_towers(model)
    else:
        freeze_unseen(model)
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
        tower=tower,
    )


def rates_by_name(scorer: TokenScorer, args: TrainingArguments) -> dict[str, float]:
    """Peak learning rates of the scorer's parameters that have one of their own (``learning_rate_of``).

    Raises:
        UnknownPartError: a key is no part of the model, or nothing of it is trained.
    """
    model = scorer.model
    found = own_rates(model, args.learning_rate_of)
    stored = {name: whole_name(model, name.removeprefix(MODEL_PREFIX)) for name, _ in scorer.named_parameters()}
    return {name: found[each] for name, each in stored.items() if each in found}


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
    for layer in decoder_layers(scorer.model):
        # transformers recomputes only in training mode. Set on the layers alone, so that dropout inside them stays off:
        # the log-probabilities of one policy must not depend on who computes them.
        layer.training = True


W = TypeVar("W", bound=ModuleWeights)


class ModuleScorer(Scorer, Generic[W]):
    """Computes log-probs with a module that an engine holds; ``weights`` describes its parameters."""

    _trained = False
    _tensor_size = 1
    """Neighbouring ranks that split each layer."""
    _compute_dtype: torch.dtype
    _weights: W | None = None
    _source: SourceFolder
    _sequence_group: ulysses.SequenceGroup | None = None
    """The ranks that share this one's sequences, with ``ulysses_size``."""

    @property
    def weights(self) -> W:
        if self._weights is None:
            raise RuntimeError(f"{self.context.role}: setup() has not been called")
        return self._weights

    def forward(self, micro_batch: Batch, limits: MicroBatchLimits) -> TokenScores:
        return self._score(micro_batch, self._layout(micro_batch, limits))

    def _layout(self, micro_batch: Batch, limits: MicroBatchLimits) -> ModelInput:
        return layout(micro_batch, round_to=limits.round_to, packing=limits.packing, sharing=limits.sharing)

    def _score(self, micro_batch: Batch, inputs: ModelInput) -> TokenScores:
        module, tokens, group = self._module, micro_batch.num_tokens, self._sequence_group
        given = Given.of(micro_batch, self.weights.scorer.needs)
        with self._forward_context():
            if group is not None:
                return ulysses.score_shared_input(module, inputs, tokens, group, given)
            return score_input(module, inputs, tokens, given)

    def _own_scores(self, row: Batch) -> tuple[TokenScores, float]:
        if self._tensor_size > 1:
            unsplit = self._unsplit
            with whole_layers(self.weights, unsplit.model, unsplit.model.dtype):
                return own_scores(unsplit, unsplit, row)
        with self._forward_context():
            return own_scores(self._module, self.weights.scorer, row)

    @cached_property
    def _unsplit(self) -> TokenScorer:
        """The model as it is without tensor parallelism, empty."""
        scorer = make_scorer(self.context, self._compute_dtype)
        if scorer.value_head is not None:
            scorer.value_head.to(self.device)
        return scorer

    def _places(self, micro_batch: Batch) -> Tensor:
        inputs = self._layout(micro_batch, self.limits("infer"))
        if (group := self._sequence_group) is None:
            return inputs.cell_T
        return ulysses.places(inputs, group)

    def _make_own_forward(self) -> OwnForward:
        sizes = {"model_args.ulysses_size": self.context.worker.model_args.ulysses_size}
        sizes["strategy_config.tensor_parallel_size"] = self._tensor_size
        return of_module(
            self.weights.scorer,
            (lambda: self._unsplit) if self._tensor_size > 1 else None,
            usual=lambda micro_batch: self.forward_all([micro_batch], self.limits("infer"))[0],
            usual_places=self._places,
            own=self._own_scores,
            parallel=[f"{key}: 1" for key, size in sizes.items() if size > 1],
            gather=self._gather_counts,
        )

    @property
    def number_format(self) -> torch.dtype:
        return self._compute_dtype

    def pictures_seen(self, row: Batch) -> dict[str, Tensor]:
        return pictures_seen(self.own_forward, self.weights.scorer.tower, row)

    def settings(self) -> dict[str, str]:
        model = self.weights.scorer.model
        return super().settings() | config_settings(model.config) | buffer_settings(model)

    def without_adapter(self) -> contextlib.AbstractContextManager[object]:
        return adapter_off(self.weights.scorer) if self.context.lora is not None else super().without_adapter()

    def move(self, what: States, device: torch.device) -> None:
        if States.WEIGHTS in what:
            self.weights.scorer.needs = moved(self.weights.scorer.needs, device)

    @property
    @abstractmethod
    def _module(self) -> nn.Module:
        """Module that a forward pass calls."""

    def _forward_context(self) -> contextlib.AbstractContextManager[object]:
        """Entered around every forward pass."""
        return contextlib.nullcontext()

    def _set_up(self, compute_dtype: str | None, *, alone: bool) -> RankInfo:
        """Joins the process group, which a lone rank gets too if ``alone``, and makes the module (collective)."""
        context = self.context
        torch.manual_seed(context.seed)
        self.device = join_group(context, alone=alone)
        autocast_experts()
        self._weights = self._make_weights(compute_dtype)
        self.own_forward = self._make_own_forward()
        alike = context.worker.model_args.ulysses_size * self._tensor_size  # neighbours that work on the same data
        self.info = RankInfo(context.rank, context.world_size, context.rank // alike, context.world_size // alike)
        return self.info

    def _make_weights(self, compute_dtype: str | None) -> W:
        """Makes the module and hands it to the engine, which then gets the weights of the model folder (collective).

        Args:
            compute_dtype: number format that the model computes in; ``None``: that of the model.
        """
        context = self.context
        args, path = context.worker.model_args, context.model_path
        self._source = open_source(context)
        with raise_on_all_ranks():
            # The format in which weights leave: exports and saved models.
            config = load_config(path, args.model_config_kwargs, trust_remote_code=args.trust_remote_code)
            self._model_dtype = resolve_dtype(args.dtype, config)
            compute = self._model_dtype if compute_dtype is None else resolve_dtype(compute_dtype)
            scorer = make_scorer(context, self._stored_dtype(compute))
        plain = scorer.tower is None or not scorer.tower.both_ways
        self.shares_prompts = context.worker.share_prompts and plain and may_share(scorer.model, context.role)
        if args.ulysses_size > 1:  # after sharing, whose kernel it wraps
            ulysses.enable(scorer.model, args.ulysses_size, self._tensor_size)
            self._sequence_group = ulysses.make_group(args.ulysses_size, self._tensor_size)
        weights = self._place(scorer, compute)
        load_model(self._source.fit, weights)
        if self._trained and context.lora is None and self._source.exact:
            hf_pieces(weights, self._model_dtype, self._source.exact)  # to be told before it is trained
        if context.lora is not None:
            start_adapter(weights, context.seed)
            if context.lora.start is not None:
                TrainedModule(weights).load(Path(context.lora.start))

        def layer_of(path: str, trusts: bool) -> OutputLayer:
            with raise_on_all_ranks():
                layer = load_output_layer(path, compute, trust_remote_code=trusts, pictures=context.pictures)
            return layer.rows(0, scorer.model.config.get_text_config().vocab_size).to(weights.device)

        if scorer.head is not None:
            scorer.needs = prepared(context.needs, OutputLayers(lambda: copy_output_layer(weights, compute), layer_of))
        self._compute_dtype = compute
        return weights

    @abstractmethod
    def _place(self, scorer: TokenScorer, compute_dtype: torch.dtype) -> W:
        """Hands the module, whose weights are unset, to the engine (collective)."""

    def _stored_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        """The number format in which the module's parameters are kept."""
        return compute_dtype


class ModuleTrainer(ModuleScorer[W], Trainer):
    """Trained weights and moments are float32; ``model_args.dtype`` is what the model computes in.

    With a LoRA adapter, the model's own weights are frozen, in the format that it computes in.
    """

    _trained = True

    def find_weights(self) -> list[WeightShard]:
        return hf_pieces(self.weights, self._model_dtype)

    def find_adapter(self) -> list[WeightShard]:
        return super().find_adapter() if self.context.lora is None else adapter_pieces(self.weights)

    @property
    def trained(self) -> TrainedModule:
        return TrainedModule(self.weights, self.context.worker.model_args.trust_remote_code)

    def model_tensors(self) -> Tensors:
        weights = self.weights
        prefix = weights.scorer.model.base_model_prefix
        exact = self._source.exact  # which leave for generators like all others
        saved = hf_pieces(weights, self._model_dtype, exact) if exact else self.pieces("weights")
        trunk = [*saved, *buffer_pieces(weights)]
        return model_tensors(trunk, head_pieces(weights), self.context.head, prefix)

    def write_config(self, folder: Path) -> None:
        args = self.context.worker.model_args
        whole = load_config(
            self.context.model_path, args.model_config_kwargs, trust_remote_code=args.trust_remote_code, asks_hub=False
        )
        published = None if args.model_config_kwargs else self._source.config
        save_config(self.weights.scorer.model, folder, self._model_dtype, self.context.head, whole, published)

    def _forward_context(self) -> contextlib.AbstractContextManager[object]:
        stack = contextlib.ExitStack()
        stack.enter_context(super()._forward_context())
        lora = self.context.lora
        if lora is not None and lora.dropout > 0 and torch.is_grad_enabled():
            stack.enter_context(adapter_dropout(self.weights.scorer))
        return stack

    def _stored_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        if compute_dtype == torch.float16:
            raise ValueError(f"{self.context.role}: training in fp16 needs loss scaling; expected bf16 or fp32")
        return torch.float32 if self.context.lora is None else compute_dtype
