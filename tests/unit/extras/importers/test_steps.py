"""Imported runs in the units of a step, against what their own systems make of the files.

``files/runs.yaml`` has the expected values. They follow from the sources of verl (``trainer/config``, ``ray_trainer``,
``core_algos``, the schedules of ``torch_functional``) and ROLL (``roll/configs``, ``rlvr_config``, ``agentic_config``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.configs.agentic import AgenticConfig
from roll.configs.compose import compose_config
from roll.configs.loader import load_composed
from roll.configs.rlvr import RLVRConfig
from roll.distributed.strategy.training.optim import learning_rate
from roll.extras.importers.convert import convert

RUNS = yaml.safe_load((Path(__file__).parent / "files" / "runs.yaml").read_text())
ROLLOUTS = 200
"""Of a run that ends with its epochs, whose length only the data knows."""
K3, K1 = ("k3", "low_var_kl"), ("k1", "kl")


def imported(system: str, run: dict[str, Any], folder: Path) -> RLVRConfig | AgenticConfig:
    """What ``roll train`` would read."""
    if system == "verl":
        file = folder / "run.sh"
        file.write_text("python3 -m verl.trainer.main_ppo " + run["words"].replace("~", "actor_rollout_ref."))
    else:
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(run["config"]))
    result = convert(system, [file])
    (folder / "mine.yaml").write_text(result.text)
    config = load_composed(result.schema, "mine", compose_config("mine", folder, ()))
    assert isinstance(config, RLVRConfig | AgenticConfig)
    return config


def kl(config: Any) -> list[Any] | None:
    if config.use_kl_loss:
        name = config.kl_loss_penalty or config.kl_penalty
        return ["loss", "k3" if name in K3 else name, config.kl_loss_coef]
    if config.add_token_level_kl:
        return ["reward", "k1" if config.kl_penalty in K1 else config.kl_penalty, config.init_kl_coef]
    return None


def sampling(arguments: Any) -> list[Any] | str:
    if not arguments.do_sample:
        return "greedy"
    return [arguments.temperature, arguments.top_p, arguments.top_k, arguments.num_return_sequences]


def held_out(config: Any) -> Any:
    if isinstance(config, AgenticConfig):
        return sampling(config.sampling(config.val_env_manager))
    return sampling(config.validation.generating_args) if config.validation else None


def layout(config: Any) -> list[int]:
    role = config.actor_train
    options = role.strategy_args.strategy_config
    ranks = options.get("context_parallel_size", 1) * (role.model_args.ulysses_size or 1)
    split = [options.get(f"{kind}_model_parallel_size", 1) for kind in ("tensor", "pipeline")]
    return [len(role.device_mapping), *split, ranks, role.data_parallel_size]


def step_of(config: Any) -> dict[str, Any]:
    """An imported configuration in the units of ``expected``."""
    training, epochs = config.actor_train.training_args, config.ppo_epochs
    agentic = isinstance(config, AgenticConfig)
    steps = config.optimizer_steps_per_epoch * epochs
    rollouts = config.max_steps if agentic or config.total_epochs is None else ROLLOUTS
    last = rollouts * steps - 1
    ranged = config.use_pg_clip_range
    low, high = (config.pg_clip_low, config.pg_clip_high) if ranged else (config.pg_clip, config.pg_clip)
    cispo = config.pg_variant == "cispo"
    return {
        "answers": [config.rollout_batch_size, 1 if agentic else config.num_return_sequences_in_group],
        "step": config.actor_train.global_train_batch_size,
        "steps": steps,
        "rate": [learning_rate(training, min(at, last), last + 1) for at in (0, 10, 100, last)],
        "kl": kl(config),
        "clip": [
            config.cispo_epsilon_low if cispo else low,
            config.cispo_epsilon_high if cispo else high,
            config.dual_clip_c if config.dual_clip_loss and not cispo else None,
        ],
        "mean": config.loss_agg_mode,
        "advantage": [
            config.adv_estimator,
            "std" if config.norm_adv_by_std_in_grpo else "mean",
            "whitened" if config.whiten_advantages else "raw",
        ],
        "sampling": sampling(config.actor_infer.generating_args)[:3],
        "held_out": held_out(config),
        "lengths": [config.prompt_length, config.response_length],
        "train": layout(config),
        "infer": [len(config.actor_infer.device_mapping), config.actor_infer.num_gpus_per_worker],
        "saved": config.save_steps,
        "evaluated": config.eval_steps,
        "before": config.val_before_train,
    }


@pytest.mark.parametrize(("system", "name"), [(system, name) for system in RUNS for name in RUNS[system]])
def test_a_step_is_what_it_was(system: str, name: str, tmp_path: Path) -> None:
    run = RUNS[system][name]
    config = imported(system, run, tmp_path)
    found, expected = step_of(config), dict(run["expected"])
    rates, peak = expected.pop("rate"), config.actor_train.training_args.learning_rate
    # Their warm-up begins with 0, ours with its first part; verl's goes on with each rollout, ours with each step.
    warm = config.actor_train.training_args.warmup_steps or 80
    part = peak * (found["steps"] if system == "verl" else 1) / warm
    assert found.pop("rate") == pytest.approx(rates, abs=part * 1.05 if rates[0] == 0 else peak * 1e-6)
    assert found == expected
