"""``fsdp2_train`` and ``fsdp2_infer``: PyTorch's own ``fully_shard``, on GPUs (nccl) or CPUs (gloo).

``strategy_config.fsdp_size`` says over how many ranks the weights are sharded. All of them (-1) is the default; 1 keeps
a whole replica on every rank and sums one flat gradient, which is faster for models that are small next to the cost of
a collective call; a divisor in between replicates groups of shards (HSDP).

One optimizer step never depends on how its sequences are cut: a loss returns its share of the step's total, already
divided by counts over all ranks, and the gradient is the plain sum of all shares.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from roll.algorithms.types import LossContext, LossFn, TokenScores
from roll.configs.strategy import Fsdp2Config
from roll.data.batch import Batch
from roll.data.packing import padding_waste, take_micro_batch
from roll.data.shared_prompts import worth_sharing
from roll.distributed.strategy.base import Metrics, RankInfo, States, StrategyContext, WeightBucket
from roll.distributed.strategy.fsdp2_checkpoint import (
    TrainerState,
    all_gather,
    hf_weights,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)
from roll.distributed.strategy.fsdp2_weights import (
    ReplicatedWeights,
    ShardedWeights,
    Weights,
    copy_output_layer,
    decoder_layers,
)
from roll.distributed.strategy.optim import ADAM_STATE, learning_rate, make_adamw
from roll.models import planned_attention
from roll.models.heads import ValueHead
from roll.models.loading import load_config, make_skeleton, resolve_dtype
from roll.models.scoring import TokenScorer, gather_scores, layout, score_input, split_batch

logger = logging.getLogger(__name__)

ATTENTION = {"auto": None, "fa2": "flash_attention_2"}
_SQUARE = "gradient's squared norm"


@dataclasses.dataclass(frozen=True)
class Limits:
    """How big a micro-batch may be, and how it is laid out."""

    max_sequences: int | None
    max_tokens: int | None
    round_to: int
    packing: bool
    sharing: bool


class Fsdp2Infer:
    """Scores tokens with a model that is sharded over the role's workers."""

    _trained = False

    def __init__(self, context: StrategyContext) -> None:
        self.context = context
        self.area = "critic" if context.head == "value" else "actor"
        self._weights: Weights | None = None
        self._resident = States.ALL

    def setup(self) -> RankInfo:
        """Joins the process group and loads the model; may be called once per object.

        Raises:
            ValueError: the model or an option cannot be used.
        """
        context = self.context
        torch.manual_seed(context.seed)
        self._device = _device(context.rank)
        config = self._strategy_config()
        _join(context, self._device, alone=not _replicated(config, context.world_size))
        self._weights = self._load(config)
        return RankInfo(context.rank, context.world_size, dp_rank=context.rank, dp_size=context.world_size)

    def logprobs(self, batch: Batch) -> TokenScores:
        """Scores this rank's share (collective; the share may be empty).

        Returns:
            Flat [T]: log-probabilities and entropies, or values of a critic; 0 where the loss mask is 0.
        """
        self._require(States.WEIGHTS)
        limits = self._limits("infer")
        groups = split_batch(batch, **dataclasses.asdict(limits))
        rounds = int(self._gather_counts([len(groups)]).max())
        with torch.no_grad():
            parts = [self._score(take_micro_batch(batch, groups, index), limits) for index in range(max(1, rounds))]
        self.weights.after_scoring()
        return gather_scores(batch, groups, parts)

    def offload(self, what: States) -> None:
        """Moves states to host memory (on a CPU there is nothing to move); using them before ``onload`` is an error."""
        self._move(what & self._resident, torch.device("cpu"))
        self._resident &= ~what

    def onload(self, what: States) -> None:
        """Brings states back to the device."""
        self._move(what & ~self._resident, self._device)
        self._resident |= what

    @property
    def weights(self) -> Weights:
        if self._weights is None:
            raise RuntimeError(f"{self.context.role}: setup() has not been called")
        return self._weights

    def _score(self, micro_batch: Batch, limits: Limits) -> TokenScores:
        inputs = layout(micro_batch, round_to=limits.round_to, packing=limits.packing, sharing=limits.sharing)
        with self.weights.forward_context():
            return score_input(self.weights.scorer, inputs, micro_batch.num_tokens, micro_batch.ref_hidden_TH)

    def _limits(self, phase: str) -> Limits:
        worker = self.context.worker
        dynamic = getattr(worker, f"use_dynamic_batching_in_{phase}")
        per_pass = worker.infer_batch_size if phase == "infer" else worker.training_args.per_device_train_batch_size
        return Limits(
            max_sequences=None if dynamic else per_pass,
            max_tokens=getattr(worker, f"max_tokens_per_microbatch_in_{phase}") if dynamic else None,
            round_to=getattr(worker, f"sequence_length_round_in_{phase}"),
            packing=worker.use_sequence_packing,
            sharing=self._takes_plans,
        )

    def _strategy_config(self) -> Fsdp2Config:
        return Fsdp2Config.model_validate(self.context.worker.strategy_args.strategy_config)

    def _stored_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        """The number format in which the parameters are kept."""
        return compute_dtype

    def _load(self, config: Fsdp2Config) -> Weights:
        args, path = self.context.worker.model_args, self.context.model_path
        # The format in which weights leave: exports and saved models.
        self._model_dtype = resolve_dtype(args.dtype, load_config(path, args.model_config_kwargs))
        compute = self._model_dtype if config.param_dtype is None else resolve_dtype(config.param_dtype)
        scorer = self._make_scorer(self._stored_dtype(compute))
        weights: Weights
        if _replicated(config, self.context.world_size):
            weights = ReplicatedWeights(scorer, self._device, compute_dtype=compute, trained=self._trained)
        else:
            weights = ShardedWeights(scorer, self._device, compute_dtype=compute, config=config)
        load_weights(Path(path), weights, self.context.head, args.model_config_kwargs)
        if self.context.keeps_output_layer:
            scorer.reference_layer = copy_output_layer(weights, compute)
        return weights

    def _make_scorer(self, dtype: torch.dtype) -> TokenScorer:
        args = self.context.worker.model_args
        model = make_skeleton(
            self.context.head,
            self.context.model_path,
            dtype=dtype,
            attn_implementation=ATTENTION.get(args.attn_implementation, args.attn_implementation),
            config_kwargs=args.model_config_kwargs,
        )
        self._takes_plans = self.context.worker.share_prompts and planned_attention.enable(model)
        value = self.context.head == "value"
        head = ValueHead(model.config.get_text_config().hidden_size, dtype) if value else None
        return TokenScorer(
            model,
            temperature=self.context.temperature,
            value_head=head,
            returns_hidden=self.context.returns_hidden,
        )

    def _gather_counts(self, counts: list[float]) -> Tensor:
        """Every rank's counts, shape [ranks, len(counts)] (collective)."""
        row = torch.tensor(counts, dtype=torch.float64)
        return row[None] if self.context.world_size == 1 else all_gather(row)

    def _move(self, what: States, device: torch.device) -> None:
        if States.WEIGHTS in what and self._device.type != "cpu":
            self.weights.move(device)
            scorer = self.weights.scorer
            if scorer.reference_layer is not None:
                scorer.reference_layer = scorer.reference_layer.to(device)

    def _require(self, what: States) -> None:
        if missing := what & ~self._resident:
            raise RuntimeError(f"{self.context.role}: {missing} is offloaded; expected onload() before use")


class Fsdp2Train(Fsdp2Infer):
    """Takes AdamW steps. Weights and moments are float32; ``model_args.dtype`` is what the model computes in."""

    _trained = True

    def setup(self) -> RankInfo:
        info = super().setup()
        args = self.context.worker.model_args
        if not args.disable_gradient_checkpointing:
            _recompute_activations(self.weights.scorer)
        self.reset_optimizer()
        return info

    def reset_optimizer(self) -> None:
        """Forgets Adam's moments and starts the learning-rate schedule again."""
        self._optimizer = make_adamw(self.weights.local, self.weights.shapes, self.context.worker.training_args)
        self._state = TrainerState(total_optimizer_steps=self.context.total_optimizer_steps)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps taken so far."""
        return self._state.optimizer_steps

    def train_step(self, batch: Batch, loss_fn: LossFn) -> Metrics:
        """Takes one optimizer step (collective).

        Args:
            batch: this rank's share of the step's sequences; may be empty.
            loss_fn: called once per micro-batch. Its metrics must have the same names every time.

        Returns:
            The loss's metrics summed over micro-batches and ranks (the same on every rank), and ``loss``,
            ``grad_norm`` before clipping, ``lr``, ``num_tokens``, ``skipped_steps``; of this rank alone,
            ``padding_waste`` and the time. A step with a NaN or infinite loss or gradient, or without loss tokens,
            changes nothing and reports only finite values.
        """
        start = time.perf_counter()
        self._require(States.ALL)
        limits = self._limits("train")
        groups = split_batch(batch, **dataclasses.asdict(limits))
        context, rounds, num_tokens = self._count(batch, len(groups))
        rate = learning_rate(self.context.worker.training_args, self._state.optimizer_steps, self._horizon)
        metrics = {f"{self.area}/lr": rate, f"{self.area}/num_tokens": num_tokens}
        if not limits.packing and not (limits.sharing and worth_sharing(batch)):
            metrics[f"{self.area}/padding_waste"] = padding_waste(batch.lengths_B, groups, limits.round_to)
        taken = False
        try:
            if context.num_tokens > 0:
                metrics |= self._reduce(self._accumulate(batch, groups, rounds, limits, loss_fn, context))
                loss, norm = metrics[self._loss_name], metrics[f"{self.area}/grad_norm"]
                if taken := math.isfinite(loss) and math.isfinite(norm):
                    self._apply(rate, norm)
        finally:
            self.weights.drop_gradients()
        if not taken:
            logger.warning("%s: optimizer step %d skipped: %s", self.context.role, self.optimizer_steps, metrics)
            metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        metrics[f"{self.area}/skipped_steps"] = float(not taken)
        return metrics | {f"time/{self.area}_train_step": time.perf_counter() - start}

    def export_weights(self, bucket_bytes: int) -> Iterator[WeightBucket]:
        """The weights under Hugging Face names in the model's number format, tied ones once.

        Every rank must exhaust the iterator, which gathers one parameter at a time; only rank 0 gets buckets.
        """
        from roll.distributed.weight_sync import pack_buckets

        self._require(States.WEIGHTS)
        named = hf_weights(self.weights, self._model_dtype)
        if self.context.rank == 0:
            yield from pack_buckets(named, bucket_bytes)
        else:
            for _ in named:
                pass

    def save(self, path: Path) -> None:
        """Writes a checkpoint, see ``fsdp2_checkpoint`` (collective)."""
        self._require(States.WEIGHTS | States.OPTIMIZER)
        save_checkpoint(
            path,
            self.weights,
            self._optimizer,
            self._state,
            dtype=self._model_dtype,
            tokenizer_from=self.context.model_path,
        )

    def load(self, path: Path) -> None:
        """Continues from a checkpoint that any number of ranks has written (collective)."""
        self._require(States.WEIGHTS | States.OPTIMIZER)
        state = load_checkpoint(path, self.weights, self._optimizer)
        if state.total_optimizer_steps != self._horizon:
            logger.warning(
                "checkpoint %s: its learning-rate schedule spanned %d optimizer steps, this run's spans %d",
                path,
                state.total_optimizer_steps,
                self._horizon,
            )
        self._state = dataclasses.replace(state, total_optimizer_steps=self._horizon)

    @property
    def _loss_name(self) -> str:
        return f"{self.area}/loss"

    @property
    def _horizon(self) -> int:
        return self.context.total_optimizer_steps

    def _stored_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        if compute_dtype == torch.float16:
            raise ValueError(f"{self.context.role}: training in fp16 needs loss scaling; expected bf16 or fp32")
        return torch.float32

    def _count(self, batch: Batch, num_micro_batches: int) -> tuple[LossContext, int, float]:
        """The loss's denominators, the micro-batches to run, and the tokens of the step, over all ranks."""
        loss_tokens_B = torch.zeros(batch.num_sequences).index_add_(0, batch.rows_T, batch.loss_mask_T.float())
        longest = float(loss_tokens_B.max()) if batch.num_sequences else 0.0
        counts = self._gather_counts(
            [
                float(loss_tokens_B.sum()),
                float((loss_tokens_B > 0).sum()),
                float(batch.num_tokens),
                longest,
                float(num_micro_batches),
            ]
        )
        tokens, sequences, all_tokens = counts[:, :3].sum(0).tolist()
        longest, rounds = counts[:, 3:].amax(0).tolist()
        return LossContext(tokens, sequences, longest, self._state.optimizer_steps), int(rounds), all_tokens

    def _accumulate(
        self, batch: Batch, groups: list[Tensor], rounds: int, limits: Limits, loss_fn: LossFn, context: LossContext
    ) -> dict[str, float | Tensor]:
        """Runs the micro-batches; returns this rank's sums of the loss and its metrics, still on the device."""
        sums: dict[str, float | Tensor] = {}
        for index in range(rounds):
            micro_batch = take_micro_batch(batch, groups, index)
            self.weights.before_backward(last=index == rounds - 1)
            output = loss_fn(self._score(micro_batch, limits), micro_batch, context)
            output.loss.backward()
            for name, value in (output.metrics | {self._loss_name: output.loss.detach()}).items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    def _reduce(self, sums: dict[str, float | Tensor]) -> Metrics:
        """Sums gradients and metrics over the ranks; adds the L2 penalty and the gradient's norm."""
        gradients = self.weights.reduce_gradients()
        if self.context.l2:
            shares = [parameter.detach() for parameter in self.weights.local.values()]
            torch._foreach_add_(gradients, shares, alpha=2 * self.context.l2)
            sums[self._loss_name] += self.context.l2 * _square_norm(shares) / self.weights.copies
        columns = sums | {_SQUARE: _square_norm(gradients) / self.weights.copies}
        names = sorted(columns)
        totals = torch.stack([torch.as_tensor(columns[n], dtype=torch.float64, device=self._device) for n in names])
        if self.context.world_size > 1:
            dist.all_reduce(totals)
        metrics = dict(zip(names, totals.tolist(), strict=True))
        metrics[f"{self.area}/grad_norm"] = metrics.pop(_SQUARE) ** 0.5
        return metrics

    def _apply(self, rate: float, norm: float) -> None:
        limit = self.context.max_grad_norm
        if 0 < limit < norm:
            gradients = [cast(Tensor, parameter.grad) for parameter in self.weights.local.values()]
            torch._foreach_mul_(gradients, limit / norm)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._state.optimizer_steps += 1

    def _move(self, what: States, device: torch.device) -> None:
        super()._move(what, device)
        if States.OPTIMIZER in what and self._device.type != "cpu":
            for moments in self._optimizer.state.values():
                for name in ADAM_STATE:
                    moments[name] = moments[name].to(device)


def _replicated(config: Fsdp2Config, world_size: int) -> bool:
    """Whether every rank holds a whole replica. A lone worker does, unless it offloads to the CPU as FSDP2 can."""
    return not config.cpu_offload and (config.fsdp_size == 1 or world_size == 1)


def _device(rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _join(context: StrategyContext, device: torch.device, *, alone: bool) -> None:
    """Joins the role's process group, or finds it joined by an earlier strategy in this process.

    Args:
        context: rank and world size.
        device: chooses the backend.
        alone: a lone worker gets a group too, because ``fully_shard`` needs one.
    """
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (context.rank, context.world_size):
            raise ValueError(
                f"{context.role}: this process is rank {dist.get_rank()} of {dist.get_world_size()} already, "
                f"expected rank {context.rank} of {context.world_size}"
            )
        return
    # Both backends on a GPU: counts and offloaded shards travel through host memory.
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if context.world_size > 1:
        address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        dist.init_process_group(backend, init_method=address, rank=context.rank, world_size=context.world_size)
    elif alone:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _recompute_activations(scorer: TokenScorer) -> None:
    """Keeps only the layers' inputs and computes the rest again in the backward pass."""
    scorer.model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in decoder_layers(scorer):
        # transformers recomputes only in training mode. Set on the layers alone, so that dropout inside them stays off:
        # the log-probabilities of one policy must not depend on who computes them.
        layer.training = True


def _square_norm(tensors: list[Tensor]) -> Tensor:
    """Sum of squares of all elements, float64."""
    return torch.stack(torch._foreach_norm(tensors)).double().square().sum()
