"""ChatLearn's files: what becomes of its models, lengths, defaults and devices."""

from functools import partial
from pathlib import Path

import pytest
import yaml

from roll.configs.rlvr import RLVRConfig
from tests.unit.extras.importers.imported import GIVEN, IMPOSSIBLE, TO_DO, Import, imported

TRAINER = "models.policy_trainer"
chatlearn = partial(imported, "chatlearn")


def policy(**changes: object) -> str:
    """The usual file with other entries of its policy."""
    content = yaml.safe_load(GIVEN["chatlearn"].read_text())
    entries = content["models"]["policy"] | changes
    content["models"]["policy"] = {key: value for key, value in entries.items() if value is not None}
    content["models"]["ref_policy"]["num_gpu"] = entries["num_gpu"]
    return yaml.safe_dump(content)


AGENT = ["+runtime_args.task_type=agent", "+runtime_args.raw_chat=true", "+runtime_args.use_partial_rollout=true"]
AGENT += ["+models.partial_rollout_manager={max_rollout_round: 2, rollout_ratio: [0.5, 0.5]}"]
RATES = ("lr_decay_style=cosine", "min_lr=2.0e-7", "lr=1.0e-6", "lr_warmup_iters=5")
SCHEDULE = "actor_train.training_args"


@pytest.mark.parametrize(
    ("words", "expected", "lost"),
    [
        ([], {"rollout_batch_size": 8, "num_return_sequences_in_group": 8, "actor_train.global_train_batch_size": 32,
              "pg_clip_low": 0.2, "pg_clip_high": 0.28, "kl_penalty": "k3", "actor_train.use_sequence_packing": True,
              "actor_train.max_tokens_per_microbatch_in_infer": 8192, "track_with": "wandb",
              "tracker_kwargs": {"project": "p", "name": "n"}, "val_sampling.top_k": 5, "val_before_train": False},
         set()),
        ([f"models.{name}.num_gpu=16" for name in ("policy", "policy_trainer", "ref_policy")], {"num_nodes": 2}, set()),
        ([f"++{TRAINER}.optimizer={{lr: 1.0e-6}}"],
         {f"{SCHEDULE}.lr_scheduler_type": "constant_with_warmup", f"{SCHEDULE}.weight_decay": 0.01,
          f"{SCHEDULE}.adam_beta2": 0.95, "loss_agg_mode": "token-mean"}, set()),
        ([f"+{TRAINER}.optimizer.{word}" for word in RATES],
         {f"{SCHEDULE}.lr_scheduler_type": "cosine", f"{SCHEDULE}.min_lr_ratio": 0.2, f"{SCHEDULE}.warmup_steps": 5},
         set()),
        (AGENT, {}, {"runtime_args.task_type", "runtime_args.use_partial_rollout"}),
        (["+models.agent={num_cpu: 2, cpu_per_process: 1}"], {}, {"models.agent"}),
        ([f"{TRAINER}.moe_router_force_load_balancing=true"], {}, {f"{TRAINER}.moe_router_force_load_balancing"}),
    ],
    ids=["a run", "several nodes", "defaults", "a schedule", "agents", "older agents", "forced routing"],
)  # fmt: skip
def test_keys_that_are_read_together(words, expected, lost):
    found = chatlearn(*words, lost=lost)
    assert found.schema is RLVRConfig and {key: found[key] for key in expected} == expected


def test_one_length_for_prompt_and_answer_is_shared():
    both = dict.fromkeys(("max_prompt_tokens_length", "max_response_tokens_length"))
    found = chatlearn(text=policy(**both, seq_length=2048), lost={"models.policy.seq_length"})
    assert found["prompt_length", "response_length", "sequence_length"] == (512, 1536, 2048)


def launched(folder: Path, before: str, words: str = "", **changes: object) -> Import:
    """A run whose script tells the number of devices, a variable that lines before its command may set."""
    (folder / "grpo.yaml").write_text(policy(num_gpu=f"${{{TRAINER}.num_gpu}}", **changes))
    command = f"python chatlearn/entrypoint.py grpo --config-file grpo.yaml {TRAINER}.num_gpu=${{num_device}}"
    (folder / "run.sh").write_text(f"#!/bin/bash\n{before}{command} {words}\n")
    return imported("chatlearn", file=folder / "run.sh")


def test_devices_that_only_a_shell_knows_are_asked_for(tmp_path):
    found = launched(tmp_path, "num_device=$(nvidia-smi -L | wc -l)\n")
    assert found.lost == {f"{TRAINER}.num_gpu"} and not found.result.problems
    (tmp_path / "common.sh").write_text("num_device=4\n")
    found = launched(tmp_path, "source common.sh\n")
    assert found["actor_infer.device_mapping", "actor_train.device_mapping"] == ([0, 1, 2, 3], [0, 1, 2, 3])


def test_devices_that_only_a_shell_knows_are_whole_nodes_that_hold_the_layout(tmp_path):
    sizes = {"tensor_model_parallel": 4, "pipeline_model_parallel": 2, "context_parallel": 3}
    words = " ".join(f"{TRAINER}.{key}_size={size}" for key, size in sizes.items())
    words += " runtime_args.train_backend=megatron"
    count = '[ -z "$GPUS_PER_NODE" ] && export GPUS_PER_NODE=$(nvidia-smi -L | wc -l)\n'
    for before in ("", f"{count}num_device=$((1 * $GPUS_PER_NODE))\n"):
        found = launched(tmp_path, before, words, tensor_model_parallel_size=16)
        assert found.written["actor_train"]["device_mapping"] == "list(range(0,48))"
    assert found.written["num_nodes"] == 6
    (told,) = (each for each in found.outcomes if "GPUS_PER_NODE" in each.note)
    assert (told.kind, told.key) == (IMPOSSIBLE, f"{TRAINER}.num_gpu")
    assert found.written["actor_infer"]["num_gpus_per_worker"] == 8  # an engine stays on a node
    assert ("models.policy.tensor_model_parallel_size", TO_DO) in found.kinds
