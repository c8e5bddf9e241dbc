"""The CPU contract on one GPU: the same model gives the same scores, gradients and greedy tokens there.

Options of ``fsdp2_train`` that only a GPU has change speed or memory, and the gradient only by rounding.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.algorithms.losses import build_sft_loss
from roll.configs.worker import WorkerConfig
from roll.data.batch import Batch
from roll.data.packing import PackedSequences
from roll.distributed.strategy.base import States, StrategyContext
from roll.distributed.strategy.fsdp2 import strategy
from roll.distributed.strategy.fsdp2.strategy import Fsdp2Train
from roll.distributed.strategy.fsdp2.weights import ShardedWeights
from roll.distributed.strategy.megatron.strategy import MegatronInfer
from roll.distributed.weights.collective import BroadcastGroup, invite
from roll.models import planned_attention
from roll.models.loading import load_causal_lm
from roll.models.lora import LoraSpec
from roll.models.tiny import make_tiny_model
from tests.support.pictured import plain_logprobs
from tests.support.sizes import tiny_folder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory, seed=0)


def context(
    model_path: Path,
    name: str,
    config: dict[str, Any] | None = None,
    model_args: dict[str, Any] | None = None,
    lora: LoraSpec | None = None,
    **worker: Any,
) -> StrategyContext:
    """``worker``: other keys of the role."""
    sections = {
        "model_args": {"dtype": "fp32"} | (model_args or {}),
        "strategy_args": {"strategy_name": name, "strategy_config": config or {}},
    }
    return StrategyContext(WorkerConfig.model_validate(sections | worker), "actor_train", str(model_path), lora=lora)


def started(model_path: Path, **options: Any) -> Fsdp2Train:
    trainer = Fsdp2Train(context(model_path, "fsdp2_train", **options))
    trainer.setup()
    return trainer


def random_batch(vocabulary: int = 800) -> Batch:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([7, 12, 9])
    mask = torch.zeros(28, dtype=torch.bool)
    mask[[5, 6, 15, 16, 17, 18, 26, 27]] = True
    tokens = torch.randint(0, vocabulary, (28,), generator=generator)
    return Batch(lengths_B=lengths, tokens_T=tokens, loss_mask_T=mask)


def reference_logprobs(model_path: Path, batch: Batch) -> torch.Tensor:
    return plain_logprobs(load_causal_lm(str(model_path), dtype=torch.float64), batch).detach()


def test_scores_on_the_gpu_equal_a_float64_forward_pass_and_survive_offloading(model_path):
    trainer, batch = started(model_path), random_batch()
    expected = reference_logprobs(model_path, batch)
    for _ in range(2):
        scores_T = trainer.logprobs(batch).logprobs_T
        torch.testing.assert_close(scores_T.cpu().double(), expected, atol=1e-4, rtol=0)
        before = torch.cuda.memory_allocated()
        trainer.offload(States.ALL)
        assert torch.cuda.memory_allocated() < before
        trainer.onload(States.ALL)


@pytest.mark.parametrize("window", [None, 7], ids=["full", "sliding"])
def test_packed_sequences_in_one_call_of_a_kernel_equal_float64(window):
    """Values and gradients; 14 query heads share 2 of keys and values."""
    torch.manual_seed(0)
    plan = PackedSequences((5, 64, 1, 30))
    states = [torch.randn(1, heads, 100, 64, device="cuda", dtype=torch.bfloat16) for heads in (14, 2, 2)]
    weight = torch.randn(1, 100, 14, 64, device="cuda", dtype=torch.float64)
    options = {"scaling": 0.1, "sliding_window": window}
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal, module.training = 7, True, False

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in states]
        assert planned_attention._takes_one_call(leaves[0], leaves[2]) == (dtype is torch.bfloat16)
        out, _ = planned_attention._attention(module, *leaves, None, plan, **options)
        return [out, *torch.autograd.grad((out.double() * weight).sum(), leaves)]

    for found, expected in zip(results(torch.bfloat16), results(torch.float64), strict=True):
        assert (found.double() - expected).norm() < 0.01 * expected.norm()


def test_a_packed_row_in_bf16_scores_as_its_sequences_do_alone(model_path):
    batch = random_batch()
    expected = reference_logprobs(model_path, batch)
    packing = {"use_sequence_packing": True, "infer_batch_size": 4}
    found = started(model_path, model_args={"dtype": "bf16"}, **packing).logprobs(batch).logprobs_T
    torch.testing.assert_close(found.cpu().double(), expected, atol=0.1, rtol=0)


def test_shards_of_a_lone_rank_train_as_its_replica_does(model_path, monkeypatch):
    """``fully_shard`` with its streams and its collectives, which a lone rank does without otherwise."""
    batch = random_batch()

    def losses() -> list[float]:
        trainer = started(model_path)
        assert isinstance(trainer.weights, ShardedWeights) == sharded
        found = [trainer.train_step(batch, build_sft_loss())["actor/loss"] for _ in range(2)]
        trainer.offload(States.ALL)
        trainer.onload(States.ALL)
        return [*found, trainer.train_step(batch, build_sft_loss())["actor/loss"]]

    sharded = False
    expected = losses()
    monkeypatch.setattr(strategy, "_replicated", lambda *_: False)
    sharded = True
    assert losses() == pytest.approx(expected, rel=1e-4)


def test_a_group_made_of_nccl_itself_broadcasts_and_can_be_given_up():
    """As a weight transfer makes it, beside the default group of an engine."""
    invitation, store = invite("127.0.0.1", "nccl", 1, 30.0)
    group = BroadcastGroup(invitation, 0, store, "127.0.0.1")
    data = torch.arange(256, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        group.broadcast(data)
    group.close()
    assert data.tolist() == list(range(256))


@pytest.mark.parametrize("packing", [False, True])
def test_megatron_in_fp8_scores_nearly_as_in_bf16(tmp_path, packing):
    """Rows are padded for TransformerEngine, which refuses others."""
    pytest.importorskip("transformer_engine", reason="TransformerEngine is not installed")
    make_tiny_model(tmp_path, seed=0, hidden_size=128, num_heads=2)
    found = []
    for options in ({}, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}):
        section = {"model_args": {"dtype": "bf16"}, "use_sequence_packing": packing}
        scorer = MegatronInfer(replace(context(tmp_path, "megatron_infer", options, **section), role="reference"))
        scorer.setup()
        found.append(scorer.logprobs(random_batch()).logprobs_T)
    gap = (found[0] - found[1]).abs()
    assert gap.max() > 0 and gap.median() < 0.2


class Probed(Fsdp2Train):
    gradient: dict[str, Tensor]

    def apply_gradients(self, rate: float, norm: float) -> None:
        assert all(share.is_cuda for share in self.weights.trained.values())
        self.gradient = {name: share.grad.cpu() for name, share in self.weights.trained.items()}
        super().apply_gradients(rate, norm)


def gradient(path: Path, **options: Any) -> dict[str, Tensor]:
    trainer = Probed(context(path, "fsdp2_train", **options))
    trainer.setup()
    for _ in range(2):  # an adapter's first gradient is half zero
        trainer.train_step(random_batch(300), build_sft_loss())
    return trainer.gradient


@pytest.mark.parametrize(
    "lora", [None, LoraSpec(rank=4, alpha=8, targets=("q_proj", "down_proj"))], ids=["all weights", "adapter"]
)
@pytest.mark.parametrize("option", ["activation_offload", "liger"])
def test_option_does_not_change_the_gradient(model_path, option, lora, monkeypatch):
    monkeypatch.setattr(strategy, "MIN_BYTES", 0)
    expected = gradient(model_path, lora=lora)
    if option == "liger":
        pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
        found = gradient(model_path, model_args={"use_liger_kernel": True}, lora=lora)
    else:
        found = gradient(model_path, config={"activation_offload": True}, lora=lora)
        assert strategy._side_stream(torch.device("cuda", 0)) != torch.cuda.current_stream()
        assert strategy._side_stream.cache_info().hits > 0
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)
