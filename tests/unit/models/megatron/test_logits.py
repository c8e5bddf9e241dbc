"""Megatron-Core's own model, filled by the converter, computes what Transformers does, and gives the weights back."""

import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from roll.models.megatron.config import MegatronModelConfig, megatron_config, padded_vocab_size, set_rotary
from roll.models.megatron.names import ParallelLayout, join, load_shards
from tests.support.megatron_models import CONFIGS, PLAIN, checkpoint, make_model, parameter_names

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

WHOLE = ParallelLayout(layers=(0, 1, 2))


@pytest.fixture
def start_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Starts Megatron's groups as one rank of a world whose other ranks are not there; nothing may communicate."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from roll.distributed.strategy.megatron.substitutes import redirect_to_cpu

    redirect_to_cpu()
    # Without TransformerEngine, megatron-core 0.16.1 reads this name where it never set it.
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)

    def stop() -> None:
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()

    def start(rank: int = 0, world: int = 1, *, tp: int = 1, pp: int = 1, ep: int = 1, etp: int | None = None) -> None:
        stop()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            create_gloo_process_groups=False,
        )

    yield start
    stop()


def build(config: MegatronModelConfig, **arguments: Any) -> nn.Module:
    """A model of Megatron's own modules, with the weights that ``torch.empty`` left."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    model_parallel_cuda_manual_seed(1)
    tp = parallel_state.get_tensor_model_parallel_world_size()
    transformer = TransformerConfig(
        **config.transformer,
        **arguments,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    model: nn.Module = GPTModel(
        transformer,
        get_gpt_decoder_block_spec(transformer, use_transformer_engine=False, normalization="RMSNorm"),
        **{**config.model, "vocab_size": padded_vocab_size(config.vocab_size, tp)},
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    set_rotary(model, config)
    return model.eval()


def layout_of(model: Any) -> ParallelLayout:
    from megatron.core import parallel_state

    return ParallelLayout(
        layers=tuple(layer.layer_number - 1 for layer in model.decoder.layers),
        first_stage=model.pre_process,
        last_stage=model.post_process,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        expert_tp_size=parallel_state.get_expert_tensor_parallel_world_size(),
    )


@torch.no_grad()
def fill(model: nn.Module, weights: dict[str, Tensor], config: MegatronModelConfig, layout: ParallelLayout) -> None:
    parameters = dict(model.named_parameters())
    for name, part in load_shards(weights.__getitem__, parameters, config, layout):
        assert part.shape == parameters[name].shape, name
        parameters[name].copy_(part)


@torch.no_grad()
def logits(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    length = tokens_BT.shape[1]
    hidden_from = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    logits_BTV: Tensor = model(tokens_BT, torch.arange(length).expand_as(tokens_BT), hidden_from)
    return logits_BTV


@pytest.mark.parametrize("case", [*PLAIN, "llama yarn"])
def test_same_logits_and_the_same_weights_back(case, start_groups):
    start_groups()
    reference = make_model(CONFIGS[case])
    weights, config = checkpoint(reference), megatron_config(CONFIGS[case])
    model = build(config)
    fill(model, weights, config, WHOLE)
    tokens_BT = torch.randint(97, (2, 60), generator=torch.Generator().manual_seed(1))
    expected_BTV = reference(tokens_BT).logits.detach()
    assert expected_BTV.std() > 0.3
    torch.testing.assert_close(logits(model, tokens_BT), expected_BTV, atol=1e-5, rtol=0)
    joined = (join(name, [part.data], config, WHOLE) for name, part in model.named_parameters())
    back = {hf: whole for parameter in joined for hf, whole in parameter}
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("llama", {"tp": 4}),  # more ranks than query groups
        ("llama with every bias, tied", {"tp": 2, "pp": 2}),
        ("qwen2, tied", {"pp": 3}),
        ("qwen3", {"tp": 4, "pp": 2}),
        ("qwen3 moe", {"tp": 2, "ep": 2}),
        ("qwen3 moe, second layer dense", {"pp": 2, "ep": 4}),
        ("qwen2 moe, every other layer dense", {"tp": 4, "ep": 2, "etp": 2}),
    ],
)
def test_every_rank_of_a_layout_has_the_parameters_and_shapes_that_megatron_gives_it(case, sizes, start_groups):
    weights, config = checkpoint(make_model(CONFIGS[case])), megatron_config(CONFIGS[case])
    uneven = {"num_layers_in_first_pipeline_stage": 1} if sizes.get("pp") == 2 else {}
    dense = sizes.get("tp", 1)
    world = sizes.get("pp", 1) * math.lcm(dense, sizes.get("etp", dense) * sizes.get("ep", 1))
    for rank in range(world):
        start_groups(rank, world, **sizes)
        model = build(config, **uneven)
        layout = layout_of(model)
        assert sorted(dict(model.named_parameters())) == sorted(parameter_names(config, layout, "local"))
        fill(model, weights, config, layout)
