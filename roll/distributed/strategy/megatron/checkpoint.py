"""A Megatron trainer's state on its way to and from checkpoints that any engine and layout can continue from.

Weights travel under the names of a Hugging Face checkpoint, Adam's moments under those of the Hugging Face module,
which holds all experts of a layer in two tensors. Every rank reads the folder by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from roll.distributed.strategy.base import StrategyContext
from roll.distributed.strategy.megatron.model import MegatronModel, folder_reader, own_parts
from roll.distributed.strategy.megatron.optimizer import MegatronAdam
from roll.distributed.strategy.megatron.weights import Part, WeightGatherer
from roll.distributed.strategy.training.agreement import raise_on_all_ranks
from roll.distributed.strategy.training.checkpoint import HEAD_PREFIX, MODEL_PREFIX, adapter_tensors
from roll.distributed.strategy.training.optim import ADAM_STATE, MASTER
from roll.distributed.strategy.training.pieces import Piece
from roll.distributed.strategy.training.tensor_files import Reader
from roll.models.loading import Head
from roll.models.lora import SCORE_NAME

_EXPERT = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<number>\d+)\.(?P<part>gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class TrainedModel:
    """``checkpoint.Trained`` for a model that lies on the ranks in Megatron's way."""

    model: MegatronModel
    gatherer: WeightGatherer
    optimizer: MegatronAdam
    context: StrategyContext

    @property
    def device(self) -> torch.device:
        return next(self.model.chunks[0].parameters()).device

    @property
    def _adapts(self) -> bool:
        """A LoRA adapter is all that is trained."""
        return self.context.lora is not None

    @property
    def kinds(self) -> Sequence[str]:
        return ADAM_STATE

    def tensors(self, kind: str) -> list[Piece]:
        def pieces(part: Part) -> list[Piece]:
            return self.gatherer.pieces(part, torch.float32, lambda parameter: self.optimizer.share(parameter, kind))

        head = [piece.renamed(lambda name: HEAD_PREFIX + name) for piece in pieces("head")]
        if self._adapts:
            return [*pieces("adapter"), *head]
        # Nothing of what is frozen, of which no rank updates a part, or of tied embeddings' copy, which has no name.
        updated = [one for one in pieces("trunk") if one.outline and all(spread.regions for spread in one.spreads)]
        trunk = _module_pieces(updated, self.model.converted.num_experts)
        return [*(piece.renamed(partial(saved_name, head=self.context.head)) for piece in trunk), *head]

    def fill(self, kind: str, read: Reader) -> None:
        with raise_on_all_ranks():
            reader = read if self._adapts else _checkpoint_reader(read, self.context.head)
            self._set(kind, reader, updated=True)

    def load(self, path: Path) -> None:
        with raise_on_all_ranks():
            self._set(MASTER, self._adapter_reader(path) if self._adapts else folder_reader(self.model, path))

    def _adapter_reader(self, path: Path) -> Reader:
        """Reads a peft folder by its names, and its head by that of a parameter here."""
        names = [name for piece in adapter_pieces(self.gatherer) for name in piece.outline]
        stored = adapter_tensors(path, names)
        return lambda name: stored.get(SCORE_NAME if name.startswith(HEAD_PREFIX) else name)

    def set_steps(self, steps: int) -> None:
        self.optimizer.set_step(steps)

    @torch.no_grad()
    def _set(self, kind: str, read: Reader, *, updated: bool = False) -> None:
        adapts = self._adapts  # then an adapter is trained, and the head beside it
        for parameter, part in own_parts(
            self.model, read, adapter=None if adapts else False, trained=updated or adapts
        ):
            if kind == MASTER:
                parameter.copy_(part)
            self.optimizer.set(parameter, kind, part)


def adapter_pieces(gatherer: WeightGatherer) -> list[Piece]:
    """The adapter, and the head beside it, in float32 under the names of a peft folder."""
    head = [piece.renamed(lambda _: SCORE_NAME) for piece in gatherer.pieces("head", torch.float32)]
    return [*gatherer.pieces("adapter", torch.float32), *head]


def _checkpoint_reader(read: Reader, head: Head) -> Reader:
    """Reads by the name in a Hugging Face checkpoint what ``read`` has by that in the module."""

    @lru_cache(maxsize=2)  # a layer's experts are asked for one after the other
    def module_tensor(name: str) -> Tensor:
        return read(saved_name(name, head))

    def checkpoint_tensor(name: str) -> Tensor:
        found = _EXPERT.fullmatch(name)
        if not found:
            return module_tensor(name)
        number, part = int(found["number"]), found["part"]
        if part == "down":
            return module_tensor(f"{found['experts']}.down_proj")[number]
        return module_tensor(f"{found['experts']}.gate_up_proj")[number].chunk(2)[0 if part == "gate" else 1]

    return checkpoint_tensor


def _module_pieces(pieces: Iterable[Piece], num_experts: int) -> list[Piece]:
    """The same, all of a layer's experts in one piece."""
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        name = next(iter(piece.outline))
        found = _EXPERT.fullmatch(name)
        groups.setdefault(found["experts"] if found else name, []).append(piece)
    return [_one_piece(group, num_experts) for group in groups.values()]


def _one_piece(group: list[Piece], num_experts: int) -> Piece:
    def make(whole: Sequence[Tensor]) -> dict[str, Tensor]:
        rest = iter(whole)
        made = (piece.make(list(islice(rest, len(piece.spreads)))) for piece in group)
        return dict(_module_tensors((pair for tensors in made for pair in tensors.items()), num_experts))

    return Piece([spread for piece in group for spread in piece.spreads], make)


def _module_tensors(named: Iterable[tuple[str, Tensor]], num_experts: int) -> Iterator[tuple[str, Tensor]]:
    """From a checkpoint's names to those of the Hugging Face module: a layer's experts become two tensors."""
    parts: dict[tuple[int, str], Tensor] = {}
    for name, tensor in named:
        found = _EXPERT.fullmatch(name)
        if not found:
            yield name, tensor
            continue
        parts[int(found["number"]), found["part"]] = tensor
        if len(parts) == 3 * num_experts:
            gates_ups = [torch.cat([parts[e, "gate"], parts[e, "up"]]) for e in range(num_experts)]
            yield f"{found['experts']}.gate_up_proj", torch.stack(gates_ups)
            yield f"{found['experts']}.down_proj", torch.stack([parts[e, "down"] for e in range(num_experts)])
            parts.clear()


def saved_name(name: str, head: Head) -> str:
    """The name in the module: a trunk's have no prefix."""
    return name if head == "lm" else name.removeprefix(MODEL_PREFIX)
