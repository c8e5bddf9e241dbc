"""One GPU and a model of 0.5 billion parameters in bf16: training, generation and weight updates, each beside a limit.

- ``ipc``: fifty buckets of 64 MiB to a plain process by CUDA IPC (by shared memory on a CPU), each checked there.
- ``attention``: a training step of ``fsdp2_train`` on a packed row of 16k tokens, by each way to keep its 16 sequences
  apart.
- ``output_layer``: the same step with fewer and more logits at a time, and its gradient beside float32.
- ``leaving``: seconds and memory of a trainer that leaves the device, comes back with its weights alone, then whole.
- ``train``: every trainer that is installed, tokens per second, and the share of what a large matrix product reaches in
  the same process (model FLOPs: 6 per weight and token, and causal attention's). ``sharded`` goes through
  ``fully_shard``, which a lone rank does not need.
- ``vllm``: all that one start can show: prompt tokens per second with vLLM's own batch size, how far a bf16 engine's
  log-probs are from a trainer's, new tokens per second, what each sleep level frees and takes; and prompt tokens per
  second with batches of 2,048.
- ``generate``: new tokens per second of ``hf_infer``.
- ``weights``: a full update from ``fsdp2_train`` to a generator on the same device (CUDA IPC on a GPU, shared memory on
  a CPU), gigabytes per second, and the share of a plain copy of the same bytes in the same run.

Each row runs in a process of its own for at most ``--seconds``, and its result is written at once. Weights are random,
so nothing is downloaded. ``--rehearse`` does the same with a tiny model on whatever there is; a row that cannot run
says what it needs.

    python benchmarks/gpu.py [--rehearse] [--parts train,attention,weights] [--json out.json]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roll.algorithms.quantities import Given
from roll.algorithms.types import LossContext, LossOutput, TokenScores
from roll.configs.worker import WorkerConfig
from roll.data.batch import Batch
from roll.data.requests import GenerateRequest, SamplingParams
from roll.distributed.strategy import STRATEGIES
from roll.distributed.strategy.base import StrategyContext

TRAINERS: dict[str, dict[str, Any]] = {
    "fsdp2_train": {"fsdp_size": 1},
    "deepspeed_train": {"zero_optimization": {"stage": 1}},
    "megatron_train": {},
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "tiny": {
        "vocab_size": 8192,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
}
"""Qwen2.5-0.5B, and what a CPU can rehearse."""
MODEL_ARGS = {"dtype": "bf16", "disable_gradient_checkpointing": True}
ROUNDS = 50
"""Buckets of ``ipc``."""


def make_model(path: Path, shape: str) -> None:
    """Writes a Qwen2 of that shape with random weights in bf16."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from roll.models.tiny import make_tokenizer

    tokenizer = make_tokenizer()
    config = Qwen2Config(
        **SHAPES[shape],
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(path)
    tokenizer.save_pretrained(path)


def context(
    path: Path, role: str, strategy: str, options: dict[str, Any], section: dict[str, Any] | None = None, **more: Any
) -> StrategyContext:
    section = {
        "model_args": MODEL_ARGS,
        "strategy_args": {"strategy_name": strategy, "strategy_config": options},
        "use_dynamic_batching_in_train": True,
        "max_tokens_per_microbatch_in_train": 8192,
    } | (section or {})
    return StrategyContext(WorkerConfig.model_validate(section), role, str(path), **more)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(action: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - start


def best_seconds(action: Callable[[], object], rounds: int) -> float:
    """The fastest of some rounds after one that warms up."""
    action()
    return min(seconds(action) for _ in range(rounds))


def matmul_flops(rounds: int) -> float:
    """FLOP/s of a square bf16 product, the largest share of which a model could reach."""
    device, size = ("cuda", 8192) if torch.cuda.is_available() else ("cpu", 512)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / best_seconds(lambda: a @ b, rounds)


def model_flops(path: Path, sequence: int) -> float:
    """FLOPs per token of a forward and a backward pass: every weight that multiplies, and causal attention."""
    config = json.loads((path / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    kv = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    weights = layers * (2 * hidden**2 + 2 * hidden * kv + 3 * hidden * config["intermediate_size"])
    weights += hidden * config["vocab_size"]
    return 6.0 * weights + 6.0 * layers * hidden * sequence


def nll(scores: TokenScores, batch: Batch, context: LossContext) -> LossOutput:
    assert scores.logprobs_T is not None
    return LossOutput(-(scores.logprobs_T * batch.loss_mask_T.to(scores.logprobs_T.device)).sum() / context.num_tokens)


def train(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    from roll.distributed.strategy.fsdp2 import strategy as fsdp2

    strategy, _, option = args.engine.partition(" ")
    count, length = (8, 64) if args.rehearse else (32, 1024)
    if option == "sharded":
        fsdp2._replicated = lambda *_: False
    section = {"model_args": MODEL_ARGS | {"use_liger_kernel": option == "liger"}}
    trainer = STRATEGIES.get(strategy)(
        context(path, "actor_train", strategy, TRAINERS[strategy], section, sequence_length=length)
    )
    trainer.setup()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((count,), length)
    tokens = torch.randint(0, 500, (count * length,), generator=generator)
    batch = Batch(lengths, tokens, torch.arange(count * length) % length > 0)
    took = best_seconds(lambda: trainer.train_step(batch, nll), args.rounds)
    tokens_per_s = count * length / took
    flops = tokens_per_s * model_flops(path, length)
    peak = matmul_flops(args.rounds)
    return {
        "tokens_per_s": round(tokens_per_s),
        "model_tflops": round(flops / 1e12, 3),
        "matmul_tflops": round(peak / 1e12, 3),
        "of_matmul": round(flops / peak, 3),
    }


def packed_trainer(path: Path, args: argparse.Namespace, attention: str = "auto") -> tuple[Any, Batch]:
    """A trainer that packs, and a batch of one full row."""
    count, length = (4, 32) if args.rehearse else (16, 1024)
    options = {
        "model_args": MODEL_ARGS | {"attn_implementation": attention},
        "use_sequence_packing": True,
        "max_tokens_per_microbatch_in_train": count * length,
    }
    trainer = STRATEGIES.get("fsdp2_train")(
        context(path, "actor_train", "fsdp2_train", {"fsdp_size": 1}, options, sequence_length=length)
    )
    trainer.setup()
    tokens = torch.randint(0, 500, (count * length,), generator=torch.Generator().manual_seed(0))
    return trainer, Batch(torch.full((count,), length), tokens, torch.arange(count * length) % length > 0)


def timed_step(trainer: Any, batch: Batch, rounds: int) -> dict[str, Any]:
    took = best_seconds(lambda: trainer.train_step(batch, nll), rounds)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {"tokens_per_s": round(batch.num_tokens / took), "ms": round(1000 * took, 1), "peak_gib": gib(peak)}


def gib(num_bytes: float) -> float:
    return round(num_bytes / 2**30, 2)


def attention(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    from roll.distributed.strategy.training import module_trainer
    from roll.models import planned_attention

    flash = args.engine in ("fa2", "fa3")
    if args.engine == "fa3":
        module_trainer.ATTENTION["fa2"] = "flash_attention_3"
    trainer, batch = packed_trainer(path, args, "fa2" if flash else "auto")
    if args.engine == "mask":
        trainer.weights.scorer._takes_plans = False
    elif args.engine == "sequences":
        planned_attention._takes_one_call = lambda *_: False
    return timed_step(trainer, batch, args.rounds)


def output_layer(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    from roll.models import scoring

    if args.engine != "default":
        exponent = int(args.engine.removeprefix("2^")) - (12 if args.rehearse else 0)
        scoring.chunk_logits = lambda device: 2**exponent
    trainer, batch = packed_trainer(path, args)
    figures = timed_step(trainer, batch, args.rounds)
    weight_VH = trainer.weights.scorer.model.get_output_embeddings().weight.detach().bfloat16().requires_grad_()
    hidden_KH = torch.randn(batch.num_tokens, weight_VH.shape[1], device=weight_VH.device).bfloat16()
    target_K = torch.randint(0, 500, (batch.num_tokens,), device=weight_VH.device)

    def gradient(weight: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        def score(hidden: torch.Tensor, target: torch.Tensor, *others: Any) -> dict[str, torch.Tensor]:
            logits = (hidden @ others[-1].T).float()
            return {"logprobs_T": logits.log_softmax(-1).gather(1, target[:, None])[:, 0]}

        scores = scoring.in_chunks(score, len(weight), hidden, target_K, Given(), weight)
        (found,) = torch.autograd.grad(scores["logprobs_T"].mean(), weight)
        return found.float()

    found = gradient(weight_VH, hidden_KH)
    expected = gradient(weight_VH.detach().float().requires_grad_(), hidden_KH.float())
    error = float((found - expected).norm() / expected.norm())
    return figures | {"gradient_error": round(error, 5)}


def leaving(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    from roll.distributed.strategy.base import States

    strategy, _, stage = args.engine.partition(" zero")
    options = {"zero_optimization": {"stage": int(stage)}} if stage else TRAINERS[strategy]
    length = 64
    trainer: Any = STRATEGIES.get(strategy)(context(path, "actor_train", strategy, options, sequence_length=length))
    trainer.setup()
    tokens = torch.randint(0, 500, (4 * length,), generator=torch.Generator().manual_seed(0))
    batch = Batch(torch.full((4,), length), tokens, torch.arange(4 * length) % length > 0)
    trainer.train_step(batch, nll)

    def on_device() -> float:
        return gib(torch.cuda.memory_allocated()) if torch.cuda.is_available() else 0.0

    figures: dict[str, Any] = {"gib_whole": on_device()}
    moves = {
        "leave": lambda: trainer.offload(States.ALL),
        "weights_back": lambda: trainer.onload(States.WEIGHTS),
        "weights_leave": lambda: trainer.offload(States.WEIGHTS),
        "all_back": lambda: trainer.onload(States.ALL),
    }
    for _ in range(args.rounds):
        for name, move in moves.items():
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            took = seconds(move)
            figures[f"{name}_ms"] = round(1000 * min(took, figures.get(f"{name}_ms", 1e9) / 1000), 1)
            figures[f"gib_after_{name}"] = on_device()
            if name == "weights_back" and torch.cuda.is_available():
                figures["gib_peak_weights_back"] = gib(torch.cuda.max_memory_allocated())
    return figures


def options_of(strategy: str, args: argparse.Namespace) -> dict[str, Any]:
    """A strategy's ``strategy_config``: vLLM shares the device with others."""
    return {"gpu_memory_utilization": args.memory} if strategy == "vllm" else {}


def generate(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    count, prompt, new = (8, 16, 16) if args.rehearse else (256, 128, 256)
    engine = STRATEGIES.get(args.engine)(
        context(path, "actor_infer", args.engine, {}, sequence_length=prompt + new, max_running_requests=count)
    )
    engine.setup()
    rates = [new_tokens_per_s(engine, count, prompt, new, seed) for seed in range(args.rounds + 1)]
    engine.shutdown()
    return {"tokens_per_s": max(rates[1:]), "requests": count, "new_tokens": new}


def new_tokens_per_s(engine: Any, count: int, prompt: int, new: int, seed: int) -> int:
    completions, took = sampled(engine, count, prompt, new, seed)
    return round(sum(len(done.token_ids) for _, done in completions) / took)


def weights(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    from roll.distributed.cluster.cluster import Cluster, create_placement, discover_nodes
    from roll.distributed.cluster.ray_session import ray_session
    from roll.distributed.cluster.resources import RoleRequest, plan_placement
    from roll.distributed.weights.sync import WeightSync
    from roll.pipeline.workers import InferWorker, TrainWorker

    num_bytes = (path / "model.safetensors").stat().st_size
    with ray_session({"object_store_memory": 2**28}):
        roles = {"actor_train": (TrainWorker, "fsdp2_train"), "actor_infer": (InferWorker, args.engine)}
        placement = create_placement(plan_placement([RoleRequest(name, (0,)) for name in roles], discover_nodes()))
        clusters = {name: Cluster(name, worker, placement) for name, (worker, _) in roles.items()}
        for cluster in clusters.values():
            cluster.launch()
        for name, (_, strategy) in roles.items():
            clusters[name].wait_ready()
            clusters[name].call("setup", context(path, name, strategy, options_of(strategy, args), sequence_length=512))
        link = WeightSync(clusters["actor_train"], clusters["actor_infer"], bucket_bytes=128 << 20)
        took = best_seconds(lambda: link.sync(0), args.rounds)
        for cluster in clusters.values():
            cluster.shutdown()
        placement.remove()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = best_seconds(lambda: target.copy_(source), args.rounds)
    gigabytes = num_bytes / 1e9
    return {"gb_per_s": round(gigabytes / took, 3), "seconds": round(took, 4), "of_copy": round(copy / took, 3)}


def ipc(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The way of a bucket without Ray: this process lends its memory, a plain one reads, checks and gives it back."""
    from roll.distributed.weights.segments import SegmentPool, collect_on_gpu, share_on_gpu

    on_gpu, num_bytes = torch.cuda.is_available(), (1 if args.rehearse else 64) << 20
    spawn: Any = multiprocessing.get_context("spawn" if on_gpu else "forkserver")
    here, there = spawn.Pipe()
    receiver = spawn.Process(target=_receive, args=(there,), daemon=True)
    receiver.start()
    there.close()
    pool, wrong, before, took = SegmentPool(), 0, 0, 0.0
    for number in range(ROUNDS):
        data = torch.full((num_bytes,), number, dtype=torch.uint8, device="cuda" if on_gpu else "cpu")
        segment = None
        if not on_gpu:
            lent = pool.allocate(num_bytes)
            torch.from_numpy(lent).copy_(data)
            segment = pool.find(lent)
            assert segment is not None
            pool.hand_over(segment, ["receiver"])
        synchronize()
        start = time.perf_counter()
        here.send((num_bytes, share_on_gpu(data) if segment is None else segment.place))
        found, released = here.recv()
        took += time.perf_counter() - start if number else 0.0  # the first waits for the other process's start
        wrong += found != number * num_bytes
        pool.release(released, "receiver")
        del data
        if on_gpu:
            collect_on_gpu()
            if number == 0:
                before = torch.cuda.memory_allocated()
    here.send(None)
    receiver.join()
    after = torch.cuda.memory_allocated() if on_gpu else len(pool.ids) * num_bytes
    kept = after - before if on_gpu else after - num_bytes
    if wrong:
        raise ValueError(f"{wrong} of {ROUNDS} buckets arrived with other contents")
    figures = {"rounds": ROUNDS, "mib": num_bytes >> 20, "kept_mib": kept >> 20}
    return figures | {"gb_per_s": round((ROUNDS - 1) * num_bytes / 1e9 / took, 3)}


def _receive(connection: Any) -> None:
    """Answers each bucket with the sum of its bytes, and the segments that are free again."""
    from roll.distributed.weights.segments import SegmentReader, open_on_gpu

    reader = SegmentReader()
    while (message := connection.recv()) is not None:
        num_bytes, place = message
        on_gpu = isinstance(place, tuple)
        data = open_on_gpu(place, 0) if on_gpu else torch.from_numpy(np.array(reader.read(place, num_bytes)))
        total = int(data.sum(dtype=torch.int64))
        del data
        connection.send((total, reader.take_released()))


def vllm_rows(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What one start of an engine can show: on a GPU a start takes longer than all the rest."""
    count, prompt, new = (4, 16, 16) if args.rehearse else (256, 1024, 64)
    _, _, batched = args.engine.partition(" ")
    options = options_of("vllm", args) | ({"max_num_batched_tokens": int(batched)} if batched else {})
    engine: Any = STRATEGIES.get("vllm")(
        context(path, "actor_infer", "vllm", options, sequence_length=prompt + new, max_running_requests=count)
    )
    figures: dict[str, Any] = {"requests": count, "start_s": round(seconds(engine.setup), 1)}
    try:
        sampled(engine, count, prompt, 1, seed=0)
        figures["prompt_tokens_per_s"] = round(count * prompt / sampled(engine, count, prompt, 1, seed=1)[1])
        args.note(figures)
        if batched:
            return figures
        figures |= _gap(path, sampled(engine, count, prompt, new, seed=2)[0])
        args.note(figures)
        length = (prompt + new) // 4
        figures["new_tokens_per_s"] = max(new_tokens_per_s(engine, count, length, length, seed) for seed in range(3))
        args.note(figures)
        if torch.cuda.is_available():
            figures["sleep"] = {level: _sleep_level(engine, level) for level in (1, 2)}
        return figures
    finally:
        engine.shutdown()


def sampled(engine: Any, count: int, prompt: int, new: int, seed: int) -> tuple[list[tuple[np.ndarray, Any]], float]:
    """Random prompts with their completions, and the seconds that they took."""
    prompts = np.random.default_rng(seed).integers(0, 500, (count, prompt))
    params = [SamplingParams(max_new_tokens=new, seed=number) for number in range(count)]
    requests = [GenerateRequest(f"{seed}-{new}-{i}", prompts[i], params[i]) for i in range(count)]

    async def run() -> list[Any]:
        return await asyncio.gather(*map(engine.generate, requests))

    start = time.perf_counter()
    completions = asyncio.run(run())
    return list(zip(prompts, completions, strict=True)), time.perf_counter() - start


def _gap(path: Path, completions: list[tuple[np.ndarray, Any]]) -> dict[str, Any]:
    """Log-probs of sampled tokens: an engine's and a trainer's, both in bf16."""
    rows = [np.concatenate([prompt, done.token_ids]) for prompt, done in completions]
    length = max(map(len, rows))
    scorer = STRATEGIES.get("fsdp2_train")(
        context(path, "actor_train", "fsdp2_train", {"fsdp_size": 1}, sequence_length=length)
    )
    scorer.setup()
    answers = [np.arange(len(row)) >= len(prompt) for row, (prompt, _) in zip(rows, completions, strict=True)]
    mask = torch.from_numpy(np.concatenate(answers))
    tokens = torch.from_numpy(np.concatenate(rows).astype(np.int64))
    found = scorer.logprobs(Batch(torch.tensor([len(row) for row in rows]), tokens, mask)).logprobs_T
    sampled = torch.from_numpy(np.concatenate([np.asarray(done.logprobs, np.float64) for _, done in completions]))
    gap = found.cpu()[mask].double() - sampled
    return {
        "tokens": len(gap),
        "mean_gap": round(float(gap.abs().mean()), 5),
        "largest_gap": round(float(gap.abs().max()), 4),
        "kl": round(float((gap.exp() - 1 - gap).mean()), 7),
    }


def _sleep_level(engine: Any, level: int) -> dict[str, Any]:
    def taken() -> float:
        free, total = torch.cuda.mem_get_info()
        return gib(total - free)

    figures: dict[str, Any] = {"gib_awake": taken()}
    figures["sleep_ms"] = round(
        1000 * seconds(lambda: engine._loop.submit(engine._engine.sleep(level=level)).result()), 1
    )
    figures["gib_asleep"] = taken()
    figures["wake_ms"] = round(1000 * seconds(lambda: engine._loop.submit(engine._engine.wake_up()).result()), 1)
    return figures | {"gib_awake_again": taken()}


PARTS: dict[str, tuple[Callable[[Path, argparse.Namespace], dict[str, Any]], tuple[str, ...]]] = {
    "ipc": (ipc, ("plain process",)),
    "attention": (attention, ("one_call", "sequences", "fa2", "fa3", "mask")),
    "output_layer": (output_layer, ("2^25", "2^28", "default")),
    "leaving": (leaving, ("deepspeed_train zero2", "fsdp2_train", "megatron_train")),
    "train": (
        train,
        ("fsdp2_train", "fsdp2_train sharded", "fsdp2_train liger", "deepspeed_train", "megatron_train"),
    ),
    "vllm": (vllm_rows, ("default", "batched 2048")),
    "generate": (generate, ("hf_infer",)),
    "weights": (weights, ("hf_infer", "vllm")),
}
"""Functions by part, and the rows of each, the most telling first."""
PACKAGES = {"fa2": "flash_attn", "fa3": "flash_attn_interface", "liger": "liger_kernel"} | {
    engine: engine for engine in ("vllm", "deepspeed", "megatron")
}
NEED_A_GPU = ("liger", "fa2", "fa3", "batched")
"""Words of rows that no CPU rehearses."""
IMPORTED = ["torch.distributed.fsdp", "transformers.modeling_utils", "transformers.models.auto.modeling_auto"]
"""What every row needs: without a GPU imported once, in a process of which rows are forked."""


def lacks(part: str, row: str) -> str:
    """What a row needs that is not here, in words; empty where it can run."""
    words = {part, *row.split(), row.split()[0].removesuffix("_train")}
    absent = [PACKAGES[word] for word in PACKAGES if word in words and not importlib.util.find_spec(PACKAGES[word])]
    if absent:
        return f"needs the package {absent[0]}"
    return "needs a GPU" if words & set(NEED_A_GPU) and not torch.cuda.is_available() else ""


def measure(part: str, path: str, args: argparse.Namespace, results: Path) -> None:
    """One row in a process of its own, whose memory on the device goes with it."""
    os.setsid()  # what it starts ends with it
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    args.note = lambda figures: results.write_text(json.dumps(figures))  # what a row that is stopped has found
    try:
        found = PARTS[part][0](Path(path), args)
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    args.note(found)
    os._exit("error" in found)  # torch's threads sometimes abort the interpreter's own end


def measured(part: str, row: str, path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of a row, or in words why there are none."""
    if words := lacks(part, row):
        return {"skipped": words}
    multiprocessing.set_forkserver_preload(IMPORTED)
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    results = path.parent / f"{part}-{row}.json"
    namespace = argparse.Namespace(**vars(args) | {"engine": row})
    process = context.Process(target=measure, args=(part, str(path), namespace, results))
    process.start()
    try:
        process.join(args.seconds)
    finally:
        late = process.is_alive()
        if late:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
    found = json.loads(results.read_text()) if results.exists() else {}
    if late:
        return found | {"error": f"not done after {args.seconds:.0f} s"}
    return found if process.exitcode == 0 or "error" in found else found | {"error": f"exit code {process.exitcode}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="a tiny model, on a CPU too")
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--rows", help="only these rows of the parts, e.g. 'default,hf_infer'")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, of which the fastest counts")
    parser.add_argument("--seconds", type=float, default=180.0, help="of a row at most")
    parser.add_argument("--memory", type=float, default=0.4, help="share of the device that vLLM may take")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    if not (args.rehearse or torch.cuda.is_available()):
        print("no GPU here: nothing measured (--rehearse runs the same with a tiny model on a CPU)")
        return
    figures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        make_model(path, "tiny" if args.rehearse else "0.5b")
        for part in args.parts.split(","):
            for row in PARTS[part][1]:
                if args.rows and row not in args.rows.split(","):
                    continue
                name = f"{part}/{row}"
                figures[name] = measured(part, row, path, args)
                print(json.dumps({"what": name} | figures[name]), flush=True)
                if args.json:
                    args.json.write_text(json.dumps(figures, indent=2) + "\n")
    raise SystemExit(any("error" in found for found in figures.values()))


if __name__ == "__main__":
    main()
