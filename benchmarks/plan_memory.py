"""Peak memory of training and generating processes on a CPU, beside what ``roll plan`` computes for them.

Each layout is a fresh process (or two), as a run's worker is: it imports what a worker imports, loads the model, takes
steps on samples that are as long as the configuration allows, and tells the most that was resident (``VmHWM``). The
model of 50 million parameters is written on the spot.

    python benchmarks/plan_memory.py [--only NAME[,NAME]] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from roll.configs.worker import WorkerConfig
from roll.extras.plan.memory import PROCESS_BYTES, RoleMemory, Surroundings, hf_generator_memory, trainer_memory
from roll.extras.plan.work import Lengths, Role
from roll.models.shapes import ModelShape

MIB = 2**20
TARGET = 0.15
BUCKET_MB = 64
GROUP = 8
"""Requests with the same prompt."""
MEDIUM: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "dtype": "float32",
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 14,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Layout:
    """One measurement."""

    name: str
    model: str = "medium"
    role: str = "actor_train"
    strategy: str = "fsdp2_train"
    options: dict[str, Any] = field(default_factory=dict)
    world: int = 1
    rows: int = 4
    length: int = 256
    answer: int = 128
    dtype: str = "fp32"
    recompute: bool = False
    packing: bool = False
    lora: str | None = None
    entropy: bool = False
    export: bool = False
    running: int = 32
    dynamic: int = 0

    def worker(self) -> WorkerConfig:
        args = {"dtype": self.dtype, "disable_gradient_checkpointing": not self.recompute}
        section: dict[str, Any] = {
            "model_args": args | ({"lora_target": self.lora} if self.lora else {}),
            "training_args": {"per_device_train_batch_size": self.rows, "learning_rate": 1e-5},
            "strategy_args": {"strategy_name": self.strategy, "strategy_config": self.options},
            "infer_batch_size": self.rows,
            "use_sequence_packing": self.packing,
            "share_prompts": False,
            "world_size": self.world,
        }
        if self.dynamic:
            section |= {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": self.dynamic}
        return WorkerConfig.model_validate(section)

    def predicted(self, shape: ModelShape) -> RoleMemory:
        """What the plan says of a worker of this layout."""
        worker = self.worker()
        trained = self.strategy == "fsdp2_train"
        lora = (worker.model_args.lora_rank, worker.model_args.lora_targets) if self.lora else None
        role = Role(self.role, worker, shape, "value" if self.role == "critic" else "lm", trained, lora)
        around = Surroundings(
            process=PROCESS_BYTES,
            lengths=Lengths(self.length, self.answer),
            bucket_bytes=BUCKET_MB * MIB,
            max_running=self.running,
            requests=self.running,
            group=GROUP,
            entropy=self.entropy,
            exports=self.export,
            scores=not trained,
        )
        generates = self.role == "actor_infer"
        found = hf_generator_memory(role, around) if generates else trainer_memory(role, around)
        return replace(found, phases={k: v for k, v in found.phases.items() if not (generates and k == "sync")})


LAYOUTS = (
    Layout("tiny", "tiny"),
    Layout("tiny, 64 rows", "tiny", rows=64),
    Layout("tiny, 64 rows, checkpointing", "tiny", rows=64, recompute=True),
    Layout("tiny, 2 replicas, 32 rows", "tiny", world=2, options={"fsdp_size": 1}, rows=32),
    Layout("tiny, critic", "tiny", "critic", rows=64),
    Layout("tiny, generates 64 of 512", "tiny", "actor_infer", "hf_infer", length=512, answer=8, running=64),
    Layout("tiny, generates 256 of 512", "tiny", "actor_infer", "hf_infer", length=512, answer=8, running=256),
    Layout("1 row", rows=1),
    Layout("4 rows"),
    Layout("8 rows", rows=8),
    Layout("8 rows, checkpointing", rows=8, recompute=True),
    Layout("2 rows of 1024", rows=2, length=1024, answer=512),
    Layout("2 rows of 1024, checkpointing", rows=2, length=1024, answer=512, recompute=True),
    Layout("4 rows, entropy", entropy=True),
    Layout("packed, 1024 tokens", packing=True, dynamic=1024),
    Layout("bf16, 2 rows", dtype="bf16", rows=2),
    Layout("bf16, 2 rows, checkpointing", dtype="bf16", rows=2, recompute=True),
    Layout("2 replicas, 4 rows", world=2, options={"fsdp_size": 1}),
    Layout("2 shards, 4 rows", world=2),
    Layout("2 shards, 4 rows, checkpointing", world=2, recompute=True),
    Layout("LoRA of all layers, 4 rows", lora="all-linear"),
    Layout("LoRA of q and v, bf16, 2 rows", lora="q_proj,v_proj", dtype="bf16", rows=2),
    Layout("LoRA of all layers, checkpointing", lora="all-linear", recompute=True),
    Layout("critic, 4 rows", role="critic"),
    Layout("reference, 8 rows", role="reference", strategy="fsdp2_infer", rows=8),
    Layout("reference, bf16, 4 rows", role="reference", strategy="fsdp2_infer", dtype="bf16"),
    Layout("weights exported", export=True),
    Layout("generates 32 of 512", "medium", "actor_infer", "hf_infer", length=512, answer=8),
    Layout("generates 128 of 512", "medium", "actor_infer", "hf_infer", length=512, answer=8, running=128),
    Layout("generates 32 of 2048", "medium", "actor_infer", "hf_infer", length=2048, answer=8),
    Layout(
        "generates 64 of 1024, bf16",
        "medium",
        "actor_infer",
        "hf_infer",
        length=1024,
        answer=8,
        running=64,
        dtype="bf16",
    ),
)


def measure(layout: Layout, folder: Path, rank: int, port: int, told: Any) -> None:
    """Plays a worker and tells the peak of its resident memory, in bytes, and what it was before the model."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch

    from roll.pipeline.workers import TrainWorker  # noqa: F401 (what a worker imports)
    from roll.utils.memory import keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(1)
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    import roll.distributed.strategy.fsdp2.strategy
    import roll.distributed.strategy.hf_infer.strategy  # noqa: F401

    before = status("VmHWM")
    (generate if layout.role == "actor_infer" else train)(layout, folder, rank)
    told.put((rank, status("VmHWM"), before))
    told.close()
    told.join_thread()
    os._exit(0)


def train(layout: Layout, folder: Path, rank: int) -> None:
    """Loads, then takes optimizer steps or scores, on samples as long as they may be."""
    import torch

    from roll.algorithms.types import LossContext, LossOutput, TokenScores
    from roll.data.batch import Batch
    from roll.distributed.strategy import STRATEGIES
    from roll.distributed.strategy.base import StrategyContext
    from roll.models.loading import Head
    from roll.models.lora import LoraSpec

    worker = layout.worker()
    args = worker.model_args
    lora = LoraSpec(args.lora_rank, 2 * args.lora_rank, args.lora_targets) if layout.lora else None
    head: Head = "value" if layout.role == "critic" else "lm"
    context = StrategyContext(
        worker,
        layout.role,
        str(folder),
        rank=rank,
        world_size=layout.world,
        head=head,
        sequence_length=layout.length,
        lora=lora,
    )
    strategy = STRATEGIES.get(layout.strategy)(context)
    strategy.setup()
    rows = layout.dynamic // layout.length if layout.dynamic else layout.rows
    lengths = torch.full((rows + 1,), layout.length)  # one more than a micro-batch takes
    tokens = torch.randint(0, 200, (int(lengths.sum()),))
    batch = Batch(lengths, tokens, torch.zeros(len(tokens), dtype=torch.bool))
    batch = batch.replace(loss_mask_T=batch.positions_T >= layout.length - layout.answer)

    def loss(scores: TokenScores, micro_batch: Batch, around: LossContext) -> LossOutput:
        if scores.values_T is not None:
            return LossOutput(scores.values_T.square().sum() / around.num_tokens)
        assert scores.logprobs_T is not None and scores.entropy_T is not None
        gain = scores.logprobs_T + 0.01 * scores.entropy_T if layout.entropy else scores.logprobs_T
        return LossOutput(-gain.sum() / around.num_tokens)

    if layout.strategy == "fsdp2_train":
        strategy.train_step(batch.select(torch.tensor([0])), loss)  # from now on the moments are in memory
        strategy.train_step(batch, loss)
    else:
        strategy.logprobs(batch)
    if layout.export:
        for bucket in strategy.export_weights(BUCKET_MB * MIB):
            del bucket


def generate(layout: Layout, folder: Path, rank: int) -> None:
    """Loads, then answers as many requests at once as may run."""
    import asyncio

    import numpy as np

    from roll.data.requests import GenerateRequest, SamplingParams
    from roll.distributed.strategy.base import StrategyContext
    from roll.distributed.strategy.hf_infer.strategy import HfInfer

    context = StrategyContext(
        layout.worker(),
        layout.role,
        str(folder),
        sequence_length=layout.length,
        max_running_requests=layout.running,
    )
    strategy = HfInfer(context)
    strategy.setup()
    params = SamplingParams(max_new_tokens=layout.answer)
    prompts = [np.random.default_rng(index).integers(5, 200, layout.length - layout.answer) for index in range(256)]
    requests = [GenerateRequest(f"r{index}", prompts[index // GROUP], params) for index in range(layout.running)]

    async def run() -> None:
        await asyncio.gather(*(strategy.generate(request) for request in requests))

    asyncio.run(run())


def status(name: str) -> int:
    """An entry of this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def write_models(folder: Path) -> None:
    """The tiny model, and one of 50 million parameters with the same tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from roll.models.tiny import make_tiny_model, make_tokenizer

    make_tiny_model(folder / "tiny", seed=0)
    Qwen2ForCausalLM(Qwen2Config(**MEDIUM)).save_pretrained(folder / "medium")
    make_tokenizer().save_pretrained(folder / "medium")


def run(layout: Layout, folder: Path) -> tuple[int, int]:
    """The largest peak of the layout's processes, and the largest resident memory of one before its model."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told = context.Queue()
    ranks = [context.Process(target=measure, args=(layout, folder, rank, port, told)) for rank in range(layout.world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        sys.exit(f"{layout.name}: a process ended with {[process.exitcode for process in ranks]}")
    peaks = [told.get(timeout=10) for _ in ranks]
    return max(peak for _, peak, _ in peaks), max(before for *_, before in peaks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of names, separated by semicolons")
    parser.add_argument("--json", type=Path, help="file for the rows")
    args = parser.parse_args()
    wanted = [layout for layout in LAYOUTS if any(part in layout.name for part in args.only.split(";"))]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = multiprocessing.get_context("spawn").Process(target=write_models, args=(folder,))
        writer.start()
        writer.join()
        print("| layout | phase | predicted MiB | measured MiB | error | above the process, error |", flush=True)
        print("|---|---|---|---|---|---|", flush=True)
        for layout in wanted:
            shape = ModelShape.of(json.loads((folder / layout.model / "config.json").read_text()))
            memory = layout.predicted(shape)
            phase = max(memory.phases, key=memory.total)
            predicted = memory.total(phase)
            peak, before = run(layout, folder / layout.model)
            error = predicted / peak - 1
            above = (predicted - PROCESS_BYTES) / max(1, peak - before) - 1
            row = {
                "layout": layout.name,
                "phase": phase,
                "predicted_mib": round(predicted / MIB),
                "measured_mib": round(peak / MIB),
                "before_mib": round(before / MIB),
                "error": round(error, 3),
                "error_above_process": round(above, 3),
                "parts": {part: round(size / MIB) for part, size in memory.phases[phase].items()},
            }
            rows.append(row)
            cells = (layout.name, phase, row["predicted_mib"], row["measured_mib"], f"{error:+.1%}", f"{above:+.1%}")
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    missed = [row["layout"] for row in rows if abs(float(str(row["error"]))) > TARGET]
    print(
        f"{len(rows) - len(missed)} of {len(rows)} within {TARGET:.0%}; missed: {', '.join(map(str, missed)) or 'none'}"
    )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
