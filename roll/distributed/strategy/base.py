"""Three small protocols of an engine, and the values that they use.

A strategy hides one engine. It never sees a pipeline and does no RL arithmetic: losses come in as functions of
log-probabilities, weights go out under Hugging Face names.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Collection, Iterator
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from roll.algorithms.quantities import BASIC, Quantity
from roll.algorithms.types import LossFn, TokenScores
from roll.configs.pipeline import PARTS
from roll.configs.worker import ReplayMode
from roll.data.batch import Batch
from roll.data.requests import Completion, GenerateRequest
from roll.data.templates import ChatTemplate
from roll.distributed.weights.buckets import WeightBucket
from roll.models.lora import LoraSpec
from roll.utils.hashing import WrittenFile

if TYPE_CHECKING:
    from roll.configs.worker import WorkerConfig

Metrics: TypeAlias = dict[str, float]


class States(enum.Flag):
    """States that may leave the device while another role uses it."""

    WEIGHTS = enum.auto()
    GRADS = enum.auto()
    OPTIMIZER = enum.auto()
    CACHE = enum.auto()
    """Keys and values of a generator, which are lost when they leave; with the weights, they leave too."""
    ALL = WEIGHTS | GRADS | OPTIMIZER | CACHE


@dataclass(frozen=True)
class RankInfo:
    """A worker's place in its cluster."""

    rank: int
    world_size: int
    dp_rank: int
    """Share of a split batch that this worker takes; ranks with the same dp_rank take the same share."""
    dp_size: int


@dataclass(frozen=True)
class EngineNodes:
    """Place of a worker's node among several that run one engine."""

    address: str
    """Of the first node."""
    port: int
    """A free one there."""
    number: int
    """Of this node; the first takes the requests and the weights."""
    count: int


@dataclass(frozen=True)
class StrategyContext:
    """Everything that a strategy's constructor gets; it is its only argument."""

    worker: WorkerConfig
    """The role's configuration section."""
    role: str
    """Cluster name, for messages: ``actor_train``, ``critic`` …"""
    model_path: str
    """Folder in Hugging Face format."""
    _: KW_ONLY
    tokenizer_path: str | None = None
    """Folder of the tokenizer; ``None``: the model's."""
    rank: int = 0
    world_size: int = 1
    """Place in the role's process group; MASTER_ADDR and MASTER_PORT are set in the environment when world_size > 1."""
    head: Literal["lm", "value", "score"] = "lm"
    """``value``: a scalar head on the same trunk (critic). ``score``: one without bias, saved as a classifier's (reward
    model)."""
    needs: tuple[Quantity, ...] = BASIC
    """What a language model computes of each token's distribution, as the losses of the run ask for it."""
    lora: LoraSpec | None = None
    """The actor trains (and generates with) an adapter; only the adapter is exported after the start."""
    timeout: float = 1800.0
    """Seconds for which a rank waits for the others, as when one reads a model from a slow disk."""
    seed: int = 42
    temperature: float = 1.0
    """Sampling temperature: scores divide the logits by it."""
    max_grad_norm: float = 1.0
    l2: float = 0.0
    """Coefficient of an L2 penalty on the trained weights, added to the loss."""
    total_optimizer_steps: int = 1
    """Horizon of the learning-rate schedule."""
    sequence_length: int = 1024
    """Longest prompt plus completion."""
    max_running_requests: int = 128
    """Most requests that a generating worker runs at once."""
    template: str | ChatTemplate = "native"
    """Chat template of the prompts, as ``ChatRenderer`` takes it: a generator stops where it ends a turn."""
    saves: frozenset[str] = frozenset(PARTS)
    """Parts of a checkpoint that a trainer writes."""
    loads: frozenset[str] = frozenset(PARTS)
    """Parts that it takes up."""
    router_replay: ReplayMode = "disable"
    """``R2``: a trainer tells the experts of its scores, and takes those that a batch brings; ``R3``: it takes those
    alone, and a generator tells its own."""
    updated_after_offload: bool = False
    """All weights are sent anew before each use that follows their leaving the device: nobody needs a copy of them."""
    pictures: bool = False
    """There are pictures in the run's prompts: the model has its tower for them."""
    recompute_kv: bool = False
    """Keys and values of requests in flight are computed anew after an update of weights."""
    nodes: EngineNodes | None = None
    """Of a generator whose devices lie on several nodes."""

    def at_rank(self, rank: int, world_size: int) -> StrategyContext:
        """The same for one worker of a process group."""
        return replace(self, rank=rank, world_size=world_size)


class ScoreStrategy(Protocol):
    """Computes log-probs of given tokens (hf_infer, every *_infer and every trainer)."""

    def setup(self) -> RankInfo: ...
    def shutdown(self) -> None: ...
    def logprobs(self, batch: Batch) -> TokenScores: ...
    def offload(self, what: States) -> None: ...
    def onload(self, what: States) -> None: ...


class TrainStrategy(ScoreStrategy, Protocol):
    """Takes optimizer steps (every ``*_train``)."""

    def logprobs(self, batch: Batch, *, adapter: bool = True) -> TokenScores: ...
    def train_step(self, batch: Batch, loss_fn: LossFn) -> Metrics: ...
    def export_weights(
        self, bucket_bytes: int, ranks: Collection[int] = (0,), *, check: bool = True
    ) -> Iterator[WeightBucket]: ...
    def export_adapter(
        self, bucket_bytes: int, ranks: Collection[int] = (0,), *, check: bool = True
    ) -> Iterator[WeightBucket]: ...
    def save(self, path: Path) -> list[WrittenFile]: ...
    def start_save(self, path: Path) -> Future[list[WrittenFile]]: ...
    def save_model(self, folder: Path) -> None: ...
    def load(self, path: Path) -> None: ...


class GenerateStrategy(Protocol):
    """Samples completions (hf_infer, vllm, sglang)."""

    def setup(self) -> RankInfo: ...
    def shutdown(self) -> None: ...
    async def generate(self, request: GenerateRequest) -> Completion: ...
    async def abort(self, request_id: str) -> None: ...
    async def update_weights(self, buckets: AsyncIterator[WeightBucket], version: int) -> None: ...
    async def update_adapter(self, buckets: AsyncIterator[WeightBucket], version: int) -> None: ...
    async def drain(self) -> None: ...
    def offload(self, what: States) -> None: ...
    def onload(self, what: States) -> None: ...
