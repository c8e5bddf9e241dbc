"""Runs recipes that cannot learn, and shows whether `roll diagnose` names the cause.

    python scripts/broken_recipes.py [NAME …] [--out output/broken_recipes] [--records FILE]

Each is `rlvr_math` on one CPU slot with one thing wrong, from the same warm-started model, 16 steps of 256 responses:
about half a minute. `sound` has nothing wrong. A run that is complete in ``--out`` is not made again. With
``--records tests/unit/report/recipes.json.gz`` what the runs have written goes to the file whose runs the tests
diagnose. Exit code 1 if a cause is not first.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from roll.report.diagnosis import Diagnosis, diagnose
from roll.report.record import RunRecord

ROOT = Path(__file__).resolve().parents[1]
TRAINING = "actor_train.training_args"
SAMPLING = "actor_infer.generating_args"
VERIFIERS = "rewards.arithmetic.verifiers"
REFERENCE = "reference={strategy_args: {strategy_name: hf_infer}, device_mapping: [0]}"
BASE = [
    "max_steps=16",
    "eval_steps=8",
    "save_steps=1000",
    "rollout_batch_size=32",
    "val_batch_size=128",
    "num_gpus_per_node=1",
    "actor_train.device_mapping=[0]",
    "actor_infer.device_mapping=[0]",
    f"{TRAINING}.warmup_steps=1",
    f"{TRAINING}.lr_scheduler_type=constant_with_warmup",
    "checkpoint_config.save_contents=[model]",
    "track_with=[]",
]
SOUND = "sound"
RECIPES: dict[str, tuple[str, list[str]]] = {
    "short_responses": ("responses-are-cut", ["response_length=20", "sequence_length=52"]),
    "no_end": (
        "responses-never-end",
        [
            f"{SAMPLING}.ignore_eos=true",
            f"{VERIFIERS}=[{{name: format, args: {{pattern: '[^/]*</think><answer>[0-9]+</answer>'}}}}]",
        ],
    ),
    "hot_sampling": ("sampling-is-too-random", [f"{SAMPLING}.temperature=4"]),
    "verifier_accepts_all": ("reward-is-constant", [f"{VERIFIERS}=[{{name: format, args: {{pattern: '.*'}}}}]"]),
    "too_hard": (
        "tasks-are-too-hard",
        ["data_generator.args.min_operand=1000", "data_generator.args.max_operand=9999"],
    ),
    "tiny_learning_rate": ("learning-rate-is-too-low", [f"{TRAINING}.learning_rate=1e-9"]),
    "endless_warmup": ("learning-rate-is-too-low", [f"{TRAINING}.warmup_steps=100000000"]),
    "huge_learning_rate": ("updates-are-too-large", [f"{TRAINING}.learning_rate=0.1"]),
    "kl_loss": ("kl-pulls-back", ["use_kl_loss=true", "kl_loss_coef=100", REFERENCE]),
    "kl_in_reward": ("kl-pulls-back", ["add_token_level_kl=true", "init_kl_coef=100", REFERENCE]),
    "gradient_clip": ("gradients-are-clipped-away", ["max_grad_norm=1e-10"]),
    "cold_sampling": ("responses-are-all-alike", [f"{SAMPLING}.temperature=0.01"]),
    "greedy_sampling": ("responses-are-all-alike", [f"{SAMPLING}.top_k=1"]),
    "old_weights": ("generator-has-old-weights", ["actor_train.model_update_frequency=100"]),
    "clipped_rewards": ("advantages-cancel", ["adv_estimator=reinforce", "reward_clip=1e-12"]),
    "masks": (
        "nothing-is-trained",
        ["difficulty_mask=true", "difficulty_low_threshold=0.98", "difficulty_high_threshold=0.99"],
    ),
    "four_prompts": (
        "data-repeats",
        [
            "actor_train.data_args.dataset_filter.num_samples=4",
            "rollout_batch_size=4",
            "max_steps=60",
            f"{TRAINING}.learning_rate=2e-4",
            "eval_steps=30",
            f"{TRAINING}.per_device_train_batch_size=32",
            f"{TRAINING}.gradient_accumulation_steps=1",
        ],
    ),
    "two_prompts_a_step": (
        "noise-hides-gains",
        [
            "rollout_batch_size=2",
            f"{TRAINING}.learning_rate=3e-5",
            f"{TRAINING}.per_device_train_batch_size=16",
            f"{TRAINING}.gradient_accumulation_steps=1",
        ],
    ),
    "length_reward": ("length-terms-decide", ["add_len_reward=true", "len_reward_coef=50"]),
    "entropy_bonus": ("entropy-bonus-decides", ["entropy_loss_coef=1.0"]),
}


def run(name: str, out: Path, overrides: list[str]) -> Path:
    """The folder of a complete run, made if it is not there.

    Raises:
        RuntimeError: it failed; its output is beside its folder.
    """
    folder, log = out / name, out / f"{name}.log"
    summary = folder / "summary.json"
    if summary.is_file() and json.loads(summary.read_text(encoding="utf-8"))["status"] == "completed":
        return folder
    print(f"{name} …", file=sys.stderr, flush=True)
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "roll", "train", "rlvr_math", f"exp_name={name}", f"output_dir={out}"]
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run([*command, *overrides], stdout=file, stderr=subprocess.STDOUT, cwd=ROOT).returncode
    if code:
        raise RuntimeError(f"{name} ended with exit code {code}; see {log}")
    return folder


def start(out: Path) -> list[str]:
    """Overrides for the model that all recipes start from."""
    still = ["max_steps=1", f"{TRAINING}.learning_rate=1e-12"]
    folder = run("start", out, [*BASE, *still])
    return [f"pretrain={folder / 'checkpoints' / 'checkpoint-1' / 'actor_train'}", "~warm_start"]


def row(name: str, found: Diagnosis) -> tuple[bool, str]:
    """Whether the diagnosis is right, and a row of the table."""
    wanted = RECIPES[name][0] if name != SOUND else None
    causes = [each.cause for each in found.findings]
    right = not causes if wanted is None else causes[:1] == [wanted]
    return right, f"| {name} | {wanted or '–'} | {'yes' if right else 'no'} | {', '.join(causes[:3]) or '–'} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all; {SOUND}, {', '.join(RECIPES)}")
    parser.add_argument("--out", type=Path, default=ROOT / "output" / "broken_recipes", help="default: %(default)s")
    parser.add_argument("--records", type=Path, help="file for what the runs have written (.json.gz)")
    parser.add_argument("--sound", nargs="*", type=Path, default=[], help="folders of runs that learn, to record too")
    options = parser.parse_args()
    if unknown := set(options.names) - {SOUND, *RECIPES}:
        parser.error(f"no such recipe: {', '.join(sorted(unknown))}")
    out = options.out.resolve()
    model, records, wrong = start(out), {}, 0
    print("| recipe | cause | found first | first three |\n|---|---|---|---|")
    for name in options.names or [SOUND, *RECIPES]:
        broken = [] if name == SOUND else RECIPES[name][1]
        record = RunRecord.read(run(name, out, [*BASE, *model, *broken]))
        right, line = row(name, diagnose(record))
        wrong += not right
        records[name] = {"cause": None if name == SOUND else RECIPES[name][0], "record": asdict(record)}
        print(line, flush=True)
    for folder in options.sound:
        records[folder.name] = {"cause": None, "record": asdict(RunRecord.read(folder))}
    if options.records is not None:
        text = json.dumps(records, separators=(",", ":"))
        options.records.write_bytes(gzip.compress(text.encode(), mtime=0))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
