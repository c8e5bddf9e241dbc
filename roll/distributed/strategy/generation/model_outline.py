"""Outline of a model without its weights, for engines that keep theirs in another process or another format."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from roll.data.renderer import turn_ends
from roll.data.templates import ChatTemplate
from roll.distributed.strategy.base import StrategyContext
from roll.distributed.weights.adapters import check_adapter
from roll.distributed.weights.receiver import WeightUpdate
from roll.models.loading import checkpoint_shapes, load_config, make_skeleton, resolve_dtype
from roll.models.lora import LoraSpec, adapted_layers, matrix_shapes
from roll.models.pictures import Tower, tower_of
from roll.models.planned_attention import find_state_layers
from roll.models.tokenizer import check_vocabulary, load_tokenizer, locate_model

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from roll.configs.engines.card import EngineCard


class ModelOutline:
    """A role's model on the meta device, with its Hugging Face names and shapes.

    Raises:
        ValueError: the folder holds no model or no tokenizer.
    """

    def __init__(self, context: StrategyContext) -> None:
        args = context.worker.model_args
        trusts = args.trust_remote_code
        config = load_config(context.model_path, args.model_config_kwargs, trust_remote_code=trusts)
        self.dtype = resolve_dtype(args.dtype, config)
        with torch.device("meta"):
            self._model: PreTrainedModel = make_skeleton(
                "lm",
                context.model_path,
                dtype=self.dtype,
                config_kwargs=args.model_config_kwargs,
                trust_remote_code=trusts,
                pictures=context.pictures,
            )
        self.config = self._model.config
        text = self.config.get_text_config()
        self.is_whole = context.pictures or config.get_text_config() is config
        """An update sends all of it: there is no tower beside it that stays as the engine has loaded it."""
        self.text_config = text
        """The language model's part of the configuration."""
        self.vocab_size: int = text.vocab_size
        self.max_positions: int | None = getattr(text, "max_position_embeddings", None)
        tokenizer = load_tokenizer(context.tokenizer_path or context.model_path, alone=True, trust_remote_code=trusts)
        check_vocabulary(tokenizer, self.vocab_size)
        self.stop_ids = stop_token_ids(_generation_config(context.model_path, self._model), tokenizer, context.template)
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        self.head_size: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self.cache_bytes_per_token = 2 * text.num_hidden_layers * heads * self.head_size * self.dtype.itemsize
        """Keys and values of one position, over all layers."""
        self.has_states = bool(find_state_layers(self._model))
        """Some layers carry a state along a sequence."""

    def check_weights(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Checks that ``tensors`` are all of the model's weights, by name, shape and ties.

        Returns:
            The tensors to load, as (name in ``tensors``, name in a checkpoint): each tied weight once, no buffers.

        Raises:
            WeightMismatchError: see ``WeightUpdate``.
        """
        parts = WeightUpdate(self._model, tensors).parts
        first: dict[int, str] = {}
        chosen: dict[str, str] = {}
        """Names in a checkpoint, and those to load them from."""
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            own = first.setdefault(id(parameter), name)
            for part, own_part in zip(parts[name], parts[own], strict=True):
                if part in tensors:
                    chosen.setdefault(own_part, part)
        return {part: own_part for own_part, part in chosen.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the weights by their names in a checkpoint, tied ones once."""
        parameters = dict(self._model.named_parameters())
        parts = checkpoint_shapes(self._model, parameters).values()
        return {name: tuple(shape) for each in parts for name, shape in each.items()}

    def check_role(self, context: StrategyContext) -> None:
        """Checks that the model has positions for the role's longest sequence, and the targets of its adapter.

        Raises:
            ValueError: it has not.
        """
        if self.max_positions is not None and context.sequence_length > self.max_positions:
            raise ValueError(
                f"sequence_length: {context.sequence_length}, but the model has positions for at most "
                f"{self.max_positions}"
            )
        if context.lora is not None:
            adapted_layers(self._model, context.lora.targets, context.lora.excluded)

    def tower(self, context: StrategyContext, card: EngineCard) -> Tower | None:
        """Layout of the model's pictures, without the tower's weights; ``None`` of a role whose prompts have none.

        Raises:
            ValueError: the engine was not compared on pictures of the model's family.
        """
        if not context.pictures:
            return None
        if why := card.blind_to(self.config.model_type, context.worker):
            raise ValueError(f"{context.role}: {context.worker.strategy_args.strategy_name} {why}")
        return tower_of(self._model, context.model_path)

    def empty_adapter(self, spec: LoraSpec) -> dict[str, Tensor]:
        """An adapter that changes nothing: all zeros."""
        return {name: torch.zeros(shape) for name, shape in matrix_shapes(self._model, spec).items()}

    def check_adapter(self, spec: LoraSpec | None, tensors: Mapping[str, Tensor]) -> LoraSpec:
        """See ``adapters.check_adapter``."""
        return check_adapter(self._model, spec, tensors)


def stop_token_ids(
    generation_config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase, template: str | ChatTemplate
) -> list[int]:
    """Every token that ends a completion: those of the generation defaults, of the tokenizer and of the chat template.

    Args:
        template: as ``ChatRenderer`` takes it; where there is none, turns end as sequences do.
    """
    stated = generation_config.eos_token_id if generation_config is not None else None
    ids = stated if isinstance(stated, list) else [stated]
    ends = turn_ends(tokenizer, template)
    found = sorted({int(i) for i in [*ids, tokenizer.eos_token_id, *ends] if i is not None})
    if not found:
        logger.warning(
            "no token ends a completion: generation_config.json, tokenizer and chat template name none; "
            "every response runs to its length limit"
        )
    return found


def _generation_config(path: str, model: PreTrainedModel) -> GenerationConfig | None:
    """The one that loading the model would give it."""
    from transformers import GenerationConfig

    path, local = locate_model(path)
    try:
        return GenerationConfig.from_pretrained(path, local_files_only=local)
    except OSError:  # no generation_config.json
        return model.generation_config
