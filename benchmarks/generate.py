"""Generation speed of every generator that is installed beside ``transformers.generate`` on the same requests.

    python benchmarks/generate.py [--engines hf_infer,vllm,sglang] [--threads 1] [--model smollm2] [--json out.json]

SGLang is found in the environment that ``make test-sglang`` makes, or in the one of ``ROLL_SGLANG_PYTHON``.

Workloads on the embedded tiny model with random weights:

- ``short``: 256 clients, each asking for one completion after the other (prompts of 20–30 tokens, 4–6 new tokens), as
  environment managers do; ``transformers`` gets the same requests in padded batches of 256.
- ``long``: 64 prompts of 8–64 tokens, 64 new tokens each, all at once.

With ``--model``, a folder or ``smollm2``, on that model instead: ``long`` with 128 such prompts, 64 at a time.

Tokens per second count new tokens only; the time includes prefill. The best of ``--repeats`` runs is reported, since
on a shared machine only the best says what the code costs. Each generator has a process of its own: threads that one
leaves would slow the next.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from roll.configs.engines import packages
from roll.configs.worker import WorkerConfig
from roll.data.requests import GenerateRequest, SamplingParams
from roll.distributed.strategy import STRATEGIES
from roll.distributed.strategy.base import GenerateStrategy, StrategyContext
from roll.models.tiny import make_tiny_model
from roll.models.tokenizer import locate_model

PACKAGES = packages()
TRANSFORMERS = "transformers.generate"
Workloads: TypeAlias = dict[str, tuple[list[GenerateRequest], int]]
"""Requests by name, and how many of them are in flight at once."""

SGLANG_PYTHON = Path(
    os.environ.get("ROLL_SGLANG_PYTHON", Path(__file__).resolve().parents[1] / ".venv-sglang" / "bin" / "python")
)


def make_requests(count: int, prompt: tuple[int, int], new: tuple[int, int], vocab: int) -> list[GenerateRequest]:
    """Random prompts; lengths are drawn uniformly from the closed ranges."""
    rng = random.Random(0)
    return [
        GenerateRequest(
            str(i),
            np.array([rng.randrange(vocab) for _ in range(rng.randint(*prompt))]),
            SamplingParams(max_new_tokens=rng.randint(*new), seed=i, ignore_eos=True),
        )
        for i in range(count)
    ]


def installed(name: str) -> bool:
    return name not in PACKAGES or PACKAGES[name].installed or (name == "sglang" and SGLANG_PYTHON.exists())


def start_engine(name: str, path: Path) -> GenerateStrategy:
    """A generator of its own defaults but for the prefix cache: repeated rounds would find their prompts in it."""
    options: dict[str, object] = {}
    if name == "vllm":
        options = {"enable_prefix_caching": False}
    elif name == "sglang":
        options = {"disable_radix_cache": True}
        if SGLANG_PYTHON.exists():
            options["python_executable"] = str(SGLANG_PYTHON)
    worker = WorkerConfig.model_validate(
        {"model_args": {"dtype": "fp32"}, "strategy_args": {"strategy_name": name, "strategy_config": options}}
    )
    context = StrategyContext(worker, "actor_infer", str(path), max_running_requests=256, sequence_length=256)
    engine: GenerateStrategy = STRATEGIES.get(name)(context)
    engine.setup()
    return engine


def run_engine(
    engine: GenerateStrategy, requests: list[GenerateRequest], clients: int, loop: asyncio.AbstractEventLoop
) -> float:
    """New tokens per second with ``clients`` requests in flight."""

    async def client(queue: list[GenerateRequest]) -> int:
        total = 0
        while queue:
            total += len((await engine.generate(queue.pop())).token_ids)
        return total

    async def run() -> float:
        queue = list(requests)
        start = time.perf_counter()
        total = sum(await asyncio.gather(*(client(queue) for _ in range(clients))))
        return total / (time.perf_counter() - start)

    return loop.run_until_complete(run())


def run_transformers(model: PreTrainedModel, requests: list[GenerateRequest], batch_size: int) -> float:
    """New tokens per second of ``generate`` on left-padded batches; tokens past a request's limit do not count."""
    start = time.perf_counter()
    for first in range(0, len(requests), batch_size):
        batch = requests[first : first + batch_size]
        width = max(len(r.prompt_ids) for r in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request.prompt_ids) :] = torch.from_numpy(request.prompt_ids)
            mask[row, width - len(request.prompt_ids) :] = 1
        new = max(r.params.max_new_tokens for r in batch)
        model.generate(  # type: ignore[operator]
            ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=new, min_new_tokens=new, pad_token_id=0
        )
    return sum(r.params.max_new_tokens for r in requests) / (time.perf_counter() - start)


def measure(engine_name: str, path: Path, workloads: Workloads, repeats: int) -> dict[str, float]:
    """Starts a generator and runs each workload ``repeats`` times; see ``best``."""
    if engine_name == TRANSFORMERS:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        return best(lambda requests, clients: run_transformers(model, requests, clients), workloads, repeats)
    loop = asyncio.new_event_loop()
    engine = start_engine(engine_name, path)
    try:
        return best(lambda requests, clients: run_engine(engine, requests, clients, loop), workloads, repeats)
    finally:
        engine.shutdown()
        loop.close()


def best(run: Callable[[list[GenerateRequest], int], float], workloads: Workloads, repeats: int) -> dict[str, float]:
    """Tokens per second of the best round, by workload."""
    return {name: max(run(*load) for _ in range(repeats)) for name, load in workloads.items()}


def measure_alone(engine_name: str, path: Path, workloads: Workloads, args: argparse.Namespace) -> dict[str, float]:
    """The same in a process of its own."""
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), initializer=torch.set_num_threads, initargs=(args.threads,)
    ) as pool:
        return pool.submit(measure, engine_name, path, workloads, args.repeats).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", help="default: the embedded tiny model")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--engines", default="hf_infer,vllm,sglang", help="default: %(default)s, if installed")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # for engines in processes of their own
    figures: dict[str, float] = {"threads": args.threads, "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny" if args.model is None else Path(locate_model(args.model)[0])
        if args.model is None:
            make_tiny_model(path, seed=0, num_heads=2)  # vLLM takes no narrower heads
        vocab = AutoConfig.from_pretrained(path).vocab_size
        count = 64 if args.model is None else 128
        workloads = {"long": (make_requests(count, (8, 64), (64, 64), vocab), 64)}
        if args.model is None:
            workloads["short"] = (make_requests(2048, (20, 30), (4, 6), vocab), 256)
        for engine_name in (TRANSFORMERS, *args.engines.split(",")):
            if not installed(engine_name):
                print(f"{engine_name}: not installed", flush=True)
                continue
            for name, ours in measure_alone(engine_name, path, workloads, args).items():
                figures[f"{name}/{engine_name}"] = ours
                ratio = figures[f"{name}/{engine_name}/ratio"] = ours / figures[f"{name}/{TRANSFORMERS}"]
                print(f"{name}: {engine_name} {ours:,.0f} tokens/s, {ratio:.2f} of {TRANSFORMERS}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
