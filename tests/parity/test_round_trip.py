"""Train, send the weights, generate, score: the trainer agrees with what the generator says it sampled."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.configs.engines import packages
from roll.data.batch import Batch
from roll.data.requests import GenerateRequest, SamplingParams
from roll.distributed.strategy import STRATEGIES
from tests.support.batches import batch_of
from tests.support.choice import needs
from tests.support.contract import BUCKET_BYTES, OPTIONS, buckets_of, burst, context_of
from tests.support.harness import TEMPERATURE, Layout, make_batch, policy_loss, record, started
from tests.support.processes import happens
from tests.support.ranks import start_ranks, unpacked
from tests.support.sizes import tiny_folder

TRAINERS = {
    "fsdp2_train": Layout("shard2", "fsdp2_train", 2),
    "deepspeed_train": Layout("zero3", "deepspeed_train", 2, {"zero_optimization": {"stage": 3}}),
    "megatron_train": Layout("tp2", "megatron_train", 2, {"tensor_model_parallel_size": 2}),
}
GENERATORS = ("hf_infer", "vllm", "sglang")
NUM_PROMPTS = 6
BOUND = 1e-5


def prompts() -> list[np.ndarray]:
    """Of 4 to 40 tokens: some fill a block of the prefix cache."""
    draw = np.random.default_rng(3)
    return [draw.integers(4, 300, size) for size in np.linspace(4, 40, NUM_PROMPTS).astype(int)]


def rank_main(rank: int, layout: Layout, model: Path, folder: Path, generators: list[str]) -> None:
    """One step, an export, and then a score of whatever the generators made of it."""
    strategy = started(layout, model, rank)
    info = strategy.info

    def share(batch: Batch) -> tuple[Tensor, Batch]:
        part = batch.split(info.dp_size)[info.dp_rank]
        return batch.token_index(part), batch.select(part)

    batch = make_batch(0)
    strategy.train_step(share(batch.replace(advantages_T=20 * batch.advantages_T))[1], policy_loss)
    weights = unpacked(strategy.export_weights(BUCKET_BYTES))
    if rank == 0:
        hand_over(weights, folder / "weights.pt")
    for name in generators:
        found = wait_for(folder / f"{name}.pt")
        batch = Batch(found["lengths"], found["tokens"], found["mask"])
        index, part = share(batch)
        hand_over({"index": index, "logprobs": strategy.logprobs(part).logprobs_T}, folder / f"{name}-{rank}.pt")


def hand_over(value: Any, path: Path) -> None:
    torch.save(value, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def wait_for(path: Path, seconds: float = 300.0) -> Any:
    assert happens(path.exists, seconds), f"{path} did not come"
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory, seed=1, num_heads=2)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with asyncio.Runner() as runner:
        yield runner.get_loop()


@pytest.fixture(scope="module")
def generators(model: Path, loop: asyncio.AbstractEventLoop) -> Iterator[dict[str, Any]]:
    """The engines that are installed, started once."""
    engines = {}
    for name in GENERATORS:
        if name in OPTIONS or name not in packages() or packages()[name].installed:
            options = {"temperature": TEMPERATURE, "sequence_length": 128, "max_running_requests": 8}
            context = context_of(name, str(model), OPTIONS.get(name), **options)
            context.worker.model_args.dtype = "fp32"
            engines[name] = STRATEGIES.get(name)(context)
            engines[name].setup()
    yield engines
    for engine in engines.values():
        engine.shutdown()


async def generate(engine: Any, weights: dict[str, Tensor], version: int) -> tuple[Batch, Tensor]:
    """What the engine samples with new weights, and the log-probabilities that it reports."""
    await engine.update_weights(buckets_of(weights), version)
    params = [SamplingParams(max_new_tokens=24, temperature=TEMPERATURE, seed=seed) for seed in range(NUM_PROMPTS)]
    numbered = enumerate(zip(prompts(), params, strict=True))
    completions = await burst(engine, [GenerateRequest(f"{version}-{i}", *each) for i, each in numbered])
    assert {completion.weight_version for completion in completions} == {version}
    rows = [np.concatenate([p, c.token_ids]) for p, c in zip(prompts(), completions, strict=True)]
    said = [np.concatenate([np.zeros(len(p)), c.logprobs]) for p, c in zip(prompts(), completions, strict=True)]
    return batch_of(rows, [*map(len, prompts())]), torch.from_numpy(np.concatenate(said))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_generators_sample_from_the_trained_policy(trainer, model, generators, loop, tmp_path):
    needs(trainer)
    layout, version = TRAINERS[trainer], 1 + list(TRAINERS).index(trainer)
    ranks = start_ranks(rank_main, layout.world_size, layout, model, tmp_path, list(generators))
    try:
        weights = wait_for(tmp_path / "weights.pt")
        for name, engine in generators.items():
            batch, said_T = loop.run_until_complete(generate(engine, weights, version))
            found = {"lengths": batch.lengths_B, "tokens": batch.tokens_T, "mask": batch.loss_mask_T}
            hand_over(found, tmp_path / f"{name}.pt")
            worst = 0.0
            for rank in range(layout.world_size):
                scored = wait_for(tmp_path / f"{name}-{rank}.pt")
                gap_T = (scored["logprobs"].double() - said_T[scored["index"]]) * batch.loss_mask_T[scored["index"]]
                worst = max(worst, float(gap_T.abs().max()))
            record("round trip", {"trainer": layout.id, "generator": name, "logprobs": worst})
            assert 0 < worst < BOUND, f"{trainer} → {name}: {worst}"
    finally:
        for process in ranks.processes:
            process.kill()
