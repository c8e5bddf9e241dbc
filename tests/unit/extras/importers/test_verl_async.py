"""verl's asynchronous trainers: how far they run ahead, on which devices, and which policy the loss compares with."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.configs.compose import compose_config
from roll.configs.loader import load_composed
from roll.configs.rlvr import RLVRConfig
from roll.extras.importers.convert import Imported, convert
from roll.extras.importers.draft import Kind
from roll.extras.importers.recognise import system_of

SCRIPT = """
BOTH=${{BOTH:-8}}
ours=3
python3 -m {program} {config} \\
    data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size={prompts} data.gen_batch_size=1 \\
    algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \\
    actor_rollout_ref.hybrid_engine=False \\
    actor_rollout_ref.actor.ppo_mini_batch_size=10 actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    trainer.nnodes=1 trainer.n_gpus_per_node=$((BOTH - ours)) rollout.nnodes=1 rollout.n_gpus_per_node=$ours {words}
"""
STREAMING, ONE_STEP = "fully_async_policy.fully_async_main", "one_step_off_policy.main_ppo"
ASYNC, CORRECTION = "async_training", "algorithm.rollout_correction"
VERSION = (f"{ASYNC}.trigger_parameter_sync_step=4", f"{ASYNC}.require_batches=2")


def imported(
    folder: Path, program: str, *words: str, prompts: int = 0, config: str = ""
) -> tuple[Imported, RLVRConfig, dict[str, Kind]]:
    """A script of a trainer with some words, what ``roll train`` would read, and what has become of each key."""
    script = folder / "run.sh"
    script.write_text(SCRIPT.format(program=program, words=" ".join(words), prompts=prompts, config=config))
    assert system_of(script) == "verl"
    result = convert("verl", [script])
    (folder / "mine.yaml").write_text(result.text)
    read = load_composed(RLVRConfig, "mine", compose_config("mine", folder, ()))
    assert isinstance(read, RLVRConfig)
    return result, read, {key: each.kind for each in result.outcomes for key in each.key.split(", ")}


@pytest.mark.parametrize("package", ["verl.experimental", "recipe"])
def test_a_version_of_the_weights_is_a_step(package: str, tmp_path: Path) -> None:
    words = [*VERSION, "rollout.total_rollout_steps=830", "rollout.test_freq=5", "trainer.save_freq=3"]
    words += [f"{ASYNC}.staleness_threshold=0.5", f"{ASYNC}.partial_rollout=False"]
    words += ["actor_rollout_ref.actor.optim.lr_warmup_steps=10"]
    result, config, kinds = imported(tmp_path, f"{package}.{STREAMING}", *words, "rollout.total_epochs=2")
    assert Kind.IMPOSSIBLE not in kinds.values() and result.exit_code == 0
    assert (config.rollout_batch_size, config.max_steps, config.eval_steps, config.save_steps) == (80, 10, 5, 3)
    assert config.actor_train.global_train_batch_size == 40 and config.optimizer_steps_per_epoch == 8
    assert (config.async_generation_ratio, config.groups_ahead, config.partial_rollout) == (0.5, 40, False)
    assert config.max_running_groups == 48 and config.actor_train.training_args.warmup_steps == 20
    assert kinds["data.train_batch_size"] == kinds["rollout.total_epochs"] == Kind.DROPPED
    told = [each.note for each in result.outcomes if each.ours == "rollout_batch_size"]
    assert told == ["4 fetches × 2 batches × 10 prompts between two updates of the generator, which is a step"]


def test_their_defaults_are_those_of_the_trainer_and_without_a_number_of_prompts_epochs_count(tmp_path: Path) -> None:
    _, config, _ = imported(tmp_path, f"verl.experimental.{STREAMING}")
    assert (config.rollout_batch_size, config.max_steps, config.async_generation_ratio) == (40, 2, 0.1)
    assert config.train_infer_correction.bypass and config.rollout_window == 1 and config.partial_rollout
    words = ("rollout.total_rollout_steps=null", "trainer.total_epochs=7", "trainer.test_freq=4")
    _, config, _ = imported(tmp_path, f"verl.experimental.{STREAMING}", *words)
    assert (config.total_epochs, config.eval_steps) == (7, 4)


def test_a_threshold_below_a_group_takes_turns(tmp_path: Path) -> None:
    words = (f"{ASYNC}.staleness_threshold=0", f"{ASYNC}.partial_rollout=False")
    _, config, kinds = imported(tmp_path, f"verl.experimental.{STREAMING}", *VERSION, *words)
    assert not config.overlaps and config.rollout_window == 0 and config.partial_rollout
    assert kinds[f"{ASYNC}.staleness_threshold"] == Kind.DERIVED
    assert kinds[f"{ASYNC}.partial_rollout"] == Kind.DROPPED


@pytest.mark.parametrize(
    ("words", "training", "generating", "nodes", "gpus"),
    [
        ((), [0, 1, 2, 3, 4], [5, 6, 7], 1, 8),
        (("trainer.nnodes=2", "rollout.nnodes=2"), [0, 1, 2, 3, 4, 8, 9, 10, 11, 12], [5, 6, 7, 13, 14, 15], 2, 8),
        (("rollout.n_gpus_per_node=5",), [0, 1, 2, 3, 4], [5, 6, 7, 8, 9], 2, 5),
        (("trainer.n_gpus_per_node=8", "rollout.nnodes=2"), list(range(8)), [8, 9, 10, 16, 17, 18], 3, 8),
    ],
)
def test_both_sides_have_devices_of_their_own(
    words: tuple[str, ...], training: list[int], generating: list[int], nodes: int, gpus: int, tmp_path: Path
) -> None:
    _, config, _ = imported(tmp_path, f"recipe.{ONE_STEP}", *words, prompts=40)
    assert config.actor_train.device_mapping == training and config.actor_infer.device_mapping == generating
    assert config.reference is not None and config.reference.device_mapping == training
    assert (config.num_nodes, config.num_gpus_per_node) == (nodes, gpus)


def test_one_step_off_is_one_batch_ahead(tmp_path: Path) -> None:
    _, config, kinds = imported(tmp_path, f"verl.experimental.{ONE_STEP}", "trainer.total_epochs=3", prompts=40)
    assert Kind.IMPOSSIBLE not in kinds.values()
    assert (config.async_generation_ratio, config.max_lag, config.rollout_window) == (1, 1, 0)
    assert (config.rollout_batch_size, config.total_epochs, config.partial_rollout) == (40, 3, False)
    assert config.train_infer_correction.bypass


def test_old_samples_without_weights_are_told(tmp_path: Path) -> None:
    _, config, kinds = imported(tmp_path, f"recipe.{ONE_STEP}", prompts=40)
    assert kinds[f"{CORRECTION}.rollout_is"] == Kind.IMPOSSIBLE
    assert config.train_infer_correction.is_weight.enabled and not config.train_infer_correction.bypass


SCORED = [
    (f"{ASYNC}.compute_prox_log_prob=True", f"{ASYNC}.use_rollout_log_probs=True"),
    (f"{CORRECTION}.bypass_mode=False",),
]


@pytest.mark.parametrize("words", SCORED)
def test_what_the_trainer_scores_has_weights_and_filters(words: tuple[str, ...], tmp_path: Path) -> None:
    correction = (f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_rs=seq_mean_k1")
    _, config, kinds = imported(tmp_path, f"recipe.{STREAMING}", *words, *correction)
    assert Kind.IMPOSSIBLE not in kinds.values()
    assert config.train_infer_correction.is_weight.upper_bound == 2 and len(config.train_infer_correction.filters) == 1
    assert not config.train_infer_correction.bypass


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((f"{CORRECTION}.rollout_rs=seq_mean_k1",), {f"{CORRECTION}.rollout_rs"}),
        ((f"{CORRECTION}.rollout_rs=seq_mean_k1", f"{ASYNC}.use_rollout_log_probs=True"), set()),
        ((f"{CORRECTION}.loss_type=reinforce",), {f"{CORRECTION}.loss_type"}),
        (("actor_rollout_ref.actor.ppo_epochs=2",), {"actor_rollout_ref.actor.ppo_epochs"}),
        (("filter.filter_function_path=mine.py",), {"filter.filter_function_path"}),
        ((f"{ASYNC}.image_refs.enabled=True",), {f"{ASYNC}.image_refs.enabled"}),
    ],
)
def test_what_cannot_be_said_beside_the_samplers_probabilities_is_told(
    words: tuple[str, ...], told: set[str], tmp_path: Path
) -> None:
    result, _, _ = imported(tmp_path, f"verl.experimental.{STREAMING}", *words)
    assert {each.key for each in result.outcomes if each.kind in (Kind.IMPOSSIBLE, Kind.UNKNOWN)} == told


def test_a_configuration_that_a_script_names_tells_the_engine_and_a_word_for_a_number_is_told(tmp_path: Path) -> None:
    name = "--config-name=fully_async_ppo_megatron_trainer"
    _, config, _ = imported(tmp_path, f"verl.experimental.{STREAMING}", config=name)
    assert config.actor_train.strategy_args.strategy_name == "megatron_train"
    _, config, kinds = imported(tmp_path, f"verl.experimental.{STREAMING}", f"{ASYNC}.require_batches=few")
    assert kinds[f"{ASYNC}.require_batches"] == Kind.IMPOSSIBLE and config.rollout_batch_size == 40


def test_the_penalty_of_long_answers_in_its_newest_place(tmp_path: Path) -> None:
    key = "reward.reward_kwargs"
    words = [f"+{key}.overlong_buffer_cfg.{word}" for word in ("enable=True", "len=128", "penalty_factor=0.5")]
    words += ["reward.reward_manager.name=dapo", f"+{key}.max_resp_len=512"]
    _, config, _ = imported(tmp_path, f"verl.experimental.{STREAMING}", *words)
    assert (config.overlong_buffer.enable, config.overlong_buffer.len) == (True, 128)
    assert config.overlong_buffer.penalty_factor == 0.5


def test_devices_apart_without_such_a_trainer_are_told(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python -m verl.trainer.main_ppo actor_rollout_ref.hybrid_engine=False trainer.v1.trainer_mode=x")
    kinds = {each.key: each.kind for each in convert("verl", [script]).outcomes}
    assert kinds["actor_rollout_ref.hybrid_engine"] == kinds["trainer.v1.trainer_mode"] == Kind.IMPOSSIBLE


V1 = "trainer.v1"
MODES = """
python3 -m verl.trainer.main_ppo trainer.use_v1=True trainer.v1.trainer_mode={mode} \\
    data.train_files=train.parquet data.train_batch_size=20 algorithm.adv_estimator=grpo \\
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.actor.ppo_mini_batch_size=10 \\
    actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=2.0 \\
    trainer.n_gpus_per_node=5 trainer.test_freq=6 trainer.total_training_steps=30 {words}
"""


def imported_mode(folder: Path, mode: str, *words: str) -> tuple[RLVRConfig, dict[str, Kind]]:
    """A script of the newer trainer in a mode, as ``roll train`` would read it."""
    script = folder / "run.sh"
    script.write_text(MODES.format(mode=mode, words=" ".join(words)))
    result = convert("verl", [script])
    (folder / "mine.yaml").write_text(result.text)
    read = load_composed(RLVRConfig, "mine", compose_config("mine", folder, ()))
    assert isinstance(read, RLVRConfig)
    return read, {key: each.kind for each in result.outcomes for key in each.key.split(", ")}


def test_the_newer_trainer_with_devices_apart(tmp_path: Path) -> None:
    own = "actor_rollout_ref.rollout"
    words = (f"{own}.nnodes=1", f"{own}.n_gpus_per_node=3", f"{V1}.separate_async.parameter_sync_step=2")
    config, kinds = imported_mode(tmp_path, "separate_async", *words)
    assert Kind.IMPOSSIBLE not in kinds.values() and kinds[f"{V1}.trainer_mode"] == Kind.DERIVED
    assert (config.async_generation_ratio, config.partial_rollout, config.rollout_window) == (1, True, 1)
    assert config.actor_infer.device_mapping == [5, 6, 7] and config.actor_train.device_mapping == [0, 1, 2, 3, 4]
    assert config.train_infer_correction.is_weight.enabled and not config.train_infer_correction.bypass
    assert (config.max_steps, config.rollout_batch_size, config.eval_steps) == (30, 20, 6)


def test_mini_batches_between_two_updates_of_the_newer_trainer_are_a_step(tmp_path: Path) -> None:
    words = ("actor_rollout_ref.rollout.n_gpus_per_node=3", f"{V1}.separate_async.parameter_sync_step=2")
    words += ("actor_rollout_ref.actor.optim.lr_warmup_steps=4", f"{V1}.colocate_async.parameter_sync_step=7")
    config, kinds = imported_mode(tmp_path, "separate_async", *words)
    assert Kind.IMPOSSIBLE not in kinds.values()
    assert (config.max_steps, config.rollout_batch_size, config.eval_steps) == (30, 20, 6)
    assert config.actor_train.global_train_batch_size == 40 and config.optimizer_steps_per_epoch == 2
    assert config.actor_train.training_args.warmup_steps == 4  # their schedule goes on with each mini-batch


def test_a_batch_that_is_not_so_many_mini_batches_is_told(tmp_path: Path) -> None:
    words = ("actor_rollout_ref.rollout.n_gpus_per_node=3", "data.train_batch_size=40")
    _, kinds = imported_mode(tmp_path, "separate_async", *words)
    assert Kind.IMPOSSIBLE not in kinds.values()  # 4 mini-batches by default
    _, kinds = imported_mode(tmp_path, "separate_async", *words, f"{V1}.separate_async.parameter_sync_step=3")
    assert kinds[f"{V1}.separate_async.parameter_sync_step"] == Kind.IMPOSSIBLE


@pytest.mark.parametrize(
    ("words", "ratio", "window"),
    [
        (["num_warmup_batches=2"], 2, 1),
        (["num_warmup_batches=0"], 0, 0),
        (["num_warmup_batches=1.5"], 1.5, 1),
    ],
)
def test_batches_before_the_first_step_of_the_newer_trainer_are_how_far_rollouts_are_ahead(
    words: list[str], ratio: float, window: float, tmp_path: Path
) -> None:
    given = [f"{V1}.separate_async.{word}" for word in (*words, "parameter_sync_step=2")]
    config, kinds = imported_mode(tmp_path, "separate_async", "actor_rollout_ref.rollout.n_gpus_per_node=3", *given)
    assert Kind.IMPOSSIBLE not in kinds.values()
    assert (config.async_generation_ratio, config.rollout_window) == (ratio, window)


@pytest.mark.parametrize(("oldest", "ratio", "window"), [(8, 1, 1), (1, 1, 0), (0, 0, 0)])
def test_the_newer_trainer_on_shared_devices(oldest: int, ratio: int, window: int, tmp_path: Path) -> None:
    words = (f"{V1}.sampler.max_off_policy_threshold={oldest}", f"{V1}.sampler.max_off_policy_strategy=drop")
    config, kinds = imported_mode(tmp_path, "colocate_async", *words)
    assert Kind.IMPOSSIBLE not in kinds.values()
    assert (config.async_generation_ratio, config.rollout_window) == (ratio, window)
    assert config.actor_infer.device_mapping == config.actor_train.device_mapping == [0, 1, 2, 3, 4]
    assert config.max_lag <= oldest


def test_what_a_mode_does_beyond_that_is_told(tmp_path: Path) -> None:
    config, kinds = imported_mode(tmp_path, "colocate_async", f"{V1}.sampler.custom_sampler.path=mine.py")
    assert kinds[f"{V1}.sampler.custom_sampler.path"] == Kind.IMPOSSIBLE
    usual = ("sampler.custom_sampler.path=null", "sampler.sync_refill_failed_groups=false", "sampler.sampler_kwargs={}")
    words = [f"{V1}.{word}" for word in (*usual, "separate_async.hybrid_rollout.enable_switch=true")]
    config, kinds = imported_mode(tmp_path, "separate_async", *words, f"{V1}.separate_async.parameter_sync_step=2")
    assert Kind.IMPOSSIBLE not in kinds.values() and Kind.UNKNOWN not in kinds.values()
    config, kinds = imported_mode(tmp_path, "separate_async", "trainer.use_v1=False")
    assert config.async_generation_ratio == 0 and kinds[f"{V1}.trainer_mode"] == Kind.DROPPED
