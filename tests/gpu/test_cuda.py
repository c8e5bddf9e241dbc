"""The CPU contract on one GPU: the same model gives the same scores, gradients and greedy tokens there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from roll.algorithms.losses import build_sft_loss
from roll.configs.model import ModelArguments
from roll.configs.strategy import StrategyArguments
from roll.configs.worker import WorkerConfig
from roll.data.batch import Batch
from roll.data.requests import GenerateRequest, SamplingParams
from roll.distributed.strategy.base import States, StrategyContext
from roll.distributed.strategy.fsdp2.strategy import Fsdp2Train
from roll.distributed.strategy.hf_infer.strategy import HfInfer
from roll.models.loading import load_causal_lm
from roll.models.tiny import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(path, seed=0)
    return path


def context(model_path: Path, strategy: str) -> StrategyContext:
    worker = WorkerConfig(
        model_args=ModelArguments(dtype="fp32"), strategy_args=StrategyArguments(strategy_name=strategy)
    )
    return StrategyContext(worker=worker, role="actor_train", model_path=str(model_path))


def random_batch(vocabulary: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([7, 12, 9])
    mask = torch.zeros(28, dtype=torch.bool)
    mask[[5, 6, 15, 16, 17, 18, 26, 27]] = True
    tokens = torch.randint(0, vocabulary, (28,), generator=generator)
    return Batch(lengths_B=lengths, tokens_T=tokens, loss_mask_T=mask)


def reference_logprobs(model_path: Path, batch: Batch) -> torch.Tensor:
    model = load_causal_lm(str(model_path), dtype=torch.float64)
    out = torch.zeros(batch.num_tokens, dtype=torch.float64)
    for start, length in zip(batch.offsets_B.tolist(), batch.lengths_B.tolist(), strict=True):
        ids = batch.tokens_T[start : start + length]
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        out[start + 1 : start + length] = logprobs.gather(1, ids[1:, None])[:, 0].detach()
    return out * batch.loss_mask_T


def test_scores_on_the_gpu_equal_a_float64_forward_pass_and_survive_offloading(model_path: Path) -> None:
    trainer = Fsdp2Train(context(model_path, "fsdp2_train"))
    trainer.setup()
    batch = random_batch(800)
    expected = reference_logprobs(model_path, batch)
    for _ in range(2):
        scores = trainer.logprobs(batch)
        assert scores.logprobs_T is not None
        torch.testing.assert_close(scores.logprobs_T.cpu().double(), expected, atol=1e-4, rtol=0)
        before = torch.cuda.memory_allocated()
        trainer.offload(States.ALL)
        assert torch.cuda.memory_allocated() < before
        trainer.onload(States.ALL)


def test_training_on_the_gpu_lowers_the_loss(model_path: Path) -> None:
    trainer = Fsdp2Train(context(model_path, "fsdp2_train"))
    trainer.setup()
    batch = random_batch(800)
    first = trainer.train_step(batch, build_sft_loss())["actor/loss"]
    for _ in range(20):
        last = trainer.train_step(batch, build_sft_loss())["actor/loss"]
    assert last < first


def test_greedy_generation_on_the_gpu_equals_transformers(model_path: Path) -> None:
    prompts = [np.arange(10 + i, 20 + 2 * i, dtype=np.int64) for i in range(4)]

    async def sample() -> list[list[int]]:
        engine = HfInfer(context(model_path, "hf_infer"))
        engine.setup()
        params = SamplingParams(max_new_tokens=8, temperature=0.0)
        requests = [GenerateRequest(str(i), prompt, params) for i, prompt in enumerate(prompts)]
        completions = await asyncio.gather(*[engine.generate(request) for request in requests])
        engine.shutdown()
        return [completion.token_ids.tolist() for completion in completions]

    sampled = asyncio.run(sample())
    model = load_causal_lm(str(model_path), dtype=torch.float32).cuda()
    for prompt, ids in zip(prompts, sampled, strict=True):
        out = model.generate(torch.from_numpy(prompt)[None].cuda(), max_new_tokens=8, do_sample=False)
        assert out[0, len(prompt) :].tolist()[: len(ids)] == ids
