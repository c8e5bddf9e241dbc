"""A pretrained model learns sums: `roll train rlvr_smollm2` beside TRL's ``GRPOTrainer``, one after the other.

    python benchmarks/real_model_trl.py --trl-python /path/to/python/with/trl [--seed 0] [--out FOLDER]

Both train SmolLM2-135M-Instruct on the questions of the example, with its system message and its rewards: eight
responses of at most 12 tokens to each of eight questions, AdamW, the same learning rates and clipping, the loss
averaged over the tokens of a step. TRL is tried as one process with two threads and as two with one each, in float32
and under bfloat16 autocast, with micro-batches of 16 and of all responses of a process. Two steps after a first one
that warms up say which is fastest; that one trains as many steps as ROLL. Four sampled answers to each held-out
question are counted after as much time as ROLL's steps took and at the end; the time for that is left out.

*Samples/s* is the median over the steps but for the first. TRL 1.16.0, accelerate 1.15.0 and datasets 5.2.0 were
measured. Without ``--trl-python``, as `make bench` starts it, this is all that it says. It takes some ten minutes and
both cores, which must be idle.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "rlvr_smollm2"
SAMPLES, ANSWERS, NEW_TOKENS = 8, 4, 12
GOAL = 2.5
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")
ENDS_IN_A_NUMBER = re.compile(r".*\d\.?\s*", re.DOTALL)


def is_right(response: str, solution: str) -> bool:
    """Tells whether the last number of the response is the solution."""
    found = NUMBER.findall(response)
    return bool(found) and float(found[-1].replace(",", "").rstrip(".")) == float(solution)


def reward(response: str, solution: str) -> float:
    """What the example's two verifiers give together."""
    return 0.7 * is_right(response, solution) + 0.3 * bool(ENDS_IN_A_NUMBER.fullmatch(response))


# --- TRL, in processes of its own


def train_with_trl(work: dict[str, Any]) -> None:
    """Takes the steps; rank 0 prints a line of JSON for each step, and for each evaluation."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(work["threads"])
    rank, processes = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    model: Any = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)

    def messages(row: dict[str, Any]) -> list[dict[str, str]]:
        return [{"role": "system", "content": work["system_prompt"]}, {"role": "user", "content": row["prompt"]}]

    def say(message: dict[str, Any]) -> None:
        if rank == 0:
            print(json.dumps(message), flush=True)

    @torch.inference_mode()
    def accuracy() -> float:
        rows = [row for row in work["held_out"] for _ in range(ANSWERS)]
        texts = [
            tokenizer.apply_chat_template(messages(row), add_generation_prompt=True, tokenize=False) for row in rows
        ]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        model.eval()
        ids = model.generate(**inputs, do_sample=True, top_k=0, temperature=1.0, max_new_tokens=NEW_TOKENS)
        model.train()
        said = tokenizer.batch_decode(ids[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        return statistics.mean(is_right(text, row["solution"]) for text, row in zip(said, rows, strict=True))

    class Steps(TrainerCallback):
        spent, evaluated = 0.0, False

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, *more: Any, **kwargs: Any) -> None:
            seconds = time.perf_counter() - self.start
            self.spent += seconds
            say({"seconds": seconds})
            is_last = state.global_step == work["steps"]
            is_due = not self.evaluated and self.spent >= work["budget"]
            if work["evaluates"] and (is_due or is_last) and rank == 0:
                self.evaluated = True
                say({"step": state.global_step, "spent": self.spent, "accuracy": accuracy()})
            if processes > 1:
                torch.distributed.barrier()

    def rewards(completions: list[Any], solution: list[str], **columns: Any) -> list[float]:
        return [reward(said[0]["content"], right) for said, right in zip(completions, solution, strict=True)]

    rows = [{"prompt": messages(row), "solution": row["solution"]} for row in work["rows"]]
    share = work["questions"] * SAMPLES // processes
    size = min(share, work["micro_batch"])
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=rewards,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Steps()],
        args=GRPOConfig(
            output_dir=work["output"],
            use_cpu=True,
            bf16=work["bf16"],
            gradient_checkpointing=False,
            max_steps=work["steps"],
            per_device_train_batch_size=size,
            gradient_accumulation_steps=share // size,
            steps_per_generation=share // size,
            num_generations=SAMPLES,
            max_completion_length=NEW_TOKENS,
            temperature=1.0,
            num_iterations=1,
            beta=0.0,
            loss_type="dapo",  # all tokens of a step weigh the same
            learning_rate=work["learning_rate"],
            lr_scheduler_type="polynomial",
            lr_scheduler_kwargs={"lr_end": work["min_rate"] * work["learning_rate"], "power": 1.0},  # a straight line
            warmup_steps=work["warmup"],
            weight_decay=work["weight_decay"],
            max_grad_norm=1.0,
            shuffle_dataset=False,
            seed=work["seed"],
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    if work["evaluates"] and rank == 0:
        say({"step": 0, "spent": 0.0, "accuracy": accuracy()})
    if processes > 1:
        torch.distributed.barrier()
    trainer.train()


def run_trl(python: str, work: dict[str, Any], out: Path, layout: str) -> list[dict[str, Any]]:
    """What rank 0 said."""
    processes, threads = map(int, layout.split("x"))
    name = f"{layout}-{'bf16' if work['bf16'] else 'fp32'}-{work['micro_batch']}-{work['steps']}"
    file = out / f"{name}.json"
    file.write_text(json.dumps(work | {"threads": threads, "output": str(out / name)}))
    common = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "0"}
    running = []
    for rank in range(processes):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29731, "GLOO_SOCKET_IFNAME": "lo", **ranks}
        environment = common | ({key: str(value) for key, value in group.items()} if processes > 1 else {})
        with (out / f"{name}-{rank}.log").open("w") as log:
            command = [python, __file__, "--work", str(file)]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment))
    said = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError(f"TRL {name} failed; the end of its output:\n{(out / f'{name}-0.log').read_text()[-2000:]}")
    return [json.loads(line) for line in said[0].splitlines() if line.startswith('{"')]


# --- ROLL


def run_roll(seed: int, out: Path) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Seconds of each step without evaluations, the summary and the configuration of a run of the example."""
    data = f"data_generator.folder={out / 'data'}"
    command = [sys.executable, "-m", "roll", "train", CONFIG, f"seed={seed}", f"output_dir={out}", data]
    subprocess.run(command, check=True, stdout=(out / "roll.log").open("w"), stderr=subprocess.STDOUT, cwd=ROOT)
    import yaml

    run = out / CONFIG
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    phases = ("sync", "rollout", "logprobs", "advantage", "train")
    seconds = [sum(record.get(f"time/{phase}", 0.0) for phase in phases) for record in records if record["step"]]
    return seconds, json.loads((run / "summary.json").read_text()), yaml.safe_load((run / "config.yaml").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="interpreter that can import trl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "output" / "real_model_trl", help="default: %(default)s")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        train_with_trl(json.loads(options.work.read_text()))
        return 0
    if not options.trl_python:
        print(__doc__)
        return 0
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    seconds, summary, config = run_roll(options.seed, out)
    own = statistics.median(seconds[1:])
    questions, training = config["rollout_batch_size"], config["actor_train"]["training_args"]
    samples = questions * SAMPLES
    shares = [summary["eval"][when]["accuracy"] for when in ("before", "after")]
    print(
        f"ROLL: {samples / own:.1f} samples/s, {own:.2f} s a step; {sum(seconds):.0f} s for {len(seconds)} steps",
        flush=True,
    )
    print(f"  held-out accuracy {shares[0]:.1%} -> {shares[1]:.1%}", flush=True)
    data = out / "data"
    work = {
        "model": str(model_folder()),
        "rows": [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()],
        "held_out": [json.loads(line) for line in (data / "val.jsonl").read_text().splitlines()],
        "system_prompt": config["actor_train"]["data_args"]["system_prompt"],
        "questions": questions,
        "learning_rate": training["learning_rate"],
        "min_rate": training["min_lr_ratio"],
        "warmup": training["warmup_steps"],
        "weight_decay": training["weight_decay"],
        "seed": options.seed,
        "budget": sum(seconds),
    }
    found = {}
    for layout in ("1x2", "2x1"):
        for precision in ("fp32", "bf16"):
            for size in (16, samples):
                trial = work | {"bf16": precision == "bf16", "micro_batch": size, "steps": 3, "evaluates": False}
                said = run_trl(options.trl_python, trial, out, layout)
                step = statistics.median([line["seconds"] for line in said][1:])
                found[layout, precision, size] = step
                print(f"TRL {layout} {precision}, micro-batches of {size}: {step:.2f} s a step", flush=True)
    layout, precision, size = best = min(found, key=found.__getitem__)
    trial = work | {"bf16": precision == "bf16", "micro_batch": size, "steps": len(seconds), "evaluates": True}
    said = run_trl(options.trl_python, trial, out, layout)
    theirs = statistics.median([line["seconds"] for line in said if "seconds" in line][1:])
    print(f"TRL's fastest {best}: {samples / theirs:.1f} samples/s, {theirs:.2f} s a step", flush=True)
    for line in said:
        if "accuracy" in line:
            print(f"  after step {line['step']}, {line['spent']:.0f} s: held-out accuracy {line['accuracy']:.1%}")
    print(f"ROLL / TRL: {theirs / own:.2f} (goal {GOAL:g})")
    return int(theirs / own < GOAL)


def model_folder() -> Path:
    """The folder of SmolLM2 in the user's cache."""
    from roll.extras.smollm2 import make

    return Path(make())


if __name__ == "__main__":
    sys.exit(main())
