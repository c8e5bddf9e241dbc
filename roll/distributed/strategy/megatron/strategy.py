"""``megatron_train`` and ``megatron_infer``: Megatron-Core on GPUs (nccl) or CPUs (gloo).

Parallelism is tensor, sequence, pipeline (virtual stages too), expert and context. Ranks that hold parts of one copy of
the model get the same data; copies of the model (data parallelism) get shares of it. With TransformerEngine (GPUs) a
model that computes in bf16 is built from its modules; otherwise from Megatron's own, with ``RmsNorm`` and
``CoreAttention`` of ``modules``, which are exact for packed sequences and context parallelism too. Without a GPU
``substitutes.py`` redirects what Megatron asks of CUDA. Grouped matrix products for experts need a GPU.

Megatron's schedules run all micro-batches of a step. The last pipeline stage scores tokens and computes the loss; the
scores and metrics then travel to the other stages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roll.algorithms.quantities import Given, OutputLayer, OutputLayers, moved, prepared
from roll.algorithms.types import LossContext, LossFn, TokenScores, add_metrics
from roll.configs.engines.megatron import CARD, MegatronConfig
from roll.data.batch import Batch
from roll.data.packing import take_micro_batch, worth_sharing
from roll.distributed.strategy import ignore_renamed_collectives, require_engine
from roll.distributed.strategy.base import RankInfo, States
from roll.distributed.strategy.evidence import pictures_seen
from roll.distributed.strategy.megatron.adapter import adapter_off, add_adapter
from roll.distributed.strategy.megatron.input import MegatronInput, Rounding, grid_shape, lay_out
from roll.distributed.strategy.megatron.model import (
    MegatronModel,
    build_model,
    join_parallel_state,
    own_rates_of,
    saved_name,
    without_transformer_engine,
)
from roll.distributed.strategy.megatron.optimizer import MegatronAdam, wrap_for_data_parallelism
from roll.distributed.strategy.megatron.pictures import Sight
from roll.distributed.strategy.megatron.routing import ExpertRouting
from roll.distributed.strategy.megatron.scores import VocabularyScorer, sum_over
from roll.distributed.strategy.megatron.substitutes import redirect_to_cpu
from roll.distributed.strategy.megatron.weights import (
    TrainedModel,
    WeightGatherer,
    adapter_pieces,
    module_pieces,
    published_piece,
)
from roll.distributed.strategy.training.checkpoint import (
    MODEL_PREFIX,
    SourceFolder,
    Tensors,
    TrainerState,
    model_tensors,
    open_source,
)
from roll.distributed.strategy.training.exchange import WeightShard, raise_on_all_ranks
from roll.distributed.strategy.training.trainer import MicroBatchLimits, Scorer, Trainer, join_group
from roll.models.heads import load_output_layer
from roll.models.loading import check_rope, load_config, make_skeleton, resolve_dtype, save_config
from roll.models.own_forward import OwnForward
from roll.models.scoring import BOUNDS
from roll.utils.progress import advance

logger = logging.getLogger(__name__)


class MegatronInfer(Scorer):
    """Computes log-probs with a model that is distributed as ``strategy_config`` says."""

    _trained = False
    _source: SourceFolder
    model: MegatronModel

    def setup(self) -> RankInfo:
        context = self.context
        require_engine("megatron.core", extra="megatron", strategy=context.worker.strategy_args.strategy_name)
        self.device = join_group(context, alone=True)
        ignore_renamed_collectives()
        redirect_to_cpu()
        self.options = MegatronConfig.model_validate(context.worker.strategy_args.strategy_config)
        self.info = join_parallel_state(context, self.options)
        args = context.worker.model_args
        with raise_on_all_ranks():
            if context.pictures and (why := CARD.no_pictures(context.worker)):
                raise ValueError(f"{context.role}: {context.worker.strategy_args.strategy_name} {why}")
            hf_config = load_config(context.model_path, args.model_config_kwargs)
            check_rope(hf_config, context.sequence_length)
        # The format in which weights leave: exports and saved models.
        self._model_dtype = resolve_dtype(args.dtype, hf_config)
        if self._trained and self._model_dtype == torch.float16:
            raise ValueError(f"{context.role}: training in fp16 needs loss scaling; expected bf16 or fp32")
        self._source = open_source(context)
        self.model = build_model(context, hf_config, self.options, self._model_dtype, trained=self._trained)
        if context.rank == 0 and (loss := without_transformer_engine(context, self.model.converted, self._model_dtype)):
            logger.warning(loss)
        self._sight: Sight | None = None
        if context.pictures:
            assert self.model.hf_model is not None
            numbers = [layout.layers for layout in self.model.layouts]
            with raise_on_all_ranks():
                self._sight = Sight(context, self.model.hf_model, self.model.chunks, numbers)
        self.shares_prompts = context.worker.share_prompts and self.model.takes_plans
        if context.lora is not None:
            add_adapter(self.model, context, context.lora, self.options)
        replays = context.router_replay != "disable"
        self._routing = ExpertRouting(self.model, self.options) if replays else None
        share = self.model.vocabulary()
        self._scorer = VocabularyScorer(share, context.temperature, context.needs)
        if self.model.last is not None and self.model.value_head is None:
            weight_VH = self.model.output_weight()
            layers = OutputLayers(
                own=lambda: OutputLayer(weight_VH.detach().clone()),
                of=lambda path, trusts: (
                    load_output_layer(path, self._model_dtype, trust_remote_code=trusts, pictures=context.pictures)
                    .rows(share.start, len(weight_VH))
                    .to(self.device)
                ),
            )
            self._scorer.needs = prepared(context.needs, layers)
        self.own_forward = self._make_own_forward(type(hf_config).__name__.removesuffix("Config"))
        return self.info

    def _make_own_forward(self, name: str) -> OwnForward:
        """Compares with this model on one sequence at a time, and with the generator: Transformers' is not at hand."""
        usual = self.limits("infer")
        alone = replace(usual, packing=False, sharing=False)
        bound = BOUNDS.get(self._model_dtype, BOUNDS[torch.float32])
        head = self.model.value_head

        def layers() -> tuple[list[str], dict[str, nn.Module], dict[str, nn.Module]]:
            found = {layer.layer_number: layer for chunk in self.model.chunks for layer in chunk.decoder.layers}
            named = {f"decoder.layers.{number - 1}": layer for number, layer in found.items()}
            return [f"decoder.layers.{number}" for number in range(self.model.converted.num_layers)], named, named

        return OwnForward(
            name,
            usual=lambda micro_batch: self.forward_all([micro_batch], usual)[0],
            usual_places=lambda micro_batch: self._places(micro_batch, usual),
            own=lambda row: (self.forward_all([row], alone, unmodified=True)[0], bound),
            own_places=lambda row: self._places(row, alone),
            layers=layers,
            gather=self._gather_counts,
            value_heads=lambda: [] if head is None else [head],
            has_experts=bool(self.model.converted.num_experts),
            temperature=self.context.temperature or 1.0,
        )

    def _places(self, micro_batch: Batch, limits: MicroBatchLimits) -> Tensor:
        """``OwnForward.usual_places``: a sequence-parallel rank has some of the positions that its group holds."""
        from megatron.core import parallel_state

        one = self._lay_out([micro_batch], limits)[0]
        places_T = one.place_T.cpu()
        if not self.options.sequence_parallel:
            return places_T
        held = one.input_ids_RS.numel() // self.options.tensor_model_parallel_size
        own_T = places_T - held * parallel_state.get_tensor_model_parallel_rank()
        return torch.where((own_T >= 0) & (own_T < held), own_T, -1)

    def pictures_seen(self, row: Batch) -> dict[str, Tensor]:
        return pictures_seen(self.own_forward, None if self._sight is None else self._sight.tower, row)

    def forward(self, micro_batch: Batch, limits: MicroBatchLimits) -> TokenScores:
        return self.forward_all([micro_batch], limits)[0]

    def forward_all(
        self, micro_batches: list[Batch], limits: MicroBatchLimits, *, unmodified: bool = False
    ) -> list[TokenScores]:
        inputs = self._lay_out(micro_batches, limits, unmodified=unmodified)

        def finish(one: MegatronInput, hidden: Tensor, *, non_loss_data: bool) -> TokenScores:
            return self._score(one, hidden)

        with torch.no_grad():
            scores: list[TokenScores] = self._run(inputs, finish, forward_only=True)
            shared = self._from_last_stage(scores)
            if self._routing is not None and micro_batches[0].experts_TE is None:
                told = [self._routing.told(one) for one in inputs]
                shared = [replace(found, experts_TE=one) for found, one in zip(shared, told, strict=True)]
        return shared[: len(micro_batches)]

    def without_adapter(self) -> contextlib.AbstractContextManager[object]:
        return adapter_off(self.model) if self.context.lora is not None else super().without_adapter()

    def move(self, what: States, device: torch.device) -> None:
        if States.WEIGHTS in what:
            self._move_weights(device)
            self._scorer.needs = moved(self._scorer.needs, device)

    def _move_weights(self, device: torch.device) -> None:
        for chunk in self.model.chunks:
            chunk.to(device)

    def _run(self, inputs: list[MegatronInput], finish: Callable[..., Any], *, forward_only: bool) -> list[Any]:
        """Runs Megatron's schedule over the micro-batches; what ``finish`` reports, on the last stage only."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(iterator: Iterator[MegatronInput], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
            one = next(iterator)
            with contextlib.ExitStack() as stack:
                arguments: dict[str, Any] = {"position_ids": None, "attention_mask": None}
                if self._routing is not None:
                    stack.enter_context(self._routing.at(one))
                if self._sight is not None:
                    own = self.model.chunks[self.model.wrapped.index(chunk)]
                    arguments |= stack.enter_context(self._sight.at(one, own))
                hidden = chunk(one.input_ids_RS, packed_seq_params=one.packed_seq_params(), **arguments)
            advance()
            return hidden, partial(finish, one)

        chunks = self.model.wrapped
        iterators = [iter(inputs) for _ in chunks]
        rows, columns = inputs[0].input_ids_RS.shape
        several = len(chunks) > 1
        reports: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if several else iterators[0],
            model=chunks if several else chunks[0],
            num_microbatches=len(inputs),
            seq_length=columns * self.options.context_parallel_size,
            micro_batch_size=rows,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return reports

    def _lay_out(
        self, micro_batches: list[Batch], limits: MicroBatchLimits, *, unmodified: bool = False
    ) -> list[MegatronInput]:
        """The micro-batches on this rank: of one shape where Megatron needs that, and as many as it can schedule."""
        from megatron.core import parallel_state

        options = self.options
        rounding = Rounding(
            limits.round_to,
            limits.packing,
            options.tensor_model_parallel_size if options.sequence_parallel else 1,
            parallel_state.get_context_parallel_rank(),
            options.context_parallel_size,
            limits.sharing,
            options.gemm_rows,
        )
        if options.virtual_stages:
            blank = take_micro_batch(micro_batches[0], [], 0)
            micro_batches = micro_batches + [blank] * (-len(micro_batches) % options.pipeline_model_parallel_size)
        shape = None
        spread = options.expert_model_parallel_size > 1 and options.moe_token_dispatcher_type == "allgather"
        if options.virtual_stages or spread:
            if limits.sharing and self._gather_counts([any(map(worth_sharing, micro_batches))]).any():
                rounding = dataclasses.replace(rounding, packing=True)  # one row each, or all would be wide and high
            own = [max(sizes) for sizes in zip(*(grid_shape(one, rounding) for one in micro_batches), strict=True)]
            rows, columns = self._gather_counts(own).amax(0).tolist()
            shape = int(rows), int(columns)
        inputs = [lay_out(one, rounding, shape) for one in micro_batches]
        if self._sight is not None:
            inputs = [self._sight.lay_out(one, unmodified=unmodified) for one in inputs]
        elif any(one.items_I is not None for one in micro_batches):
            raise ValueError(f"pictures for {self.model.converted.model_class}, which was loaded without its tower")
        return [one.to(self.device) for one in inputs]

    def _score(self, one: MegatronInput, hidden_SRH: Tensor) -> TokenScores:
        """Scores of a micro-batch from the last stage's hidden states; the same on all tensor and context ranks."""
        from megatron.core import parallel_state, tensor_parallel

        if self.options.sequence_parallel:
            hidden_SRH = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_SRH, tensor_parallel_output_grad=False
            )
        hidden_KH = hidden_SRH.flatten(0, 1).index_select(0, one.source_K)
        if (head := self.model.value_head) is not None:
            found = {"values_T": head(hidden_KH.float())}
        else:
            given = Given.of(one.micro_batch, self._scorer.needs).take(one.token_K.to("cpu"), self.device)
            found = self._scorer(self.model.output_weight(), hidden_KH, one.target_K, given)
        group = parallel_state.get_context_parallel_group()
        num_tokens = one.micro_batch.num_tokens
        return TokenScores.of(
            **{
                name: sum_over(values.new_zeros(num_tokens, *values.shape[1:]).index_put((one.token_K,), values), group)
                for name, values in found.items()
            }
        )

    def _from_last_stage(self, scores: list[TokenScores]) -> list[TokenScores]:
        """The last stage's scores on all stages (collective)."""
        from megatron.core import parallel_state

        if self.options.pipeline_model_parallel_size == 1:
            return scores
        group = parallel_state.get_pipeline_model_parallel_group()
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        columns = [{name: c.contiguous() for name, c in one.columns.items()} for one in scores]
        outlines = [[{name: (c.shape, c.dtype) for name, c in one.items()} for one in columns]]
        dist.broadcast_object_list(outlines, last, group=group)
        if not columns:
            columns = [
                {name: torch.zeros(shape, dtype=dtype, device=self.device) for name, (shape, dtype) in outline.items()}
                for outline in outlines[0]
            ]
        for column in itertools.chain.from_iterable(one.values() for one in columns):
            dist.broadcast(column, last, group=group)
        return [TokenScores.of(**one) for one in columns]


class MegatronTrain(MegatronInfer, Trainer):
    """Takes AdamW steps. ``model_args.dtype`` is what the model computes in; the optimizer's weights are float32."""

    _trained = True

    def setup(self) -> RankInfo:
        info = super().setup()
        assert self.own_forward is not None
        self.own_forward.generated = self._generated
        wrap_for_data_parallelism(self.model, self.options)
        args = self.context.worker.training_args
        rates = own_rates_of(self.model, self.context) if args.learning_rate_of else {}
        self._optimizer = MegatronAdam(self.model, self.options, args, rates)
        self._gatherer = WeightGatherer(self.model, self._optimizer)
        if self._model_dtype != torch.float32 and self.context.lora is None:
            # The optimizer's weights start from those in the files, which may be more exact than the model's.
            self.trained.load(Path(self.context.model_path))
        if self.context.lora is not None and self.context.lora.start is not None:
            self.trained.load(Path(self.context.lora.start))
        self._state = TrainerState(total_optimizer_steps=self.context.total_optimizer_steps)
        return info

    def _generated(self, micro_batch: Batch) -> Tensor | None:
        """The generator's log-probabilities, where it has the same weights."""
        started = self.context.lora is None or self.context.lora.start is None  # may be scored without its adapter
        is_same = self.context.role == "actor_train" and self._state.optimizer_steps == 0 and started
        return micro_batch.rollout_logprobs_T if is_same and self.model.value_head is None else None

    def reset_optimizer(self) -> None:
        self._optimizer.allocate()
        self._state = TrainerState(total_optimizer_steps=self.context.total_optimizer_steps)

    def accumulate(
        self, micro_batches: list[Batch], limits: MicroBatchLimits, loss_fn: LossFn, context: LossContext
    ) -> dict[str, float | Tensor]:
        from megatron.core import parallel_state

        inputs = [replace(one, trains=True) for one in self._lay_out(micro_batches, limits)]
        # With it the gradient is the plain sum over micro-batches and ranks.
        factor = len(inputs) * parallel_state.get_data_parallel_world_size()

        def finish(one: MegatronInput, hidden: Tensor) -> tuple[Tensor, dict[str, float | Tensor]]:
            output = loss_fn(self._score(one, hidden), one.micro_batch, context)
            # Megatron divides the loss that it is given in place: what is reported is a tensor of its own.
            return output.loss * factor, output.metrics | {self._loss_name: output.loss.detach()}

        sums: dict[str, float | Tensor] = {}
        for metrics in self._run(inputs, finish, forward_only=False):
            add_metrics(sums, metrics)
        return self._metrics_from_last_stage(sums)

    def _metrics_from_last_stage(self, sums: dict[str, float | Tensor]) -> dict[str, float | Tensor]:
        """The last stage's metrics on all stages (collective)."""
        from megatron.core import parallel_state

        if self.options.pipeline_model_parallel_size == 1:
            return sums
        group = parallel_state.get_pipeline_model_parallel_group()
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        names = [list(sums)]
        dist.broadcast_object_list(names, last, group=group)
        values = torch.zeros(len(names[0]), dtype=torch.float64, device=self.device)
        if sums:
            values = torch.stack([torch.as_tensor(sums[n], dtype=torch.float64, device=self.device) for n in sums])
        dist.broadcast(values, last, group=group)
        return dict(zip(names[0], values, strict=True))

    def move(self, what: States, device: torch.device) -> None:
        super().move(what, device)
        if States.GRADS in what:
            for chunk in self.model.wrapped:  # its buffers hold nothing between steps: freed, or made again
                chunk.offload_grad_buffers() if device.type == "cpu" else chunk.restore_grad_buffers()
        if States.OPTIMIZER in what:
            self._optimizer.move(device)

    def _move_weights(self, device: torch.device) -> None:
        """Weights in Megatron's buffers keep their tensors, whose memory goes and comes."""
        for chunk in self.model.wrapped:
            buffered = set()
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                if buffer.param_data is None:
                    continue
                buffered |= set(buffer.params)
                move = buffer.offload_to_cpu if device.type == "cpu" else buffer.reload_from_cpu
                move(move_params=True, move_grads=False)
            for parameter in chunk.parameters():
                if parameter not in buffered:
                    parameter.data = parameter.data.to(device)

    def reduce_gradients(self) -> None:
        self._optimizer.reduce_gradients()

    def add_l2(self, coefficient: float) -> Tensor:
        return self._optimizer.add_l2(coefficient, self.device)

    def square_norm(self) -> Tensor:
        return self._optimizer.square_norm(self.device)

    def apply_gradients(self, rate: float, norm: float) -> None:
        limit = self.context.max_grad_norm
        self._optimizer.step(rate, self.weight_decay, limit / norm if 0 < limit < norm else 1.0)

    def drop_gradients(self) -> None:
        self._optimizer.drop_gradients()

    def find_weights(self) -> list[WeightShard]:
        pieces, converted = self._gatherer.pieces("trunk", self._model_dtype), self.model.converted
        hf_model = self.model.hf_model
        if not converted.family.experts.alternating and hf_model is None:
            return pieces
        named = [piece for piece in pieces if piece.outline]  # not tied embeddings' copy
        whole = module_pieces(named, converted.family, converted.num_experts)
        return whole if hf_model is None else [published_piece(one, hf_model, self.context.head) for one in whole]

    def find_adapter(self) -> list[WeightShard]:
        return super().find_adapter() if self.context.lora is None else adapter_pieces(self._gatherer)

    @property
    def trained(self) -> TrainedModel:
        return TrainedModel(self.model, self._gatherer, self._optimizer, self.context)

    def model_tensors(self) -> Tensors:
        own_head = self._gatherer.pieces("head", torch.float32)
        pieces = [*self.pieces("weights"), *self._gatherer.pieces("buffers", torch.float32)]
        trunk = pieces
        if self.model.hf_model is None:
            trunk = [piece.renamed(partial(saved_name, head=self.context.head)) for piece in pieces]
        return model_tensors(trunk, own_head, self.context.head, MODEL_PREFIX.rstrip("."))

    def write_config(self, folder: Path) -> None:
        head, dtype, kwargs = self.context.head, self._model_dtype, self.context.worker.model_args.model_config_kwargs
        path, pictures = self.context.model_path, self.context.pictures
        whole = load_config(path, kwargs, asks_hub=False)
        with torch.device("meta"):
            model = make_skeleton(head, path, dtype=dtype, config_kwargs=kwargs, pictures=pictures)
            save_config(model, folder, dtype, head, whole, published=None if kwargs else self._source.config)
