"""Pictures in Megatron's model: a tower of Transformers' modules before it, its features in the places of tokens.

Every tensor-parallel rank has the tower whole and computes the same with it, so that its gradients are whole there too,
and are summed over data-parallel ranks like all others.

Axes: R rows, C columns of a whole row, S columns, H hidden units, F features, each in its place.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from roll.data.batch import Batch
from roll.data.identity import vocabulary_ids
from roll.distributed.strategy.base import StrategyContext
from roll.distributed.strategy.megatron.input import MegatronInput
from roll.models.megatron.config import LANGUAGE, rotary_angles, transformers_class
from roll.models.pictures import PictureInput, Tower, pictures_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def take_tower(hf_model: PreTrainedModel) -> nn.ModuleDict:
    """What a model's trunk has beside its language model, if it has more; the rest goes to the meta device."""
    trunk: Any = hf_model.base_model
    parts = {name: part for name, part in trunk.named_children() if name != LANGUAGE and hasattr(trunk, LANGUAGE)}
    taken = {module for part in parts.values() for module in part.modules()}
    for module in hf_model.modules():
        if module not in taken:
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(parameter.to("meta"), requires_grad=False))
    return nn.ModuleDict(parts)


class Sight:
    """The pictures of micro-batches on one rank.

    Args:
        hf_model: whose parts are the tower of the chunk with the embedding.
        layers: of each chunk, their numbers in the whole model.

    Raises:
        ValueError: layers of a later chunk would need features.
    """

    def __init__(
        self,
        context: StrategyContext,
        hf_model: PreTrainedModel,
        chunks: Sequence[Any],
        layers: Sequence[Sequence[int]],
    ) -> None:
        self.tower = Tower(hf_model, pictures_of(context.model_path))
        self._trunk: Any = hf_model.base_model
        text = hf_model.config.get_text_config()
        raised = len(getattr(hf_model.config.vision_config, "deepstack_visual_indexes", ()))
        self._raises: list[_Raise] = []
        for chunk, numbers in zip(chunks, layers, strict=True):
            chunk.angles = functools.partial(rotary_angles, transformers_class(text, "RotaryEmbedding")(text))
            if not hasattr(chunk, "tower") and min(numbers) < raised:
                raise ValueError(
                    f"{context.role}: the first part of the pipeline has {min(numbers)} layers of a model that adds "
                    f"features of pictures behind each of the first {raised}; expected at least {raised} there"
                )
            if hasattr(chunk, "tower"):
                self._raises = [_Raise() for _ in range(raised)]
                for layer, each in zip(chunk.decoder.layers, self._raises, strict=False):
                    layer.register_forward_hook(each)

    def lay_out(self, one: MegatronInput, *, unmodified: bool) -> MegatronInput:
        """A micro-batch with its pictures.

        Args:
            unmodified: it is one sequence, for which values and positions are those of Transformers' own rules.
        """
        if unmodified:
            return replace(one, pictures=self._of_unmodified(one.micro_batch, one.input_ids_RS.shape))
        shape, batch = one.input_ids_RS.shape, one.micro_batch
        if batch.items_I is None:
            return replace(one, pictures=self.tower.of_rows((), torch.zeros(0, dtype=torch.int64), shape))
        rows = np.split(batch.tokens_T.numpy(), np.cumsum(batch.lengths_B.numpy())[:-1])
        cell_T = one.place_T % shape[0] * shape[1] + one.place_T // shape[0]
        pictures = self.tower.of_rows(list(zip(rows, batch.items_I, strict=True)), cell_T, shape)
        return replace(one, pictures=pictures)

    def _of_unmodified(self, row: Batch, shape: Sequence[int]) -> PictureInput:
        values = self.tower.of_unmodified(row)
        kinds_1L = values.pop("mm_token_type_ids", None)
        cells_1C = torch.zeros(shape, dtype=torch.bool)
        cells_1C[0, : row.num_tokens] = torch.from_numpy(self.tower.shows(row.tokens_T.numpy()))
        if not bool(cells_1C.any()):
            return PictureInput([values], (), cells_1C, None)
        if not self.tower.has_positions:
            return PictureInput([values], range(len(values["pixel_values"])), cells_1C, None)
        grids = values["image_grid_thw"]
        ids_1L = vocabulary_ids(row.tokens_T)[None]
        positions_31L = self._trunk.get_rope_index(ids_1L, kinds_1L, image_grid_thw=grids)[0]
        positions_41C = torch.zeros(4, *shape, dtype=torch.int64)
        positions_41C[1:, :, : row.num_tokens] = positions_31L
        return PictureInput([values], range(len(grids)), cells_1C, positions_41C)

    @contextlib.contextmanager
    def at(self, one: MegatronInput, chunk: Any) -> Iterator[dict[str, Any]]:
        """The forward pass of a micro-batch in a chunk, and its arguments: embedded tokens with features in their
        places, and positions."""
        assert one.pictures is not None
        device, positions = one.input_ids_RS.device, one.pictures.positions_4RC
        arguments = {"position_ids": None if positions is None else positions[1:].to(device)}
        if hasattr(chunk, "tower"):
            arguments["decoder_input"] = self._embedded(one, one.pictures, chunk)
        try:
            yield arguments
        finally:
            for each in self._raises:
                each.now = None

    def _embedded(self, one: MegatronInput, pictures: PictureInput, chunk: Any) -> Tensor:
        output = self.tower.see(pictures)["mm_encoder_outputs"]["image"]
        cells_SR = pictures.cells_RC.T.to(one.input_ids_RS.device).contiguous()  # or what is made by it is not
        cuts = chunk.config.sequence_parallel
        embedded: Tensor = chunk.embedding(input_ids=one.input_ids_RS, position_ids=None)
        features = _placed(output.pooler_output, cells_SR, cuts=cuts)
        embedded = torch.where(_share(cells_SR, cuts=cuts)[..., None], features, embedded)
        if not self._raises:
            return embedded
        within = [_placed(each, cells_SR, cuts=cuts) for each in output.deepstack_features]
        leaves = [each.detach().requires_grad_(each.requires_grad) for each in within]
        for each, leaf in zip(self._raises, leaves, strict=True):
            each.now, each.trains = leaf, one.trains
        passed: Tensor = _Passed.apply(embedded, leaves, *within)
        return passed


class _Raise:
    """A layer's hook, which adds features to its output (DeepStack, Meng et al. 2024).

    Layers that are computed again in the backward pass come in the order of their micro-batches.
    """

    now: Tensor | None = None
    """Of the forward pass that runs; ``None`` in a backward pass."""
    trains = False

    def __init__(self) -> None:
        self._again: deque[Tensor] = deque()

    def __call__(self, layer: nn.Module, args: object, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        if (added := self.now) is None:
            added = self._again.popleft()
        elif self.trains and not torch.is_grad_enabled():
            self._again.append(added)
        return output[0] + added, output[1]


def _placed(features: Tensor | Sequence[Tensor], cells_SR: Tensor, *, cuts: bool) -> Tensor:
    """[S, R, H]: features of all places, which come row by row, and zeros elsewhere.

    Args:
        cuts: sequence-parallel ranks have some of the columns each.
    """
    from megatron.core import tensor_parallel

    found = features if isinstance(features, Tensor) else torch.cat([*features])
    row_F, column_F = cells_SR.T.nonzero(as_tuple=True)
    whole = found.new_zeros(*cells_SR.shape, found.shape[-1]).index_put((column_F, row_F), found)
    return cast(Tensor, tensor_parallel.scatter_to_sequence_parallel_region(whole)) if cuts else whole


def _share(cells_SR: Tensor, *, cuts: bool) -> Tensor:
    """This sequence-parallel rank's part."""
    from megatron.core import parallel_state

    if not cuts:
        return cells_SR
    size = parallel_state.get_tensor_model_parallel_world_size()
    return cells_SR.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]


class _Passed(torch.autograd.Function):
    """Embedded tokens, whose gradient is known after that of every layer: then features get theirs.

    Layers that are computed again run backward passes of their own, in which the features are leaves.
    """

    @staticmethod
    def forward(ctx: Any, embedded: Tensor, leaves: list[Tensor], *features: Tensor) -> Tensor:
        ctx.leaves = leaves
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return gradient, None, *(leaf.grad for leaf in ctx.leaves)
