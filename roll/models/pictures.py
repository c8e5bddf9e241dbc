"""Pictures in a model's forward pass: features of each once, in all of its places, and the positions of its tokens.

The model's own class computes features, positions and logits, and knows nothing of packed rows or of prompts that are
there once; what is here lays out for it what it computes of one sequence.

Axes: R x C the model's input, N its cells, T tokens of a batch, L those of one sequence; 3 the positions of a token in
time, height and width, 4 its place in the sequence before them.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from roll.data.batch import Batch
from roll.data.columns import BoolArray, IntArray, Item
from roll.data.identity import items_along, spans_along, vocabulary_ids
from roll.data.packing import ModelInput
from roll.models.tokenizer import TOKENIZER_FILES, local_folder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from roll.data.pictures import Pictures

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_vl_moe", "llava", "glm4v", "gemma3", "mistral3")
"""Values of ``model_type`` that ``tests/parity/test_pictures.py`` has compared with plain Transformers.

What a family wants of a picture, its class says by the arguments that it has, and its processor by what it writes."""
TOWERS = {"llava": "clip_vision_model"}
"""Of families whose towers are of several kinds, the one that was compared."""
VIDEO_FAMILIES = ("qwen3_vl",)
"""Likewise on videos."""
_JOINED_ROWS, _LEAST_ROWS = 1024, 16
"""Tokens of the pictures that go through a tower together where no bit may depend on the others: at most, unless one
picture has more, and at least."""
_ONE_SEQUENCE = ("mistral3",)
"""Families whose tower attends over the pictures of a pass as over one sequence: the last bits of a picture's features
then depend on its place in it, on processors with AVX-512."""
_KNOWN_POSITIONS = 1024
"""Arrangements of words and pictures that a tower remembers the positions of: those of a group's prompts are equal."""


def pictures_problem(config: PreTrainedConfig) -> str:
    """Why a model is not given pictures, in words that follow its name; empty if it is."""
    if config.model_type in FAMILIES:
        seen, compared = config.vision_config.model_type, TOWERS.get(config.model_type)
        if compared in (None, seen):
            return ""
        return f"has been compared with plain Transformers with a {compared} alone, not with a {seen}"
    return f"has not been compared with plain Transformers on pictures; expected one of {', '.join(FAMILIES)}"


@dataclass(frozen=True, eq=False)
class PictureInput:
    """The pictures of one forward pass."""

    values: Sequence[Mapping[str, Tensor]]
    """What the tower takes, of one or several of the distinct pictures at a time."""
    order: Sequence[int]
    """The picture in each place, places in the order of cells."""
    cells_RC: Tensor
    """bool: cells that get features."""
    positions_4RC: Tensor | None
    """int64; ``None``: as without pictures."""
    taken_F: Tensor | None = None
    """bool: of the features of all places, those that ``cells_RC`` get; ``None``: all."""
    repeated: Sequence[tuple[int, int]] = ()
    """For each of ``values``, whose pictures are of one size: how many there are, and how many of these, the last ones,
    repeat another."""

    def distinct_values(self) -> list[Mapping[str, Tensor]]:
        """``values`` without repeated pictures."""
        pairs = zip(self.values, self.repeated or [(1, 0)] * len(self.values), strict=True)
        return [{name: x[: len(x) - len(x) // n * again] for name, x in each.items()} for each, (n, again) in pairs]

    def of_columns(self, start: int, width: int) -> PictureInput:
        """What a rank takes that has so many columns, padding among them: the tower gets all pictures."""
        cells_RC, positions = self.cells_RC, self.positions_4RC
        missing = (0, max(0, start + width - cells_RC.shape[1]))
        columns = slice(start, start + width)
        here_C = torch.zeros(cells_RC.shape[1], dtype=torch.bool)
        here_C[columns] = True
        return replace(
            self,
            cells_RC=nn.functional.pad(cells_RC, missing)[:, columns],
            positions_4RC=None if positions is None else nn.functional.pad(positions, missing)[..., columns],
            taken_F=here_C.expand_as(cells_RC)[cells_RC],
        )


class Tower:
    """The vision tower of a model, and what the model needs to be told of pictures.

    Args:
        model: of a class that takes pictures; a causal language model or its trunk.
        pictures: the picture processor of its folder.
        apart: with one thread on a CPU, no bit of a picture's features depends on what other pictures there are, if the
            tower's layers have multiples of 32 units (functions of what is left at a tensor's end round differently).

    Raises:
        ValueError: no test has compared such a model.
    """

    def __init__(self, model: PreTrainedModel, pictures: Pictures, *, apart: bool = False) -> None:
        if problem := pictures_problem(model.config):
            raise ValueError(f"{model.config.model_type} {problem}")
        self._trunk: Any = model.base_model
        self.pictures = pictures
        self._apart = apart
        self._in_one_sequence = model.config.model_type in _ONE_SEQUENCE
        self._blank = Item(np.zeros((*pictures.smallest, 3), dtype=np.uint8))
        self._token = model.config.image_token_id
        self._tokens = [self._token, getattr(model.config, "video_token_id", self._token)]
        self.has_positions = hasattr(self._trunk, "get_rope_index")
        """A picture's tokens have positions in height and width."""
        taken = inspect.signature(self._trunk.forward).parameters.keys()
        self._kinds = [name for name in ("mm_token_type_ids", "token_type_ids") if name in taken]
        """What the model's forward calls the marks of pictures' tokens, if it wants them."""
        self.both_ways = "token_type_ids" in taken
        """A picture's tokens see each other, those behind them too."""
        kernel = model.config.get_text_config()._attn_implementation
        if self.both_ways and "flash" in (kernel or ""):
            raise ValueError(
                f"attn_implementation: got {kernel}, expected auto, sdpa or eager: a picture's tokens see each other "
                f"both ways in {model.config.model_type}, which it leaves out"
            )
        self._begin = functools.lru_cache(_KNOWN_POSITIONS)(self._own_positions)
        self.observer: Callable[[Sequence[Mapping[str, Tensor]], Sequence[Tensor]], None] | None = None
        """Is told what the tower was given, and the features that it has made, in their places."""
        self._cells_RC: Tensor | None = None
        # Of the class: another tower of the same model has put its own in its place.
        kind: Any = type(self._trunk)
        own_cells = functools.partial(kind.get_placeholder_mask, self._trunk)
        self._own_cells = own_cells
        self._knows_videos = "video_features" in inspect.signature(own_cells).parameters
        self._trunk.get_placeholder_mask = self._find_cells  # type: ignore[assignment]

    def of_batch(self, inputs: ModelInput) -> PictureInput:
        """The pictures of a micro-batch, on the CPU."""
        shape = inputs.input_ids_RC.shape
        batch = inputs.pictured
        if batch is None:
            return self.of_rows((), torch.zeros(0, dtype=torch.int64), shape)
        rows = batch.tokens_T.numpy(), np.cumsum(batch.lengths_B.numpy())[:-1]
        assert batch.items_I is not None
        pairs = zip(np.split(*rows), batch.items_I, strict=True)
        return self.of_rows(list(pairs), inputs.cell_T, shape, inputs.position_ids_RC)

    def of_rows(
        self,
        rows: Sequence[tuple[IntArray, Iterable[Item]]],
        cell_T: Tensor,
        shape: Sequence[int],
        position_ids_RC: Tensor | None = None,
    ) -> PictureInput:
        """The same of sequences, each with its pictures.

        Args:
            cell_T: index into N of each token of the sequences end to end.
            shape: R and C.
            position_ids_RC: each token's place in its sequence; ``None``: each row counts from 0.

        Raises:
            ValueError: a sequence has content of none of its pictures, or a picture more or fewer tokens than features.
        """
        found = [spans_along(ids, items) for ids, items in rows]
        places: dict[int, Item] = {}
        start, cells = 0, cell_T.tolist()
        for (ids, _), along in zip(rows, found, strict=True):
            for place, size, item in along:
                self._check_size(item, int(self.shows(ids[place : place + size]).sum()))
                places[cells[start + place]] = item
            start += len(ids)
        shown = [places[cell] for cell in sorted(places)]
        # A rank without a picture would wait for the others, whose towers gather their weights: it looks at a blank.
        items = list(dict.fromkeys(shown)) or [self._blank]
        passes = self._of_equal_sizes(items) if self._apart else [items]
        # A repeated picture is that of its last place.
        numbers = {item: number for number, item in enumerate(itertools.chain.from_iterable(passes))}
        values = [self._values(each) for each in passes]
        repeated = [(len(each), len(each) - len({*each})) for each in passes]
        ids_T = np.concatenate([ids for ids, _ in rows]) if rows else np.zeros(0, dtype=np.int64)
        cells_N = torch.zeros(shape[0] * shape[1], dtype=torch.bool)
        cells_N[cell_T[torch.from_numpy(self.shows(ids_T))]] = True
        positions = None
        if places and self.has_positions:
            grids = torch.cat([each["image_grid_thw"] for each in values])
            positions_3T = self.positions(rows, found, lambda item: grids[numbers[item]])
            positions_3N = torch.zeros(3, cells_N.numel(), dtype=torch.int64)
            positions_3N[:, cell_T] = positions_3T
            own_RC = torch.arange(shape[1]).expand(*shape) if position_ids_RC is None else position_ids_RC
            positions = torch.cat([own_RC[None], positions_3N.view(3, *shape)])
        return PictureInput(
            values,
            [numbers[item] for item in shown],
            cells_N.view(*shape),
            positions,
            repeated=repeated if self._apart else (),
        )

    def see(self, pictures: PictureInput) -> dict[str, Any]:
        """Arguments of the trunk's next forward pass: features, computed here, and positions.

        Raises:
            ValueError: the tower makes more or fewer features than pictures have tokens.
        """
        device = self._trunk.device
        outputs = [
            self._trunk.get_image_features(**{name: x.to(device) for name, x in each.items()}, return_dict=True)
            for each in pictures.values
        ]
        output = outputs[0]
        taken_F = None if pictures.taken_F is None else pictures.taken_F.to(device)
        features = _in_places([x for each in outputs for x in each.pooler_output], pictures)
        cells = int(pictures.cells_RC.sum()) if taken_F is None else len(taken_F)
        if (made := sum(map(len, features))) != cells:
            raise ValueError(
                f"the tower makes {made} features of pictures that have {cells} tokens: the entries of the picture "
                "processor and config.json do not fit; expected those that were published together"
            )
        if self.observer is not None:
            self.observer(pictures.distinct_values(), features)
        if taken_F is not None:
            features = [torch.cat(features)[taken_F]]
        output.pooler_output = torch.cat(features) if isinstance(output.pooler_output, Tensor) else features
        if "deepstack_features" in output:
            layers = zip(*(each.deepstack_features for each in outputs), strict=True)
            raised = [_in_places([x for part in layer for x in part], pictures) for layer in layers]
            output.deepstack_features = raised if taken_F is None else [[torch.cat(each)[taken_F]] for each in raised]
        self._cells_RC = pictures.cells_RC.to(device)
        positions = pictures.positions_4RC
        arguments = {} if positions is None else {"position_ids": positions.to(device)}
        if self.both_ways:
            arguments["token_type_ids"] = self._cells_RC.int()
        return {"mm_encoder_outputs": {"image": output}, **arguments}

    def ahead(self, pictures: PictureInput, cell: int) -> int:
        """By how much positions are ahead of places in a sequence behind its last cell."""
        if pictures.positions_4RC is None:
            return 0
        place, *positions = pictures.positions_4RC.flatten(1)[:, cell].tolist()
        return max(positions) - place

    def of_unmodified(self, row: Batch) -> dict[str, Tensor]:
        """Arguments of the unmodified model for one sequence, as the model's processor makes them.

        One without pictures brings a blank, of which nothing is put anywhere: all ranks go through the tower.

        Raises:
            ValueError: pixels are not those that the sequence's ids were made of, or what the tower is given of them is
                not what the processor makes.
        """
        items = () if row.items_I is None else row.items_I[0]
        try:
            along = items_along(row.tokens_T, [Item(item.data) for item in items])  # hashed again
        except ValueError as error:
            raise ValueError(f"pixels have changed since a row's ids were made of them: {error}") from error
        cells_RC = torch.from_numpy(self.shows(row.tokens_T.numpy()))[None]
        kinds = dict.fromkeys(self._kinds, cells_RC.int())
        if not along:
            self._cells_RC = cells_RC.to(self._trunk.device)
            return self._values([self._blank]) | kinds
        shown = [item for _, item in along]
        if any(item.data.ndim == 4 for item in shown):
            # Given as a video, a row with pictures too would go through the tower twice, and other ranks would not.
            self._cells_RC = cells_RC.to(self._trunk.device)
        values = {name: torch.from_numpy(x) for name, x in self.pictures.inputs_by_processor(shown).items()}
        for name, found in self._values(shown).items():
            if not torch.equal(found, values[name]):
                raise ValueError(f"{name} of a row's pictures are not those that the model's picture processor makes")
        return values | kinds

    def shows(self, ids: IntArray) -> BoolArray:
        """The ids in whose places the model puts a picture's features."""
        shown: BoolArray = (ids < 0) & np.isin(vocabulary_ids(ids), self._tokens)
        return shown

    def _of_equal_sizes(self, items: Iterable[Item]) -> list[list[Item]]:
        """Pictures that may go through the tower together although no bit may depend on the others: of one size.

        Kernels add up in another order where there are few rows, so the last one is repeated until there are enough.
        """
        sizes: dict[tuple[int, ...], list[Item]] = {}
        for item in items:
            sizes.setdefault(item.data.shape, []).append(item)
        passes = []
        for alike in sizes.values():
            rows = sum(map(self.pictures.ids(alike[0]).count, {*self._tokens}))
            most = 1 if self._in_one_sequence else max(_JOINED_ROWS // rows, 1)
            least = -(-_LEAST_ROWS // rows)
            for start in range(0, len(alike), most):
                part = alike[start : start + most]
                passes.append(part + part[-1:] * (least - len(part)))
        return passes

    def _check_size(self, item: Item, size: int) -> None:
        ids = self.pictures.ids(item)
        if size != (expected := sum(map(ids.count, {*self._tokens}))):
            *_, high, wide, _ = item.data.shape
            raise ValueError(
                f"a picture of {wide} x {high} pixels: got {size} tokens in its row, expected {expected}, as many "
                "as the tower makes features of it"
            )

    def _values(self, items: Sequence[Item]) -> dict[str, Tensor]:
        return {name: torch.from_numpy(values) for name, values in self.pictures.inputs(items).items()}

    def positions(
        self,
        rows: Iterable[tuple[IntArray, object]],
        found: Iterable[Sequence[tuple[int, int, Item]]],
        grid_of: Callable[[Item], Tensor],
    ) -> Tensor:
        """int64 [3, T]: by the model's own rule to the end of a row's last picture, behind it one after another.

        Args:
            rows: their ids come first.
            found: the pictures of each row (``spans_along``).
            grid_of: ``image_grid_thw`` of a picture, [3].
        """
        parts = []
        for (ids, _), along in zip(rows, found, strict=True):
            if not along:
                parts.append(torch.arange(len(ids)).expand(3, -1))
                continue
            shows = self.shows(ids)
            head = shows[: int(np.flatnonzero(shows)[-1]) + 1]
            head_3L = self._begin(head.tobytes(), tuple(tuple(grid_of(item).tolist()) for *_, item in along))
            rest = torch.arange(len(ids) - len(head)) + int(head_3L.max()) + 1
            parts += [head_3L, rest.expand(3, -1)]
        return torch.cat(parts, dim=1)

    def _own_positions(self, shown: bytes, grids: tuple[tuple[int, ...], ...]) -> Tensor:
        """int64 [3, L] of a beginning with pictures.

        Args:
            shown: a byte for each of its tokens, 1 for those of pictures.
        """
        kinds = torch.frombuffer(bytearray(shown), dtype=torch.uint8).long()[None]
        ids, sizes = kinds * self._token, torch.tensor(grids)
        positions: Tensor = self._trunk.get_rope_index(ids, kinds, image_grid_thw=sizes)[0][:, 0]
        return positions

    def _find_cells(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the model's own, which takes each token of a number for a picture's: a policy may sample it."""
        cells_RC, self._cells_RC = self._cells_RC, None
        if cells_RC is None:
            return self._own_cells(*args, **kwargs)
        cells = cells_RC[..., None]
        return (cells, torch.zeros_like(cells)) if self._knows_videos else cells


def tower_of(model: PreTrainedModel, path: str, *, apart: bool = False) -> Tower:
    """That of a model, with its picture processor.

    Raises:
        ValueError: no test has compared such a model, or the processor cannot be used.
    """
    return Tower(model, pictures_of(path), apart=apart)


def pictures_of(path: str) -> Pictures:
    """The picture processor of a model's folder, or of its name on the hub.

    Raises:
        ValueError: it cannot be used.
    """
    from roll.data.pictures import Pictures

    pictures = Pictures(local_folder(path, "*.json", *TOKENIZER_FILES))
    assert pictures.token >= 0, "loaded here, since it may be unusable"
    return pictures


def _in_places(features: Sequence[Tensor], pictures: PictureInput) -> list[Tensor]:
    """Features [cells, H] of all places; without any, none of a blank's, which gets a gradient of zeros."""
    return [features[number] for number in pictures.order] or [features[0][:0]]
