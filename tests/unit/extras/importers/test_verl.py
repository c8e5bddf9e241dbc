"""verl's runs as other people's scripts spell them: what becomes of sizes, adapters and losses."""

from pathlib import Path

import pytest

from roll.configs.compose import compose_config
from roll.configs.loader import load_composed
from roll.configs.rlvr import RLVRConfig
from roll.extras.importers.convert import Imported, convert
from roll.extras.importers.draft import Kind
from roll.extras.importers.recognise import system_of
from roll.preflight.choices import CHECKS

SCRIPT = Path(__file__).parent / "files" / "run_verl.sh"
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))


def imported(folder: Path, *words: str, old: str = "", new: str = "") -> tuple[Imported, RLVRConfig]:
    """The script of this folder with further words, and what ``roll train`` would read."""
    script = folder / "run.sh"
    script.write_text(SCRIPT.read_text().replace(old, new) if old else SCRIPT.read_text())
    result = convert("verl", [script], words, CHECKS)
    (folder / "mine.yaml").write_text(result.text)
    config = load_composed(RLVRConfig, "mine", compose_config("mine", folder, ()))
    assert isinstance(config, RLVRConfig)
    return result, config


def impossible(result: Imported) -> set[str]:
    return {outcome.key for outcome in result.outcomes if outcome.kind == Kind.IMPOSSIBLE}


@pytest.mark.parametrize("loss", ["gspo", "sapo", "geo_mean"])
def test_losses_of_whole_answers_average_each_answer_whatever_is_said(loss, tmp_path):
    _, config = imported(tmp_path, f"{ACTOR}.policy_loss.loss_mode={loss}", f"{ACTOR}.loss_agg_mode=token-mean")
    assert config.loss_agg_mode == "seq-mean-token-mean"


def test_an_adapter_of_megatron(tmp_path):
    words = [f"{MODEL}.lora.{word}" for word in ("rank=32", "alpha=64", "lora_A_init_method=kaiming")]
    layers = f"{MODEL}.lora.target_modules=[linear_qkv,linear_fc2]"
    megatron = {"old": "main_ppo \\", "new": "main_ppo --config-name=ppo_megatron_trainer \\"}
    result, config = imported(tmp_path, *words, layers, **megatron)
    model = config.actor_train.model_args
    assert not impossible(result)
    assert (model.lora_rank, model.lora_alpha) == (32, 64)
    assert model.lora_target == "q_proj,k_proj,v_proj,down_proj"
    _, config = imported(tmp_path, f"{MODEL}.lora.rank=8", **megatron)
    assert (config.actor_train.model_args.lora_alpha, config.actor_train.model_args.lora_target) == (32, "all-linear")


def test_a_schedule_there_counts_batches(tmp_path):
    words = [
        f"{ACTOR}.optim.{word}" for word in ("lr_warmup_steps=10", "lr_scheduler_type=cosine", "lr_decay_steps=50")
    ]
    _, config = imported(tmp_path, *words, f"{ACTOR}.ppo_epochs=3")
    training = config.actor_train.training_args
    assert config.optimizer_steps_per_epoch == 2
    assert (training.warmup_steps, training.lr_decay_steps) == (60, 300)
    words = [
        "algorithm.adv_estimator=gae",
        "critic.optim.lr_warmup_steps=4",
        f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1",
    ]
    _, config = imported(tmp_path, *words)
    assert config.critic is not None and config.critic.training_args.warmup_steps == 8
    assert config.actor_train.training_args.warmup_ratio == 0.1


def test_groups_micro_batches_and_token_budgets(tmp_path):
    _, config = imported(tmp_path, f"{ROLLOUT}.n_agent=5", f"{ROLLOUT}.n=1", f"{ACTOR}.ppo_mini_batch_size=40")
    assert (config.num_return_sequences_in_group, config.actor_train.global_train_batch_size) == (5, 40)
    words = [f"{ACTOR}.use_dynamic_bsz=False", f"{ACTOR}.ppo_micro_batch_size=8"]
    words += [f"actor_rollout_ref.{part}.log_prob_micro_batch_size=16" for part in ("rollout", "ref")]
    _, config = imported(tmp_path, *words)
    assert config.actor_train.training_args.per_device_train_batch_size == 2
    assert (
        config.reference is not None and config.reference.infer_batch_size == config.actor_train.infer_batch_size == 4
    )
    words = [f"{ACTOR}.megatron.{kind}_parallel_size=2" for kind in ("tensor_model", "context")]
    words += [f"{ACTOR}.ppo_max_token_len_per_gpu=4096"]
    _, config = imported(tmp_path, *words, old="main_ppo \\", new="main_ppo --config-name=ppo_megatron_trainer \\")
    assert config.actor_train.max_tokens_per_microbatch_in_train == 8192


@pytest.mark.parametrize("key", [f"{MODEL}.vla", f"{ROLLOUT}.use_tree_search", f"{ACTOR}.policy_loss.own_share"])
def test_keys_of_somebodys_own_verl_are_told(key, tmp_path):
    result, _ = imported(tmp_path, f"{key}=1")
    assert {each.key for each in result.outcomes if each.kind == Kind.UNKNOWN} == {key}


def test_values_that_only_a_shell_can_tell_are_told_and_links_in_a_name_stay(tmp_path, monkeypatch):
    old, new = "trainer.nnodes=$NODES", "trainer.nnodes=$(nproc)"
    result, config = imported(tmp_path, old=old, new=new)
    assert impossible(result) == {"trainer.nnodes"} and result.exit_code == 1
    result, _ = imported(tmp_path, "trainer.nnodes=1", old=old, new=new)
    assert not impossible(result) and config.num_nodes == 1
    monkeypatch.setenv("JOB", "j7")
    _, config = imported(tmp_path, old='"a run"', new='"a run-$JOB"')
    assert config.exp_name == "a_run-j7"


@pytest.mark.parametrize("low", [1.5, 10])
def test_a_lower_bound_that_no_ratio_reaches(low, tmp_path):
    words = [f"{ACTOR}.policy_loss.loss_mode=cispo", f"{ACTOR}.clip_ratio_low={low}", f"{ACTOR}.clip_ratio_high=0.2"]
    result, config = imported(tmp_path, *words)
    assert not impossible(result)
    assert (config.cispo_epsilon_low, config.cispo_epsilon_high, config.pg_clip_low) == (1.0, 0.2, 1.0)


def test_a_sum_of_tokens_is_divided_by_the_width_of_answers(tmp_path):
    word = f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"
    _, config = imported(tmp_path, word)
    assert config.loss_agg_norm == config.response_length
    _, config = imported(tmp_path, word, f"{ACTOR}.loss_scale_factor=100")
    assert config.loss_agg_norm == 100


def test_weights_and_masks_of_a_release_between(tmp_path):
    key = "algorithm.rollout_is"
    words = [f"{key}=true", f"{key}_threshold=2.0", f"{key}_level=sequence"]
    result, config = imported(tmp_path, *words)
    weight = config.train_infer_correction.is_weight
    assert (weight.enabled, weight.weight_type, weight.upper_bound) == (True, "sequence", 2.0)
    assert not config.train_infer_correction.filters and not impossible(result)
    words = [f"{key}_threshold=4.0", f"{key}_mode=mask", f"{key}_veto_threshold=1e-4"]
    _, config = imported(tmp_path, *words)
    mask, veto = config.train_infer_correction.filters
    assert (mask.agg_type, mask.ratio_low, mask.ratio_high) == ("token", 0.25, 4.0)
    assert (veto.ratio_low, veto.whole_rows) == (1e-4, True)
    assert not config.train_infer_correction.is_weight.enabled


@pytest.mark.parametrize(("bound", "told"), [("3.0", True), ("10000.0", False)])
def test_the_cut_of_the_weights_of_dppo_is_told(bound, told, tmp_path):
    words = [f"{ACTOR}.policy_loss.loss_mode=dppo_tv", f"{ACTOR}.clip_ratio_c={bound}"]
    result, _ = imported(tmp_path, *words)
    assert (f"{ACTOR}.clip_ratio_c" in impossible(result)) is told


def test_a_text_where_a_number_belongs_is_told(tmp_path):
    result, config = imported(tmp_path, f"{ROLLOUT}.n=many")
    assert impossible(result) == {f"{ROLLOUT}.n"} and config.num_return_sequences_in_group == 1


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (("skip_rollout=true", "skip_dump_dir=kept"), "kept"),
        (("skip_rollout=true",), "/tmp/rollout_dump"),
        (("skip.enable=true", "skip.dump_dir=kept"), "kept"),
        (("skip_rollout=false", "skip_dump_dir=kept"), None),
    ],
)
def test_rollouts_that_later_runs_take_are_kept(words, folder, tmp_path):
    result, config = imported(tmp_path, *(f"+{ROLLOUT}.{word}" for word in words))
    assert config.rollout_dump_dir == folder
    told = {each.ours for each in result.outcomes if each.kind == Kind.TO_DO}
    assert ("rollout_replay_dir" in told) == (folder is not None)


OLDER, NEWER = (
    ("reward_model.use_reward_loop=true", "critic.model.fsdp_config.param_offload=true"),
    ("model_engine=dp",),
)
MEAN = "mean over the tokens of each micro-batch"


@pytest.mark.parametrize(
    ("words", "mixed", "mean"),
    [
        (OLDER, False, True),
        (NEWER, False, False),
        ((*OLDER, *NEWER), True, True),
        (("critic.fsdp.param_offload=true", "trainer.use_legacy_worker_impl=auto"), True, True),
        (("reward.num_workers=4",), False, False),
        (("algorithm.filter_groups.enable=true", OLDER[0]), False, True),
        ((), False, True),
        ((f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",), False, False),
    ],
)
def test_releases_are_told_apart_by_their_keys(words, mixed, mean, tmp_path):
    result, _ = imported(tmp_path, *words)
    assert (any("no release of verl reads all" in note for note in result.notes)) is mixed
    assert (any(MEAN in note for note in result.notes)) is mean
    if mixed:
        note = next(note for note in result.notes if "no release" in note)
        assert words[0].partition("=")[0] in note and words[-1].partition("=")[0] in note


@pytest.mark.parametrize(
    "word", ["ppo_epochs=2", "ppo_mini_batch_size=8", "grad_clip=0.5", "loss_agg_mode=seq-mean-token-mean"]
)
def test_what_a_critic_has_of_its_own_is_told(word, tmp_path):
    key, _, value = word.partition("=")
    policy = (f"{ACTOR}.{key}={value}", "algorithm.adv_estimator=gae")
    alike, _ = imported(tmp_path, f"critic.{word}", *policy)
    assert not impossible(alike)
    other, _ = imported(tmp_path, f"critic.{word}", policy[1])
    assert impossible(other) == {f"critic.{key}"}


def test_fields_of_megatron_that_a_critic_has_of_its_own(tmp_path):
    extra = "megatron.override_transformer_config"
    words = [f"{ACTOR}.strategy=megatron", "algorithm.adv_estimator=gae", f"{ACTOR}.{extra}.recompute_granularity=full"]
    words += [f"critic.{extra}.recompute_granularity=selective", f"critic.{extra}.apply_rope_fusion=true"]
    words += [f"{ACTOR}.{extra}.recompute_modules=[core_attn]", f"critic.{extra}.key_of_nobody=1"]
    result, config = imported(tmp_path, *words)
    assert config.actor_train.strategy_args.strategy_config["recompute_granularity"] == "full"
    assert config.critic is not None
    assert config.critic.strategy_args.strategy_config["recompute_granularity"] == "selective"
    unknown = {each.key for each in result.outcomes if each.kind == Kind.UNKNOWN}
    assert any("key_of_nobody" in key for key in unknown)


def test_a_variable_that_nothing_sets_leaves_the_model_open(tmp_path):
    words = [f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=8", "trainer.nnodes=2"]
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.read_text().replace("=Qwen/Qwen2-7B-Instruct", "=$MODEL_OF_NOBODY"))
    result = convert("verl", [script], words, CHECKS)
    assert not result.problems  # with the heads of the model that is taken where none is given there would be
    told = {each.key: each.kind for each in result.outcomes}
    assert told["pretrain"] == Kind.TO_DO


@pytest.mark.parametrize(
    ("words", "samples"),
    [
        (("temperature=1.0", "do_sample=False"), True),
        (("temperature=0", "do_sample=True"), False),
        (("temperature=1.0", "do_sample=False", "mode=sync"), False),
    ],
)
def test_the_temperature_says_whether_held_out_answers_are_sampled(words, samples, tmp_path):
    rollout = "actor_rollout_ref.rollout"
    given = [f"{rollout}.{word if word.startswith('mode') else f'val_kwargs.{word}'}" for word in words]
    _, config = imported(tmp_path, *given)
    assert config.validation is not None
    assert config.validation.generating_args is not None
    assert config.validation.generating_args.do_sample is samples


def notes(result: Imported) -> str:
    return " ".join(result.notes)


def test_scores_of_minus_one_are_told_where_the_files_may_have_them(tmp_path):
    result, _ = imported(tmp_path, "data.train_files=dapo-math-17k.parquet", "data.val_files=aime-2024.parquet")
    assert "1 or -1" in notes(result)
    result, _ = imported(tmp_path, "data.train_files=gsm8k/train.parquet", "data.val_files=math/test.parquet")
    assert "1 or -1" not in notes(result)


def test_a_coefficient_without_its_switch_is_told(tmp_path):
    script = tmp_path / "old.sh"
    script.write_text("python3 -m verl.trainer.main_ppo algorithm.kl_ctrl.kl_coef=0.002 data.train_batch_size=64")
    assert "kl_coef = 0.002 from the reward" in notes(convert("verl", [script]))
    for word in ("algorithm.use_kl_in_reward=False", f"{ACTOR}.use_kl_loss=True", "algorithm.kl_ctrl.kl_coef=0"):
        assert "releases before 0.3" not in notes(convert("verl", [script], [word])), word


def test_the_first_name_of_packing(tmp_path):
    script = tmp_path / "old.sh"
    script.write_text(
        f"python3 -m verl.trainer.main_ppo {MODEL}.use_rmpad=True critic.model.use_rmpad=True "
        "critic.model.path=Qwen/Qwen3-0.6B data.train_batch_size=64"
    )
    result = convert("verl", [script])
    assert not any(outcome.key.endswith("use_rmpad") and outcome.kind == Kind.UNKNOWN for outcome in result.outcomes)
    assert result.text.count("use_sequence_packing: true") == 2


ASYNC_SCRIPT = """
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


def imported_async(
    folder: Path, program: str, *words: str, prompts: int = 0, config: str = ""
) -> tuple[Imported, RLVRConfig, dict[str, Kind]]:
    """A script of a trainer with some words, what ``roll train`` would read, and what has become of each key."""
    script = folder / "run.sh"
    script.write_text(ASYNC_SCRIPT.format(program=program, words=" ".join(words), prompts=prompts, config=config))
    assert system_of(script) == "verl"
    result = convert("verl", [script])
    (folder / "mine.yaml").write_text(result.text)
    read = load_composed(RLVRConfig, "mine", compose_config("mine", folder, ()))
    assert isinstance(read, RLVRConfig)
    return result, read, {key: each.kind for each in result.outcomes for key in each.key.split(", ")}


@pytest.mark.parametrize("package", ["verl.experimental", "recipe"])
def test_a_version_of_the_weights_is_a_step(package, tmp_path):
    words = [*VERSION, "rollout.total_rollout_steps=830", "rollout.test_freq=5", "trainer.save_freq=3"]
    words += [f"{ASYNC}.staleness_threshold=0.5", f"{ASYNC}.partial_rollout=False"]
    words += ["actor_rollout_ref.actor.optim.lr_warmup_steps=10"]
    result, config, kinds = imported_async(tmp_path, f"{package}.{STREAMING}", *words, "rollout.total_epochs=2")
    assert Kind.IMPOSSIBLE not in kinds.values() and result.exit_code == 0
    assert (config.rollout_batch_size, config.max_steps, config.eval_steps, config.save_steps) == (80, 10, 5, 3)
    assert config.actor_train.global_train_batch_size == 40 and config.optimizer_steps_per_epoch == 8
    assert (config.async_generation_ratio, config.groups_ahead, config.partial_rollout) == (0.5, 40, False)
    assert config.max_running_groups == 48 and config.actor_train.training_args.warmup_steps == 20
    assert kinds["data.train_batch_size"] == kinds["rollout.total_epochs"] == Kind.DROPPED
    told = [each.note for each in result.outcomes if each.ours == "rollout_batch_size"]
    assert told == ["4 fetches × 2 batches × 10 prompts between two updates of the generator, which is a step"]


def test_their_defaults_are_those_of_the_trainer_and_without_a_number_of_prompts_epochs_count(tmp_path):
    _, config, _ = imported_async(tmp_path, f"verl.experimental.{STREAMING}")
    assert (config.rollout_batch_size, config.max_steps, config.async_generation_ratio) == (40, 2, 0.1)
    assert config.train_infer_correction.bypass and config.rollout_window == 1 and config.partial_rollout
    words = ("rollout.total_rollout_steps=null", "trainer.total_epochs=7", "trainer.test_freq=4")
    _, config, _ = imported_async(tmp_path, f"verl.experimental.{STREAMING}", *words)
    assert (config.total_epochs, config.eval_steps) == (7, 4)


def test_a_threshold_below_a_group_takes_turns(tmp_path):
    words = (f"{ASYNC}.staleness_threshold=0", f"{ASYNC}.partial_rollout=False")
    _, config, kinds = imported_async(tmp_path, f"verl.experimental.{STREAMING}", *VERSION, *words)
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
def test_both_sides_have_devices_of_their_own(words, training, generating, nodes, gpus, tmp_path):
    _, config, _ = imported_async(tmp_path, f"recipe.{ONE_STEP}", *words, prompts=40)
    assert config.actor_train.device_mapping == training and config.actor_infer.device_mapping == generating
    assert config.reference is not None and config.reference.device_mapping == training
    assert (config.num_nodes, config.num_gpus_per_node) == (nodes, gpus)


def test_one_step_off_is_one_batch_ahead(tmp_path):
    _, config, kinds = imported_async(tmp_path, f"verl.experimental.{ONE_STEP}", "trainer.total_epochs=3", prompts=40)
    assert Kind.IMPOSSIBLE not in kinds.values()
    assert (config.async_generation_ratio, config.max_lag, config.rollout_window) == (1, 1, 0)
    assert (config.rollout_batch_size, config.total_epochs, config.partial_rollout) == (40, 3, False)
    assert config.train_infer_correction.bypass


def test_old_samples_without_weights_are_told(tmp_path):
    _, config, kinds = imported_async(tmp_path, f"recipe.{ONE_STEP}", prompts=40)
    assert kinds[f"{CORRECTION}.rollout_is"] == Kind.IMPOSSIBLE
    assert config.train_infer_correction.is_weight.enabled and not config.train_infer_correction.bypass


SCORED = [
    (f"{ASYNC}.compute_prox_log_prob=True", f"{ASYNC}.use_rollout_log_probs=True"),
    (f"{CORRECTION}.bypass_mode=False",),
]


@pytest.mark.parametrize("words", SCORED)
def test_what_the_trainer_scores_has_weights_and_filters(words, tmp_path):
    correction = (f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_rs=seq_mean_k1")
    _, config, kinds = imported_async(tmp_path, f"recipe.{STREAMING}", *words, *correction)
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
def test_what_cannot_be_said_beside_the_samplers_probabilities_is_told(words, told, tmp_path):
    result, _, _ = imported_async(tmp_path, f"verl.experimental.{STREAMING}", *words)
    assert {each.key for each in result.outcomes if each.kind in (Kind.IMPOSSIBLE, Kind.UNKNOWN)} == told


def test_a_configuration_that_a_script_names_tells_the_engine_and_a_word_for_a_number_is_told(tmp_path):
    name = "--config-name=fully_async_ppo_megatron_trainer"
    _, config, _ = imported_async(tmp_path, f"verl.experimental.{STREAMING}", config=name)
    assert config.actor_train.strategy_args.strategy_name == "megatron_train"
    _, config, kinds = imported_async(tmp_path, f"verl.experimental.{STREAMING}", f"{ASYNC}.require_batches=few")
    assert kinds[f"{ASYNC}.require_batches"] == Kind.IMPOSSIBLE and config.rollout_batch_size == 40


def test_the_penalty_of_long_answers_in_its_newest_place(tmp_path):
    key = "reward.reward_kwargs"
    words = [f"+{key}.overlong_buffer_cfg.{word}" for word in ("enable=True", "len=128", "penalty_factor=0.5")]
    words += ["reward.reward_manager.name=dapo", f"+{key}.max_resp_len=512"]
    _, config, _ = imported_async(tmp_path, f"verl.experimental.{STREAMING}", *words)
    assert (config.overlong_buffer.enable, config.overlong_buffer.len) == (True, 128)
    assert config.overlong_buffer.penalty_factor == 0.5


def test_devices_apart_without_such_a_trainer_are_told(tmp_path):
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


def test_the_newer_trainer_with_devices_apart(tmp_path):
    own = "actor_rollout_ref.rollout"
    words = (f"{own}.nnodes=1", f"{own}.n_gpus_per_node=3", f"{V1}.separate_async.parameter_sync_step=2")
    config, kinds = imported_mode(tmp_path, "separate_async", *words)
    assert Kind.IMPOSSIBLE not in kinds.values() and kinds[f"{V1}.trainer_mode"] == Kind.DERIVED
    assert (config.async_generation_ratio, config.partial_rollout, config.rollout_window) == (1, True, 1)
    assert config.actor_infer.device_mapping == [5, 6, 7] and config.actor_train.device_mapping == [0, 1, 2, 3, 4]
    assert config.train_infer_correction.is_weight.enabled and not config.train_infer_correction.bypass
    assert (config.max_steps, config.rollout_batch_size, config.eval_steps) == (30, 20, 6)


def test_mini_batches_between_two_updates_of_the_newer_trainer_are_a_step(tmp_path):
    words = ("actor_rollout_ref.rollout.n_gpus_per_node=3", f"{V1}.separate_async.parameter_sync_step=2")
    words += ("actor_rollout_ref.actor.optim.lr_warmup_steps=4", f"{V1}.colocate_async.parameter_sync_step=7")
    config, kinds = imported_mode(tmp_path, "separate_async", *words)
    assert Kind.IMPOSSIBLE not in kinds.values()
    assert (config.max_steps, config.rollout_batch_size, config.eval_steps) == (30, 20, 6)
    assert config.actor_train.global_train_batch_size == 40 and config.optimizer_steps_per_epoch == 2
    assert config.actor_train.training_args.warmup_steps == 4  # their schedule goes on with each mini-batch


def test_a_batch_that_is_not_so_many_mini_batches_is_told(tmp_path):
    words = ("actor_rollout_ref.rollout.n_gpus_per_node=3", "data.train_batch_size=40")
    _, kinds = imported_mode(tmp_path, "separate_async", *words)
    assert Kind.IMPOSSIBLE not in kinds.values()  # 4 mini-batches by default
    _, kinds = imported_mode(tmp_path, "separate_async", *words, f"{V1}.separate_async.parameter_sync_step=3")
    assert kinds[f"{V1}.separate_async.parameter_sync_step"] == Kind.IMPOSSIBLE


@pytest.mark.parametrize(
    ("words", "ratio", "window"),
    [(["num_warmup_batches=2"], 2, 1), (["num_warmup_batches=0"], 0, 0), (["num_warmup_batches=1.5"], 1.5, 1)],
)
def test_batches_before_the_first_step_of_the_newer_trainer_are_how_far_rollouts_are_ahead(
    words, ratio, window, tmp_path
):
    given = [f"{V1}.separate_async.{word}" for word in (*words, "parameter_sync_step=2")]
    config, kinds = imported_mode(tmp_path, "separate_async", "actor_rollout_ref.rollout.n_gpus_per_node=3", *given)
    assert Kind.IMPOSSIBLE not in kinds.values()
    assert (config.async_generation_ratio, config.rollout_window) == (ratio, window)


@pytest.mark.parametrize(("oldest", "ratio", "window"), [(8, 1, 1), (1, 1, 0), (0, 0, 0)])
def test_the_newer_trainer_on_shared_devices(oldest, ratio, window, tmp_path):
    words = (f"{V1}.sampler.max_off_policy_threshold={oldest}", f"{V1}.sampler.max_off_policy_strategy=drop")
    config, kinds = imported_mode(tmp_path, "colocate_async", *words)
    assert Kind.IMPOSSIBLE not in kinds.values()
    assert (config.async_generation_ratio, config.rollout_window) == (ratio, window)
    assert config.actor_infer.device_mapping == config.actor_train.device_mapping == [0, 1, 2, 3, 4]
    assert config.max_lag <= oldest


def test_what_a_mode_does_beyond_that_is_told(tmp_path):
    config, kinds = imported_mode(tmp_path, "colocate_async", f"{V1}.sampler.custom_sampler.path=mine.py")
    assert kinds[f"{V1}.sampler.custom_sampler.path"] == Kind.IMPOSSIBLE
    usual = ("sampler.custom_sampler.path=null", "sampler.sync_refill_failed_groups=false", "sampler.sampler_kwargs={}")
    words = [f"{V1}.{word}" for word in (*usual, "separate_async.hybrid_rollout.enable_switch=true")]
    config, kinds = imported_mode(tmp_path, "separate_async", *words, f"{V1}.separate_async.parameter_sync_step=2")
    assert Kind.IMPOSSIBLE not in kinds.values() and Kind.UNKNOWN not in kinds.values()
    config, kinds = imported_mode(tmp_path, "separate_async", "trainer.use_v1=False")
    assert config.async_generation_ratio == 0 and kinds[f"{V1}.trainer_mode"] == Kind.DROPPED


@pytest.mark.parametrize(("words", "expected"), [(["vllm", "fp8"], "fp8_per_block"), (["vllm", "torchao"], None),
                                                 (["sglang", "fp8"], None)])  # fmt: skip
def test_quantised_rollouts(words, expected, tmp_path):
    name, method = words
    result, config = imported(tmp_path, f"{ROLLOUT}.name={name}", f"{ROLLOUT}.quantization={method}")
    assert config.actor_infer.strategy_args.strategy_config.get("quantization") == expected
    assert (f"{ROLLOUT}.quantization" in impossible(result)) == (expected is None)
