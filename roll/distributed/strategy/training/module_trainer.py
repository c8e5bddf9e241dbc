"""Base of the engines that train a Hugging Face module (FSDP2, DeepSpeed): its making, adapter and checkpoints."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import nn

from roll.algorithms.quantities import Given, OutputLayer, OutputLayers, moved, prepared
from roll.algorithms.types import TokenScores
from roll.data.batch import Batch
from roll.data.packing import ModelInput, PackedSequences
from roll.distributed.strategy.base import RankInfo, States
from roll.distributed.strategy.training.agreement import raise_on_all_ranks
from roll.distributed.strategy.training.hf_scorer import make_scorer, may_share
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
)
from roll.distributed.strategy.training.pieces import Piece
from roll.distributed.strategy.training.saving import SourceFolder, Tensors, model_tensors, open_source
from roll.distributed.strategy.training.scorer import Limits, Scorer, join_group
from roll.distributed.strategy.training.trainer import Trainer
from roll.models import ulysses
from roll.models.heads import load_teacher_layer
from roll.models.loading import load_config, resolve_dtype, save_config
from roll.models.lora import adapter_dropout, adapter_off
from roll.models.scoring import (
    TokenScorer,
    check_difference,
    compare_with_own_forward,
    layout,
    score_input,
    shaping,
)

W = TypeVar("W", bound=ModuleWeights)


class ModuleScorer(Scorer, Generic[W]):
    """Scores tokens with a module that an engine holds; ``weights`` is the engine's account of its parameters."""

    _trained = False
    _tensor_size = 1
    """Neighbouring ranks that split each layer."""
    _weights: W | None = None
    _source: SourceFolder
    _sequence_group: ulysses.SequenceGroup | None = None
    """The ranks that share this one's sequences, with ``ulysses_size``."""

    @property
    def weights(self) -> W:
        if self._weights is None:
            raise RuntimeError(f"{self.context.role}: setup() has not been called")
        return self._weights

    def forward(self, micro_batch: Batch, limits: Limits) -> TokenScores:
        inputs = layout(micro_batch, round_to=limits.round_to, packing=limits.packing, sharing=limits.sharing)
        if self.weights.scorer.is_checked:
            return self._score(micro_batch, inputs)
        with torch.no_grad():
            scores = self._score(micro_batch, inputs)
            self._check(micro_batch, inputs, scores)
        return self._score(micro_batch, inputs) if torch.is_grad_enabled() else scores

    def _score(self, micro_batch: Batch, inputs: ModelInput) -> TokenScores:
        module, tokens, group = self._module, micro_batch.num_tokens, self._sequence_group
        given = Given.of(micro_batch, self.weights.scorer.needs)
        with self._forward_context():
            if group is not None:
                return ulysses.score_shared_input(module, inputs, tokens, group, given)
            return score_input(module, inputs, tokens, given)

    def _check(self, micro_batch: Batch, inputs: ModelInput, scores: TokenScores) -> None:
        """Compares a micro-batch's scores with the model's own, until some tokens were compared (collective).

        Raises:
            ValueError: on every rank, where one finds a difference beyond the bound.
        """
        assert scores.logprobs_T is not None
        scorer, packed = self.weights.scorer, isinstance(inputs.attention, PackedSequences)
        with self._forward_context():
            found = compare_with_own_forward(self._module, scorer, micro_batch, inputs, scores.logprobs_T)
        all_found = self._gather_counts(found)
        how = shaping(
            packing=packed and self.context.worker.use_sequence_packing,
            sharing=inputs.attention is not None and not packed,
            ulysses=self._sequence_group is not None,
            tensor=self._tensor_size > 1,
        )
        check_difference(all_found[int(all_found[:, 0].argmax())].tolist(), scorer, how)
        scorer.is_checked = bool(all_found[:, -1].sum() > 0)

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
        self._weights = self._make_weights(compute_dtype)
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
            scorer = make_scorer(context, self._stored_dtype(compute), self._source.names)
        self.shares_prompts = context.worker.share_prompts and may_share(scorer.model, context.role)
        if args.ulysses_size > 1:  # after sharing, whose kernel it wraps
            ulysses.enable(scorer.model, args.ulysses_size, self._tensor_size)
            self._sequence_group = ulysses.make_group(args.ulysses_size, self._tensor_size)
        weights = self._place(scorer, compute)
        load_model(Path(path), weights, args.model_config_kwargs, trust_remote_code=args.trust_remote_code)
        if context.lora is not None:
            start_adapter(weights, context.seed)
            if context.lora.start is not None:
                TrainedModule(weights).load(Path(context.lora.start))

        def layer_of(path: str, trusts: bool) -> OutputLayer:
            with raise_on_all_ranks():
                layer = load_teacher_layer(path, compute, trust_remote_code=trusts)
            return layer.rows(0, scorer.model.config.get_text_config().vocab_size).to(weights.device)

        if scorer.head is not None:
            scorer.needs = prepared(context.needs, OutputLayers(lambda: copy_output_layer(weights, compute), layer_of))
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

    def find_weights(self) -> list[Piece]:
        return hf_pieces(self.weights, self._model_dtype)

    def find_adapter(self) -> list[Piece]:
        return super().find_adapter() if self.context.lora is None else adapter_pieces(self.weights)

    @property
    def trained(self) -> TrainedModule:
        return TrainedModule(self.weights, self.context.worker.model_args.trust_remote_code)

    def model_tensors(self) -> Tensors:
        weights = self.weights
        prefix = weights.scorer.model.base_model_prefix
        trunk = [*self.pieces("weights"), *buffer_pieces(weights)]
        return model_tensors(trunk, head_pieces(weights), self.context.head, prefix)

    def write_config(self, folder: Path) -> None:
        args = self.context.worker.model_args
        whole = load_config(
            self.context.model_path, args.model_config_kwargs, trust_remote_code=args.trust_remote_code, asks_hub=False
        )
        save_config(self.weights.scorer.model, folder, self._model_dtype, self.context.head, whole)

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
