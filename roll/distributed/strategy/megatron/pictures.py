"""Pictures in Megatron's model: a tower of Transformers' modules before it, its features in the places of tokens.

Every tensor-parallel rank has the tower whole and computes the same with it, so that its gradients are whole there too,
and are summed over data-parallel ranks like all others. Axes: R rows, C columns, S columns on this rank, H hidden units.
"""

from __future__ import annotations

import functools
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
    """The pictures of micro-batches, for the chunk with the embedding.

    Args:
        hf_model: whose parts ``chunk.tower`` are.
    """

    def __init__(self, context: StrategyContext, hf_model: PreTrainedModel, chunk: Any) -> None:
        self.tower = Tower(hf_model, pictures_of(context.model_path))
        self._trunk: Any = hf_model.base_model
        self._chunk = chunk
        text = hf_model.config.get_text_config()
        chunk.angles = functools.partial(rotary_angles, transformers_class(text, "RotaryEmbedding")(text))
        self._within: list[Tensor] = []
        """What the first layers' outputs are raised by (DeepStack, Meng et al. 2024), of the micro-batch that runs."""
        for number, _ in enumerate(getattr(hf_model.config.vision_config, "deepstack_visual_indexes", ())):
            chunk.decoder.layers[number].register_forward_hook(functools.partial(self._raise, number))

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

    def _of_unmodified(self, row: Batch, shape: tuple[int, int]) -> PictureInput:
        values = self.tower.of_unmodified(row)
        kinds_1L = values.pop("mm_token_type_ids")
        cells_1C = torch.zeros(shape, dtype=torch.bool)
        cells_1C[0, : row.num_tokens] = row.tokens_T < 0
        if not bool(cells_1C.any()):
            return PictureInput([values], (), cells_1C, None)
        grids = values["image_grid_thw"]
        ids_1L = vocabulary_ids(row.tokens_T)[None]
        positions_31L = self._trunk.get_rope_index(ids_1L, kinds_1L, image_grid_thw=grids)[0]
        positions_41C = torch.zeros(4, *shape, dtype=torch.int64)
        positions_41C[1:, :, : row.num_tokens] = positions_31L
        return PictureInput([values], range(len(grids)), cells_1C, positions_41C)

    def arguments(self, one: MegatronInput) -> dict[str, Any]:
        """Of the chunk's forward pass: embedded tokens with features in their places, and positions."""
        assert one.pictures is not None
        seen = self.tower.see(one.pictures)
        cells_SR = one.pictures.cells_RC.T.to(one.input_ids_RS.device)
        embedded = self._chunk.embedding(input_ids=one.input_ids_RS, position_ids=None)
        output = seen["mm_encoder_outputs"]["image"]
        features = self._placed(output.pooler_output, cells_SR)
        embedded = torch.where(self._share(cells_SR)[..., None], features, embedded)
        within = [self._placed(each, cells_SR) for each in output.get("deepstack_features") or ()]
        self._within = [each.detach().requires_grad_(each.requires_grad) for each in within]
        positions = one.pictures.positions_4RC
        return {
            "decoder_input": _Passed.apply(embedded, self._within, *within) if within else embedded,
            "position_ids": None if positions is None else positions[1:].to(one.input_ids_RS.device),
        }

    def _placed(self, features: list[Tensor], cells_SR: Tensor) -> Tensor:
        """[S, R, H]: features of all places, which come row by row, and zeros elsewhere."""
        from megatron.core import tensor_parallel

        found = torch.cat(features)
        row_F, column_F = cells_SR.T.nonzero(as_tuple=True)
        whole = found.new_zeros(*cells_SR.shape, found.shape[-1]).index_put((column_F, row_F), found)
        if not self._chunk.config.sequence_parallel:
            return whole
        return cast(Tensor, tensor_parallel.scatter_to_sequence_parallel_region(whole))

    def _raise(self, number: int, layer: nn.Module, args: object, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """A forward hook, also where a layer is computed again."""
        return output[0] + self._within[number], output[1]

    def _share(self, cells_SR: Tensor) -> Tensor:
        """This sequence-parallel rank's part."""
        from megatron.core import parallel_state

        if not self._chunk.config.sequence_parallel:
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
