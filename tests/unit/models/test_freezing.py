"""Which parameters a prefix freezes, in whole models and trunks."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, Qwen2Config

from roll.models.freezing import UnknownPartError, freeze, frozen_parameters


def model_of(kind: type = AutoModelForCausalLM, **config: object):
    shape = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 12}
    with torch.device("meta"):
        return kind.from_config(Qwen2Config(**shape, num_attention_heads=2, num_key_value_heads=1, **config))


def test_a_prefix_is_a_whole_name_and_something_is_left_to_train() -> None:
    frozen = frozen_parameters(model_of(), ["model.layers.1"])
    assert frozen and {name.split(".")[2] for name in frozen} == {"1"}
    assert frozen_parameters(model_of(), ["model.norm.weight"]) == {"model.norm.weight"}
    for unknown in ("model.layers.", "layers.1", "model.layer"):
        with pytest.raises(UnknownPartError, match="the nearest: model"):
            frozen_parameters(model_of(), [unknown])
    with pytest.raises(UnknownPartError, match="something left to train"):
        frozen_parameters(model_of(tie_word_embeddings=True), ["model"])
    assert frozen_parameters(model_of(AutoModel), ["model"], head=True)


def test_a_tied_parameter_is_frozen_by_each_of_its_names() -> None:
    both = {"model.embed_tokens.weight", "lm_head.weight"}
    for name in ("model.embed_tokens", "lm_head"):
        assert frozen_parameters(model_of(tie_word_embeddings=True), [name]) == both
        assert len(frozen_parameters(model_of(tie_word_embeddings=False), [name])) == 1


def test_a_trunk_has_the_names_of_the_whole_model() -> None:
    trunk = model_of(AutoModel)
    freeze(trunk, ["model.layers.0", "model.norm"])
    still = {name for name, parameter in trunk.named_parameters() if not parameter.requires_grad}
    assert {name.split(".")[0] for name in still} == {"layers", "norm"}
    assert not any(name.startswith("layers.1") for name in still)
