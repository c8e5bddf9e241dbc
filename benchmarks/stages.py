"""Steps on preferences, of a reward model and of a distillation: ROLL beside TRL's trainers, in one run.

All contestants take the same optimizer steps (AdamW, constant rate, clipped norm) from the same weights on the same
rows in the same order: a Qwen2 model (6 layers, hidden 256, 4 heads, MLP 1024, vocabulary 2048, float32 weights), 32
pairs a step, a question of 32 to 96 tokens and two answers of 16 to 128. They alternate; the median of their steps
counts, after one that warms up. Tokens are those of both conversations of every pair, however they are computed.

* ``dpo``: the sigmoid loss, the reference's log-probabilities known ahead in both (``DPOTrainer``). ROLL computes the
  question of a pair once.
* ``rm``: Bradley-Terry, from the same head (``RewardTrainer``).
* ``distill``: ``--kd-objective`` from a teacher of the policy's size, which scores each step in both, at the tokens of
  the chosen answers alone (``trl.experimental.gkd.GKDTrainer`` with ``lmbda: 0``).

ROLL's steps are those of its pipelines (``OfflineTraining``), on real Ray workers: ``fsdp2_train``, two with a thread
each (``--layout``). TRL is there as one process with two threads and as two with one, in float32 and under bfloat16
autocast, and its fastest variant is what ROLL is compared with; ROLL trains in ``--precision``. Losses are
compared in float32. Both libraries define those of pairs alike. GKD's differs in four places, so that it is compared
where they meet, in one process, one pass per step and at temperature 1:

* it is a mean over the answer tokens of a pass and a rank, of which a step takes the plain mean; ROLL's is the mean
  over all answer tokens of the step, however it is cut;
* ``beta`` at 0 and 1 is the KL itself, forward and reverse; ROLL names the three;
* ``temperature`` is that of its generation, the divergence is taken at 1; ROLL's ``kd_temperature`` divides both
  logits;
* its collator puts padding in front of whole conversations, and the loss then begins at the width of the longest
  question: answer tokens further left are left out. Here it gets rows whose answers all begin at the same place.

    python benchmarks/stages.py --trl-python /path/to/a/python/with/trl     (TRL 1.16.0 was measured)
    python benchmarks/stages.py --trl-python … --precision fp32 --trl-precisions fp32

Exit code 1 if a loss differs by more than 1e-5 or ROLL is less than 1.3 times as fast; 0 where TRL cannot be imported.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_step import EOS_ODDS, VOCABULARY, WORDS, Rival, Step, find_trl, make_model, started

if TYPE_CHECKING:
    from torch import Tensor

    from roll.configs.offline import OfflineConfig
    from roll.data.batch import Batch
    from roll.pipeline.offline.pipeline import OfflineTraining

STAGES = ("dpo", "rm", "distill")
TARGET, AGREEMENT = 1.3, 1e-5
LEARNING_RATE, BETA, JSD_BETA = 1e-4, 0.1, 0.3
GKD_BETAS = {"forward_kl": 0.0, "reverse_kl": 1.0, "js_divergence": JSD_BETA}
RIVALS = Path(__file__).with_name("stages_rivals.py")
FIRST_WORD = 258
"""Token id of the first word (``make_model``)."""


@dataclass(frozen=True)
class Pair:
    """A question and two answers, as token ids."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    def num_tokens(self, stage: str) -> int:
        """Of both conversations; a distillation takes the chosen answer alone."""
        chosen = len(self.prompt) + len(self.chosen)
        return chosen if stage == "distill" else chosen + len(self.prompt) + len(self.rejected)


def make_pairs(count: int) -> list[Pair]:
    """Random words."""
    rng = random.Random(0)

    def words(low: int, high: int) -> list[int]:
        return [FIRST_WORD + rng.randrange(WORDS) for _ in range(rng.randint(low, high))]

    return [Pair(words(32, 96), words(16, 128), words(16, 128)) for _ in range(count)]


def as_batch(pairs: list[Pair], stage: str) -> Batch:
    """The pairs as rows, a chosen and a rejected one in turn; for a distillation the chosen ones alone."""
    import torch

    from roll.data.batch import Batch

    rows, masks = [], []
    for pair in pairs:
        for answer in (pair.chosen,) if stage == "distill" else (pair.chosen, pair.rejected):
            ids = torch.tensor(pair.prompt + answer)
            if stage == "rm":  # the score stands on one more token
                ids = torch.cat([ids, ids[-1:]])
            rows.append(ids)
            first = len(ids) - 1 if stage == "rm" else len(pair.prompt)
            masks.append(torch.arange(len(ids)) >= first)
    batch = Batch(torch.tensor([len(ids) for ids in rows]), torch.cat(rows), torch.cat(masks))
    if stage == "distill":
        return batch
    numbers = torch.arange(len(rows))
    return batch.replace(pair_B=numbers // 2, preferred_B=numbers % 2 == 0)


def config_of(stage: str, model: Path, folder: Path, args: argparse.Namespace) -> OfflineConfig:
    """The run's configuration, checked as the command line checks one."""
    from roll.configs.distill import DistillConfig
    from roll.configs.loader import validate
    from roll.configs.preference import DPOConfig, RewardTrainingConfig

    workers, threads = map(int, args.layout.split("x"))
    micro_batch = args.pairs // workers
    tree: dict[str, Any] = {
        "exp_name": stage,
        "output_dir": str(folder),
        "track_with": [],
        "pretrain": str(model),
        "num_gpus_per_node": workers,
        "max_steps": args.steps + 1,
        "sequence_length": 256,
        "sample_overflow": "error",
        "max_grad_norm": 1.0,
        "actor_train": {
            "model_args": {"dtype": "fp32", "attn_implementation": "sdpa", "disable_gradient_checkpointing": True},
            "data_args": {"file_name": str(folder / "none.jsonl"), "prompt": "prompt"},
            "training_args": {
                "learning_rate": LEARNING_RATE,
                "weight_decay": 0.0,
                "lr_scheduler_type": "constant",
                "per_device_train_batch_size": micro_batch,
            },
            "strategy_args": {
                "strategy_name": "fsdp2_train",
                "strategy_config": {"fsdp_size": 1, "param_dtype": args.precision},
            },
            "device_mapping": list(range(workers)),
            "use_sequence_packing": True,
            "system_envs": {"OMP_NUM_THREADS": str(threads)},
        },
    }
    (folder / "none.jsonl").touch()
    if stage == "rm":
        return validate(RewardTrainingConfig, tree)
    if stage == "distill":
        role = {key: tree["actor_train"][key] for key in ("model_args", "device_mapping", "system_envs")}
        engine = {"strategy_name": "fsdp2_infer", "strategy_config": {"fsdp_size": 1, "param_dtype": args.precision}}
        tree |= {"teacher": role | {"strategy_args": engine, "infer_batch_size": micro_batch}}
        return validate(DistillConfig, tree | {"teacher_pretrain": f"{model}-teacher"} | objective(args))
    return validate(DPOConfig, tree | {"beta": BETA, "precompute_reference": True})


def objective(args: argparse.Namespace) -> dict[str, Any]:
    """Keys of the divergence."""
    mixed = {"jsd_beta": JSD_BETA} if args.kd_objective == "js_divergence" else {}
    return {"kd_objective": args.kd_objective, **mixed}


@contextmanager
def training_of(stage: str, config: OfflineConfig, pairs: list[Pair]) -> Iterator[OfflineTraining]:
    """The pipeline's optimizer steps, with the workers that take them."""
    from roll.algorithms.distillation import build_distill_loss
    from roll.algorithms.preferences import build_preference_loss, build_reward_loss
    from roll.configs.distill import DistillConfig, DistillLossConfig
    from roll.configs.preference import PreferenceConfig, RewardLossConfig
    from roll.pipeline.launch import MODEL_WORKERS
    from roll.pipeline.offline.pipeline import OfflineTraining
    from roll.pipeline.roles import Roles
    from roll.pipeline.teachers import DatasetTeacher

    batch = as_batch(pairs, stage)
    losses: dict[str, tuple[Any, Any]] = {
        "dpo": (build_preference_loss, PreferenceConfig(beta=BETA)),
        "rm": (build_reward_loss, RewardLossConfig()),
        "distill": (build_distill_loss, DistillLossConfig()),
    }
    prepare = None
    with started(config, MODEL_WORKERS) as (_, _, clusters):
        roles = Roles(config, clusters)
        roles.setup(config.pretrain, config.max_steps, config.model_of("teacher"))
        if stage == "dpo":
            batch = batch.replace(ref_logprobs_T=roles.actor.logprobs(batch).logprobs_T)
        if isinstance(config, DistillConfig):
            teacher = DatasetTeacher(config, roles.teacher, config.teacher_pretrain, VOCABULARY)

            def prepare(batch: Batch, rows: Tensor) -> Batch:
                return teacher.score(batch)

        yield OfflineTraining(
            roles.actor,
            batch,
            *losses[stage],
            batch_size=config.actor_train.global_train_batch_size,
            max_steps=config.max_steps,
            seed=0,
            prepare=prepare,
        )


def measure(stage: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All contestants, alternating."""
    model = folder / "model"
    make_model(model, EOS_ODDS["natural"])
    if stage == "rm":
        model = with_score_head(model, folder / "classifier")
    if stage == "distill":
        make_model(Path(f"{model}-teacher"), EOS_ODDS["natural"], seed=1)
    pairs = make_pairs((args.steps + 1) * args.pairs)
    config = config_of(stage, model, folder, args)
    taken: dict[str, list[Step]] = {"roll": []}
    losses: dict[str, list[float]] = {"roll": []}
    with ExitStack() as stack:
        training = stack.enter_context(training_of(stage, config, pairs))
        rows = 1 if stage == "distill" else 2
        order = [(training.rows(step)[::rows] // rows).tolist() for step in range(1, args.steps + 2)]
        rivals = {}
        most = args.pairs if stage == "distill" else args.trl_micro_batch
        for layout in args.trl_layouts if args.trl_python else []:
            for precision in args.trl_precisions:
                name = f"trl {layout} {precision}"
                processes, threads = map(int, layout.split("x"))
                work = {
                    "model": str(model),
                    "teacher": f"{model}-teacher",
                    "output": str(folder / name.replace(" ", "-")),
                    "bf16": precision == "bf16",
                    "pairs": [vars(pairs[number]) for numbers in order for number in numbers],
                    "pairs_per_step": args.pairs,
                    "micro_batch": min(most, args.pairs // processes),
                    "steps": args.steps + 1,
                    "learning_rate": LEARNING_RATE,
                    "beta": GKD_BETAS[args.kd_objective] if stage == "distill" else BETA,
                    "threads": threads,
                }
                path = folder / f"{stage}-{name.replace(' ', '-')}.json"
                path.write_text(json.dumps(work))
                rivals[name] = rival = Rival(args.trl_python, stage, path, processes, threads, RIVALS)
                stack.callback(rival.close)
                taken[name], losses[name] = [], []
        for number in range(args.steps + 1):
            tokens = sum(pairs[index].num_tokens(stage) for index in order[number])
            start = time.perf_counter()
            metrics = training.train(number + 1, number + 1)[0]
            taken["roll"].append(Step(time.perf_counter() - start, tokens))
            losses["roll"].append(metrics[f"{stage}/loss"])
            for name, rival in rivals.items():
                start = time.perf_counter()
                losses[name].append(rival.ask({"step": number})["loss"])
                taken[name].append(Step(time.perf_counter() - start, tokens))
    return report(stage, {name: steps[1:] for name, steps in taken.items()}, losses)


def with_score_head(model: Path, folder: Path) -> Path:
    """The same model as a classifier with one output, whose head is not zero."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    classifier = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    classifier.config.pad_token_id = tokenizer.pad_token_id
    classifier.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def report(stage: str, taken: dict[str, list[Step]], losses: dict[str, list[float]]) -> dict[str, Any]:
    """Prints a table of medians and what was agreed on; returns the figures."""
    speeds = {name: statistics.median(step.tokens_per_s for step in steps) for name, steps in taken.items()}
    print(f"{stage}:")
    for name, speed in speeds.items():
        seconds = statistics.median(step.seconds for step in taken[name])
        first = ", ".join(f"{loss:.6f}" for loss in losses[name][:2])
        print(f"  {name:12} {speed:7,.0f} tokens/s  {seconds:6.2f} s  first losses {first}")
    figures: dict[str, Any] = {"tokens_per_s": speeds, "losses": losses}
    if rivals := [name for name in speeds if name != "roll"]:
        best = max(rivals, key=lambda name: speeds[name])
        figures["ratio"] = speeds["roll"] / speeds[best]
        figures["difference"] = max(
            (
                abs(ours - theirs)
                for name in rivals
                if name.endswith("fp32") and (stage != "distill" or " 1x" in name)
                for ours, theirs in zip(losses["roll"], losses[name], strict=True)
            ),
            default=0.0,
        )
        print(
            f"  ROLL / {best}: {figures['ratio']:.2f} (target {TARGET}); losses differ by {figures['difference']:.1e}"
        )
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each contestant")
    parser.add_argument("--pairs", type=int, default=32, help="of an optimizer step")
    parser.add_argument("--layout", default="2x1", help="ROLL's workers x threads of each")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16", help="in which ROLL trains")
    parser.add_argument("--kd-objective", choices=GKD_BETAS, default="js_divergence", help="of distill")
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter that can import trl")
    parser.add_argument("--trl-layouts", nargs="+", default=["1x2", "2x1"], help="TRL's processes x threads of each")
    parser.add_argument("--trl-precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--trl-micro-batch", type=int, default=16, help="pairs per pass of TRL, at most; distill: all")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    if reason := find_trl(args.trl_python):
        print(f"TRL is left out: {reason}")
        args.trl_python = None
    figures = {}
    for stage in args.stages:
        with tempfile.TemporaryDirectory() as folder:
            figures[stage] = measure(stage, args, Path(folder))
    print(json.dumps(figures))
    compared = [found for found in figures.values() if "ratio" in found]
    differs = args.precision == "fp32" and any(found["difference"] > AGREEMENT for found in compared)
    return int(differs or any(found["ratio"] < TARGET for found in compared))


if __name__ == "__main__":
    sys.exit(main())
