"""Imported runs in the units of a step, against what their own systems make of the files.

``files/runs.yaml`` has the expected values. They follow from the sources of verl (``trainer/config``, ``ray_trainer``,
``core_algos``, the schedules of ``torch_functional``) and ROLL (``roll/configs``, ``rlvr_config``, ``agentic_config``).
"""

from typing import Any

import pytest
import yaml

from roll.configs.agentic import AgenticConfig
from roll.configs.rlvr import RLVRConfig
from roll.distributed.strategy.training.optim import learning_rate
from tests.support.choice import one_in
from tests.unit.extras.importers.imported import FILES, imported

RUNS = yaml.safe_load((FILES / "runs.yaml").read_text())
PLACES = [(system, name) for system in ("verl", "roll") for name in RUNS[system]]
ROLLOUTS = 200
"""Of a run that ends with its epochs, whose length only the data knows."""


def kl_of(config: Any) -> list[Any] | None:
    names = {"kl": "k1", "low_var_kl": "k3", "mse": "k2"}
    if config.use_kl_loss:
        return ["loss", names.get(config.loss_kl_penalty, config.loss_kl_penalty), config.kl_loss_coef]
    if config.add_token_level_kl:
        return ["reward", names.get(config.kl_penalty, config.kl_penalty), config.init_kl_coef]
    return None


def clip_of(config: Any) -> list[float]:
    return [config.pg_clip_low, config.pg_clip_high] if config.use_pg_clip_range else [config.pg_clip] * 2


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
    cispo = config.pg_variant == "cispo"
    clip = [config.cispo_epsilon_low, config.cispo_epsilon_high] if cispo else clip_of(config)
    shape = "std" if config.norm_adv_by_std_in_grpo else "mean"
    return {
        "answers": [config.rollout_batch_size, 1 if agentic else config.num_return_sequences_in_group],
        "step": config.actor_train.global_train_batch_size,
        "steps": steps,
        "rate": [learning_rate(training, min(at, last), last + 1) for at in (0, 10, 100, last)],
        "kl": kl_of(config),
        "clip": [*clip, config.dual_clip_c if config.dual_clip_loss and not cispo else None],
        "mean": config.loss_agg_mode,
        "advantage": [config.adv_estimator, shape, "whitened" if config.whiten_advantages else "raw"],
        "sampling": sampling(config.actor_infer.generating_args)[:3],
        "held_out": held_out(config),
        "lengths": [config.prompt_length, config.response_length],
        "train": layout(config),
        "infer": [len(config.actor_infer.device_mapping), config.actor_infer.num_gpus_per_worker],
        "saved": config.save_steps,
        "evaluated": config.eval_steps,
        "before": config.val_before_train,
    }


@pytest.mark.parametrize(("system", "name"), one_in(2, PLACES))
def test_a_step_is_what_it_was(system, name):
    run = RUNS[system][name]
    if system == "verl":
        words = dict(word.split("=", 1) for word in " ".join(run["words"]).replace("~", "actor_rollout_ref.").split())
        text = "python3 -m verl.trainer.main_ppo " + " ".join(f"{key}={value}" for key, value in words.items())
    config = imported(system, text=text if system == "verl" else yaml.safe_dump(run["config"])).config
    found, expected = step_of(config), dict(run["expected"])
    rates, peak = expected.pop("rate"), config.actor_train.training_args.learning_rate
    # Their warm-up begins with 0, ours with its first part; verl's goes on with each rollout, ours with each step.
    warm = config.actor_train.training_args.warmup_steps or 80
    part = peak * (found["steps"] if system == "verl" else 1) / warm
    assert found.pop("rate") == pytest.approx(rates, abs=part * 1.05 if rates[0] == 0 else peak * 1e-6)
    assert found == expected


CHATLEARN, MINDSPEED = (
    yaml.safe_load((FILES / "steps" / f"{name}.yaml").read_text()) for name in ("chatlearn", "mindspeed")
)
SIZES = {name: f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert")}
SIZES |= {"context": "context_parallel_size", "expert_tensor": "expert_tensor_parallel_size"}


def advantage_of(config: RLVRConfig) -> list[str]:
    if config.adv_estimator == "gae":
        return ["values", "whitened" if config.whiten_advantages else "as it is", f"lambda {config.lambd}"]
    assert config.adv_estimator == "grpo" and not config.whiten_advantages
    return ["group", "divided by its deviation" if config.norm_adv_by_std_in_grpo else "undivided"]


def sampling_of_others(arguments: Any) -> dict[str, Any]:
    values = {"temperature": arguments.temperature, "top_p": arguments.top_p}
    return values | {"top_k": arguments.top_k if arguments.top_k > 0 else "all"}


def layout_of(config: RLVRConfig) -> dict[str, int]:
    options = config.actor_train.strategy_args.strategy_config
    sizes = {name: options.get(key) or 1 for name, key in SIZES.items()}
    whole = {"trained": config.actor_train.num_devices, "sampled": config.actor_infer.num_devices}
    whole["engine"] = config.actor_infer.num_gpus_per_worker
    return whole | {name: size for name, size in sizes.items() if size > 1}


def step_of_others(config: RLVRConfig) -> dict[str, Any]:
    """The resolved configuration in the units of the tables."""
    arguments, total = config.actor_train.training_args, config.total_optimizer_steps
    steps = [0, 10, 100, total - 1]
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
        "clip": clip_of(config),
        "cap": config.pg_loss_cap,
        "ratio": config.importance_sampling,
        "mean": config.loss_agg_mode,
        "advantage": advantage_of(config),
        "sampled": sampling_of_others(config.actor_infer.generating_args),
        "lengths": [config.prompt_length, config.response_length, config.sequence_length],
        "answers": config.num_return_sequences_in_group,
        "layout": layout_of(config),
        "saved": config.save_steps,
    }


def compare(config: RLVRConfig, usual: dict[str, Any], expected: dict[str, Any]) -> None:
    seen, wanted = step_of_others(config), {**usual, **expected}
    if config.validation is not None:
        seen["evaluated_with"] = sampling_of_others(config.val_sampling)
        after, before = config.val_after_train, config.val_before_train
        seen["evaluated"] = {"every": config.eval_steps, "before": before, "after": after}
    wanted["tokens"] = wanted["sequences"] * wanted["lengths"][2]  # at most
    rates = wanted.pop("rates")
    assert seen.pop("rates") == [None if rate is None else pytest.approx(rate, rel=1e-6) for rate in rates]
    assert seen == wanted
    assert not config.dual_clip_loss  # neither system has one: ChatLearn bounds the loss itself


@pytest.mark.parametrize("name", CHATLEARN["runs"])
def test_an_optimizer_step_of_chatlearn(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = CHATLEARN["runs"][name]
    (tmp_path / "template.yaml").write_text(yaml.safe_dump(CHATLEARN["templates"][run["template"]]))
    (tmp_path / "base_env.sh").write_text(
        '[ -z "$WORLD_SIZE" ] && export WORLD_SIZE=1\n'
        '[ -z "$GPUS_PER_NODE" ] && export GPUS_PER_NODE=$(nvidia-smi -L | wc -l)\n'
        "export num_device=$(($WORLD_SIZE * $GPUS_PER_NODE))\n"
    )
    given = {"runtime_args.data_path": "/d/train.json", "runtime_args.eval_data_path": "/d/test.json"}
    given["models.policy_trainer.num_gpu"] = "${num_device}"
    words = [f"{key}={value}" for key, value in {**given, **run["script"]}.items()]
    script = tmp_path / "run.sh"
    start = ["python chatlearn/entrypoint.py grpo", "--config-file template.yaml", *words, "2>&1 | tee log"]
    script.write_text("#!/bin/bash\nsource base_env.sh\n" + " \\\n  ".join(start))
    variables = {"WORLD_SIZE": str(run.get("nodes", 1)), "GPUS_PER_NODE": "8"}
    found = imported("chatlearn", file=script, variables=variables, lost=set())
    compare(found.config, CHATLEARN["usual"][run["template"]], run["expected"])


@pytest.mark.parametrize("name", MINDSPEED["runs"])
def test_an_optimizer_step_of_mindspeed(name):
    run, values = MINDSPEED["runs"][name], {}
    for section in (*MINDSPEED["sections"], "critic_config", "ref_config"):
        given = {} if run.get("bare") else MINDSPEED["sections"].get(section, {})
        if section in run["file"] or given:
            values[section] = {**given, **run["file"].get(section, {})}
    found = imported("mindspeed", text=yaml.safe_dump(values), lost=set())
    compare(found.config, MINDSPEED["usual"], run["expected"])
