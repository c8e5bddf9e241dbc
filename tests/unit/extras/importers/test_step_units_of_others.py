"""Whole runs of ChatLearn and MindSpeed RL: the values of an optimizer step, as their own source has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.configs.compose import compose_config
from roll.configs.loader import load_composed
from roll.configs.rlvr import RLVRConfig
from roll.configs.worker import WorkerConfig
from roll.distributed.strategy.training.optim import learning_rate
from roll.extras.importers.convert import convert, report
from roll.extras.importers.draft import Kind
from roll.preflight.choices import CHECKS

FILES = Path(__file__).parent / "files" / "steps"
CHATLEARN = yaml.safe_load((FILES / "chatlearn.yaml").read_text())
MINDSPEED = yaml.safe_load((FILES / "mindspeed.yaml").read_text())
SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
}


def kl_of(config: RLVRConfig) -> Any:
    names = {"kl": "k1", "low_var_kl": "k3", "mse": "k2"}
    if config.use_kl_loss:
        return ["loss", names.get(config.loss_kl_penalty, config.loss_kl_penalty), config.kl_loss_coef]
    if config.add_token_level_kl:
        return ["reward", names.get(config.kl_penalty, config.kl_penalty), config.init_kl_coef]
    return "none"


def advantage_of(config: RLVRConfig) -> list[str]:
    if config.adv_estimator == "gae":
        return ["values", "whitened" if config.whiten_advantages else "as it is", f"lambda {config.lambd}"]
    assert config.adv_estimator == "grpo" and not config.whiten_advantages
    return ["group", "divided by its deviation" if config.norm_adv_by_std_in_grpo else "undivided"]


def sampling(arguments: Any) -> dict[str, Any]:
    values = {"temperature": arguments.temperature, "top_p": arguments.top_p}
    return values | {"top_k": arguments.top_k if arguments.top_k > 0 else "all"}


def layout_of(config: RLVRConfig) -> dict[str, int]:
    def devices(worker: WorkerConfig) -> int:
        return worker.num_devices

    options = config.actor_train.strategy_args.strategy_config
    sizes = {name: options.get(key) or 1 for name, key in SIZES.items()}
    whole = {"trained": devices(config.actor_train), "sampled": devices(config.actor_infer)}
    whole["engine"] = config.actor_infer.num_gpus_per_worker
    return whole | {name: size for name, size in sizes.items() if size > 1}


def step_of(config: RLVRConfig) -> dict[str, Any]:
    """The resolved configuration in the units of the tables."""
    arguments, total = config.actor_train.training_args, config.total_optimizer_steps
    steps = [0, 10, 100, total - 1]
    clip = [config.pg_clip_low, config.pg_clip_high] if config.use_pg_clip_range else [config.pg_clip, config.pg_clip]
    return {
        "sequences": config.actor_train.global_train_batch_size,
        "tokens": config.actor_train.global_train_batch_size * config.longest_sequence,
        "steps": config.optimizer_steps_per_epoch,
        "passes": config.ppo_epochs,
        "rates": [learning_rate(arguments, step, total) if step < total else None for step in steps],
        "weight_decay": arguments.weight_decay,
        "betas": [arguments.adam_beta1, arguments.adam_beta2],
        "gradient_norm": config.max_grad_norm,
        "kl": kl_of(config),
        "entropy": config.entropy_loss_coef,
        "clip": clip,
        "cap": config.pg_loss_cap,
        "ratio": config.importance_sampling,
        "mean": config.loss_agg_mode,
        "advantage": advantage_of(config),
        "sampled": sampling(config.actor_infer.generating_args),
        "lengths": [config.prompt_length, config.response_length, config.sequence_length],
        "answers": config.num_return_sequences_in_group,
        "layout": layout_of(config),
        "saved": config.save_steps,
    }


def compare(config: RLVRConfig, usual: dict[str, Any], expected: dict[str, Any]) -> None:
    seen, wanted = step_of(config), {**usual, **expected}
    if config.validation is not None:
        seen["evaluated_with"] = sampling(config.val_sampling)
        seen["evaluated"] = {
            "every": config.eval_steps,
            "before": config.val_before_train,
            "after": config.val_after_train,
        }
    wanted["tokens"] = wanted["sequences"] * wanted["lengths"][2]  # at most
    rates = wanted.pop("rates")
    assert seen.pop("rates") == [None if rate is None else pytest.approx(rate, rel=1e-6) for rate in rates]
    assert seen == wanted
    assert not config.dual_clip_loss  # neither system has one: ChatLearn bounds the loss itself


def imported(system: str, files: list[Path], folder: Path, variables: dict[str, str] | None = None) -> RLVRConfig:
    result = convert(system, files, (), CHECKS, variables=variables)
    lost = [each for each in result.outcomes if each.kind in (Kind.IMPOSSIBLE, Kind.UNKNOWN)]
    assert not lost and not result.problems, report(result)
    (folder / "mine.yaml").write_text(result.text)
    config = load_composed(result.schema, "mine", compose_config("mine", folder, ()))
    assert isinstance(config, RLVRConfig)
    return config


@pytest.mark.parametrize("name", CHATLEARN["runs"])
def test_an_optimizer_step_of_chatlearn(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = CHATLEARN["runs"][name]
    (tmp_path / "template.yaml").write_text(yaml.safe_dump(CHATLEARN["templates"][run["template"]]))
    (tmp_path / "base_env.sh").write_text(
        '[ -z "$WORLD_SIZE" ] && export WORLD_SIZE=1\n'
        '[ -z "$GPUS_PER_NODE" ] && export GPUS_PER_NODE=$(nvidia-smi -L | wc -l)\n'
        "export num_device=$(($WORLD_SIZE * $GPUS_PER_NODE))\n"
    )
    files = {"runtime_args.data_path": "/d/train.json", "runtime_args.eval_data_path": "/d/test.json"}
    words = [f"{key}={value}" for key, value in {**files, **run["script"]}.items()]
    script = tmp_path / "run.sh"
    start = ["python chatlearn/entrypoint.py grpo", "--config-file template.yaml", *words, "2>&1 | tee log"]
    script.write_text("#!/bin/bash\nsource base_env.sh\n" + " \\\n  ".join(start))
    variables = {"WORLD_SIZE": str(run.get("nodes", 1)), "GPUS_PER_NODE": "8"}
    compare(imported("chatlearn", [script], tmp_path, variables), CHATLEARN["usual"], run["expected"])


@pytest.mark.parametrize("name", MINDSPEED["runs"])
def test_an_optimizer_step_of_mindspeed(name: str, tmp_path: Path) -> None:
    run, values = MINDSPEED["runs"][name], {}
    for section in (*MINDSPEED["sections"], "critic_config", "ref_config"):
        given = {} if run.get("bare") else MINDSPEED["sections"].get(section, {})
        if section in run["file"] or given:
            values[section] = {**given, **run["file"].get(section, {})}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    compare(imported("mindspeed", [file], tmp_path), MINDSPEED["usual"], run["expected"])
