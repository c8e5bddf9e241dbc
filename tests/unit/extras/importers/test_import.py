"""Whole imports: from files of other systems to a configuration that says the same."""

import math
from pathlib import Path

import pytest
import yaml

from roll.__main__ import main
from roll.configs.agentic import AgenticConfig
from roll.configs.compose import compose_config
from roll.configs.distill import DistillConfig
from roll.configs.loader import load_composed
from roll.configs.offline import SFTConfig
from roll.configs.pipeline import PipelineConfig
from roll.configs.preference import DPOConfig
from roll.configs.rlvr import RLVRConfig
from roll.configs.schema import ROLES
from roll.extras.importers.convert import Imported, convert, report
from roll.extras.importers.draft import Kind
from roll.extras.importers.reading import UnreadableError
from roll.pipeline.programs import program_of
from roll.preflight.choices import CHECKS

FILES = Path(__file__).parent / "files"
SCRIPT = FILES / "run_verl.sh"


def loaded(imported: Imported, tmp_path: Path) -> PipelineConfig:
    """The result as ``roll train`` would read it."""
    (tmp_path / "mine.yaml").write_text(imported.text)
    return load_composed(imported.schema, "mine", compose_config("mine", tmp_path, ()))


def kinds(imported: Imported, kind: Kind) -> set[str]:
    return {outcome.key for outcome in imported.outcomes if outcome.kind == kind}


def test_rlvr_of_roll(tmp_path):
    imported = convert("roll", [FILES / "roll" / "run" / "rlvr.yaml"])
    config = loaded(imported, tmp_path)
    assert isinstance(config, RLVRConfig)
    assert imported.exit_code == 0 and kinds(imported, Kind.IMPOSSIBLE) == set()
    assert (config.sequence_length, config.num_nodes, config.total_optimizer_steps) == (768, 3, 20)
    assert (config.pg_variant, config.topr_positive_weight) == ("topr", 0.5)
    assert (config.norm_mean_type, config.norm_std_type) == ("group", None)
    assert config.actor_train.data_args.domain_interleave_probs == {"sums": 0.5, "talk": 0.5}
    assert config.validation is not None and config.validation.data_args.messages == "messages"
    assert config.validation.data_args.response == config.actor_train.data_args.response == "ground_truth"
    assert config.reference is not None and config.reference.strategy_args.strategy_name == "hf_infer"
    filters = config.rewards["sums"].query_filter_config
    assert (filters.type, filters.low, filters.high) == ("mean_filter", 0.1, 0.9)
    judge = config.rewards["talk"].verifiers[0]
    assert (judge.name, judge.args["judge_model_name"], judge.args["max_tokens"]) == ("judge", "some/judge", 100)
    # what it does not say has the default of ROLL
    sampling = config.actor_infer.generating_args
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.95, 0.99, 50)
    dropped = kinds(imported, Kind.DROPPED)
    assert {"difficulty_low_threshold", "actor_infer.infer_batch_size", "rewards.sums.model_args"} <= dropped
    assert "actor_infer.strategy_args.strategy_config.max_model_len" in dropped  # below sequence_length
    assert "actor_train.strategy_args.strategy_config.sequence_parallel" in dropped
    assert (judge.args["judge_model_type"], config.rewards["talk"].device_mapping) == ("inference", [4, 5])
    assert judge.args["engine"]["strategy_args"] == {"strategy_name": "vllm"}


def test_options_of_megatron_in_files_of_roll(tmp_path):
    base = "actor_train.strategy_args.strategy_config"
    words = [
        "actor_train.model_args.dtype=null",
        "actor_train.strategy_args.strategy_name=megatron_train",
        f"{base}={{bf16: true, recompute_granularity: selective, save_only_model: true, max_grad_norm: 0.5}}",
        f"+{base}.recompute_modules='moe, mlp'",
        f"+{base}.additional_configs={{moe_permute_fusion: true}}",
        "reference.model_args.dtype=fp32",
        "reference.strategy_args={strategy_name: megatron_infer, strategy_config: {bf16: true}}",
    ]
    imported = convert("roll", [FILES / "roll" / "run" / "rlvr.yaml"], words)
    config = loaded(imported, tmp_path)
    assert (config.actor_train.model_args.dtype, config.max_grad_norm) == ("bf16", 0.5)
    assert config.checkpoint_config.save_contents == ["model"]
    options = config.actor_train.strategy_args.strategy_config
    assert (options["recompute_modules"], options["moe_permute_fusion"]) == (["moe", "mlp"], True)
    assert kinds(imported, Kind.IMPOSSIBLE) == {"reference.strategy_args.strategy_config.bf16"}


def test_distillation_of_roll(tmp_path):
    imported = convert("roll", [FILES / "roll" / "run" / "distill.yaml"])
    config = loaded(imported, tmp_path)
    assert isinstance(config, DistillConfig)
    assert imported.exit_code == 0, report(imported)
    assert (config.pretrain, config.teacher_pretrain) == ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B")
    assert (config.kd_objective, config.skew_lambda, config.kd_temperature) == ("skewed_reverse_kl", 0.2, 2)
    assert (config.logits_topk, config.distill_loss_weight) == (64, 0.5)  # what ROLL takes where nothing is said
    data = config.actor_train.data_args
    assert (data.prompt, data.response, data.file_names) == ("question_zh", "answer_zh", ["data/train.jsonl"])
    assert config.teacher is not None and config.teacher.strategy_args.strategy_name == "megatron_infer"
    assert "logits_transfer_backend" in kinds(imported, Kind.DROPPED)
    other = convert(
        "roll", [FILES / "roll" / "run" / "distill.yaml"], ["teacher_temperature=1", "distill_on_prompt=true"]
    )
    assert kinds(other, Kind.IMPOSSIBLE) == {"teacher_temperature"}
    assert yaml.safe_load(other.text)["distill_on_prompt"] is True


def test_supervised_training_of_roll(tmp_path):
    imported = convert("roll", [FILES / "roll" / "run" / "sft.yaml"])
    config = loaded(imported, tmp_path)
    assert isinstance(config, SFTConfig) and imported.exit_code == 0, report(imported)
    assert program_of(yaml.safe_load(imported.text)) == "sft"
    assert (config.num_train_epochs, config.sequence_length, config.val_batch_size) == (2, 128, None)
    data = config.actor_train.data_args
    assert (data.prompt, data.response, data.shuffle, data.template) == ("question", "output", False, "native")
    assert config.validation is not None and config.validation.data_args.prompt == "question"
    assert config.actor_train.training_args.gradient_accumulation_steps == 4
    assert config.actor_train.strategy_args.strategy_name == "megatron_train"
    other = convert("roll", [FILES / "roll" / "run" / "sft.yaml"], ["system_key=system", "query_key=input"])
    assert not kinds(other, Kind.IMPOSSIBLE)
    columns = yaml.safe_load(other.text)["actor_train"]["data_args"]
    assert (columns["system"], columns["query"]) == ("system", "input")


def test_preferences_of_roll(tmp_path):
    imported = convert("roll", [FILES / "roll" / "run" / "dpo.yaml"])
    config = loaded(imported, tmp_path)
    assert isinstance(config, DPOConfig) and imported.exit_code == 0, report(imported)
    assert program_of(yaml.safe_load(imported.text)) == "dpo"
    assert (config.preference_loss, config.beta, config.label_smoothing) == ("sigmoid", 0.2, 0.1)
    assert (config.preferences.chosen, config.preferences.rejected) == ("better", "worse")
    assert (config.max_steps, config.num_train_epochs) == (500, None)
    assert config.reference is not None and config.reference.strategy_args.strategy_name == "megatron_infer"
    assert "chosen_key" in kinds(imported, Kind.TO_DO), "nothing says where the question is"
    words = ["ipo=true", "~reference", "actor_train.data_args.prompt=question"]
    ipo = loaded(convert("roll", [FILES / "roll" / "run" / "dpo.yaml"], words), tmp_path)
    assert isinstance(ipo, DPOConfig)
    assert (ipo.preference_loss, ipo.label_smoothing, ipo.precompute_reference) == ("ipo", 0.0, True)


def test_on_policy_distillation_of_roll(tmp_path):
    imported = convert("roll", [FILES / "roll" / "run" / "opd.yaml"])
    config = loaded(imported, tmp_path)
    assert isinstance(config, RLVRConfig)
    assert imported.exit_code == 0, report(imported)
    assert (config.is_pure_opd, config.opd_kl_coef, config.teacher_pretrain) == (True, 0.5, "Qwen/Qwen2.5-7B")
    assert config.actor_train.training_args.learning_rate == 2e-6
    assert config.actor_infer.strategy_args.strategy_name == "vllm"
    assert "student_train is read as actor_train" in imported.notes
    off = loaded(convert("roll", [FILES / "roll" / "run" / "opd.yaml"], ["is_pure_opd=false"]), tmp_path)
    assert isinstance(off, RLVRConfig) and off.teacher is None, "use_opd is off"


def test_a_teacher_that_is_told_the_solution_of_roll(tmp_path):
    file = FILES / "roll" / "run" / "opd.yaml"
    words = [
        "opsd_mode=true",
        "is_pure_opd=false",
        "opsd_solution_key=worked",
        "opsd_teacher_template='{problem} is {solution}'",
    ]
    imported = convert("roll", [file], [*words, "sequence_length=1024"])
    config = loaded(imported, tmp_path)
    assert isinstance(config, RLVRConfig) and imported.exit_code == 0, report(imported)
    assert (config.teacher_prompt, config.is_pure_opd) == ("{prompt} is {worked}", True)
    mixed = convert("roll", [file], ["opsd_mode=true", "is_pure_opd=false", "use_opd=true"])
    own = loaded(mixed, tmp_path)
    assert isinstance(own, RLVRConfig) and not own.is_pure_opd and own.teacher is not None
    assert "{prompt}" in own.teacher_prompt and "{reference_solution}" in own.teacher_prompt
    assert kinds(mixed, Kind.TO_DO) >= {"opsd_teacher_template"}
    cut = loaded(convert("roll", [file], [*words, "opsd_max_solution_length=64", "opd_token_kld_clip=0.5"]), tmp_path)
    assert isinstance(cut, RLVRConfig) and (cut.teacher_column_length, cut.opd_token_kld_clip) == (64, 0.5)


def test_several_teachers_of_roll(tmp_path):
    def section(model: str, tags: str, coefficient: float = 0.5) -> str:
        strategy = "strategy_args: {strategy_name: megatron_infer, strategy_config: {tensor_model_parallel_size: 2}}"
        own = (
            f"model_args: {{model_name_or_path: {model}, dtype: bf16}}, {strategy}, device_mapping: 'list(range(0,2))'"
        )
        return f"{{opd_kl_coef: {coefficient}, tag_included: {tags}, {own}}}"

    file = tmp_path / "several.yaml"
    values = yaml.safe_load((FILES / "roll" / "run" / "opd.yaml").read_text())
    teachers = {"m": section("Qwen/Qwen2.5-7B", "[sums]"), "c": section("Qwen/Qwen2.5-Coder-7B", "[code]")}
    values["teacher"] = {name: yaml.safe_load(text) for name, text in teachers.items()}
    values["rewards"]["sums"]["tag_included"] = ["sums", "code"]
    file.write_text(yaml.safe_dump(values))
    imported = convert("roll", [file])
    config = loaded(imported, tmp_path)
    assert isinstance(config, RLVRConfig) and imported.exit_code == 0, report(imported)
    assert config.teacher is None and config.teacher_coefficients == [0.5, 0.5]
    found = {name: (each.pretrain, each.tag_included) for name, each in config.teachers.items()}
    assert found == {"m": ("Qwen/Qwen2.5-7B", ["sums"]), "c": ("Qwen/Qwen2.5-Coder-7B", ["code"])}
    options = config.teachers["c"].strategy_args
    assert (options.strategy_name, options.strategy_config["tensor_model_parallel_size"]) == ("megatron_infer", 2)
    assert config.teachers["c"].model_args.dtype == "bf16"
    values["teacher"]["m"] |= {"tag_included": [], "opd_kl_coef": 0.3}
    file.write_text(yaml.safe_dump(values))
    both = loaded(convert("roll", [file]), tmp_path)
    assert isinstance(both, RLVRConfig)
    assert dict(zip(both.tags, both.teacher_coefficients, strict=True)) == {"sums": 0.3, "code": 0.8}


def test_agentic_of_roll(tmp_path):
    imported = convert("roll", [FILES / "roll" / "run" / "agentic.yaml"])
    config = loaded(imported, tmp_path)
    assert isinstance(config, AgenticConfig)
    assert imported.exit_code == 0, report(imported)
    assert list(config.custom_envs) == ["Boxes"]  # what no manager plays is left out
    boxes = config.custom_envs["Boxes"]
    assert (boxes.env_manager_cls, boxes.max_steps, boxes.env_config["format_penalty"]) == ("traj", 5, -0.2)
    assert "{turn_idx}" in str(boxes.agent_template)
    assert (config.adv_estimator, config.reward_normalization.grouping) == ("reinforce", "state")
    assert (config.prompt_length, config.response_length, config.sequence_length) == (1984, 64, 2048)
    assert (config.num_nodes, config.actor_infer.num_gpus_per_worker) == (2, 2)
    assert config.val_batch_size == 32  # whole groups of 4
    assert config.actor_train.global_train_batch_size == 16  # 24 does not divide the 32 episodes of a step
    assert config.actor_train.strategy_args.strategy_config["zero_optimization"]["stage"] == 2
    assert config.train_infer_correction.is_weight.enabled
    assert config.tracker_kwargs == {"project": "p", "name": "boxes_a"}
    assert "not-to-be-copied" not in imported.text
    assert {"tracker_kwargs.api_key", "system_envs.USE_MODELSCOPE"} <= kinds(imported, Kind.TO_DO)


def test_options_that_nothing_here_has_are_left_out_and_told(tmp_path):
    engine = "actor_infer.strategy_args.strategy_config.online_quantization"
    words = [f"+{engine}=mx8", "custom_envs.Boxes={env_type: sokoban, max_steps: 2, env_config: {grid_colours: 3}}"]
    imported = convert("roll", [FILES / "roll" / "run" / "agentic.yaml"], words, CHECKS)
    loaded(imported, tmp_path)
    assert kinds(imported, Kind.IMPOSSIBLE) == {"custom_envs.Boxes.env_config.grid_colours"}
    assert kinds(imported, Kind.UNKNOWN) == {engine}
    assert imported.exit_code == 1


def test_environments_of_gem_in_files_of_roll(tmp_path):
    words = ["custom_envs.Boxes={env_type: 'rg:letter_counting', max_steps: 1, env_config: {size: 9, seed: 2}}"]
    imported = convert("roll", [FILES / "roll" / "run" / "agentic.yaml"], words)
    env = yaml.safe_load(imported.text)["custom_envs"]["Boxes"]
    assert (env["env_type"], env["env_config"]["env_id"]) == ("gem", "rg:letter_counting")
    assert env["env_config"]["env_kwargs"] == {"size": 9, "seed": 2}
    assert imported.problems == () and imported.exit_code == 0, report(imported)


def test_a_launch_script_of_verl(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    imported = convert("verl", [SCRIPT], ["actor_rollout_ref.actor.optim.weight_decay=0.1"])
    config = loaded(imported, tmp_path)
    assert isinstance(config, RLVRConfig)
    assert imported.exit_code == 0, report(imported)
    assert config.actor_train.data_args.file_names == [
        f"/home/me/data/{name}/train.parquet" for name in ("gsm8k", "math")
    ]
    assert (config.prompt_length, config.response_length, config.sequence_length) == (512, 768, 1280)
    assert (config.exp_name, config.total_epochs, config.with_length(320).max_steps) == ("a_run", 3, 30)
    assert config.actor_train.global_train_batch_size == 16 * 8
    assert config.actor_train.max_tokens_per_microbatch_in_train == 2560
    assert config.actor_train.data_args.prompt_overflow == "left"
    assert (config.use_pg_clip_range, config.pg_clip_low, config.pg_clip_high) == (True, 0.2, 0.28)
    assert (config.dual_clip_loss, config.dual_clip_c) == (True, 3.0)
    assert (config.kl_penalty, config.kl_loss_coef) == ("low_var_kl", 0.002)
    assert config.actor_train.training_args.weight_decay == 0.1
    assert set(config.domains.values()) == {"gsm8k", "math"}
    assert (config.val_sampling.num_return_sequences, config.val_sampling.temperature) == (4, 0.6)
    assert config.reference is not None and config.reference.num_devices == 4
    assert "trainer.default_local_dir" in kinds(imported, Kind.TO_DO)  # $(date)


def test_supervised_training_of_verl(tmp_path):
    imported = convert("verl", [FILES / "run_verl_sft.sh"])
    config = loaded(imported, tmp_path)
    assert isinstance(config, SFTConfig) and imported.exit_code == 0, report(imported)
    assert program_of(yaml.safe_load(imported.text)) == "sft"
    data, training = config.actor_train.data_args, config.actor_train.training_args
    assert (data.prompt, data.response) == ("extra_info.question", "extra_info.answer")
    assert (config.num_train_epochs, config.save_steps, config.sample_overflow) == (2, 50, "truncate")
    assert (config.num_gpus_per_node, config.actor_train.global_train_batch_size) == (2, 32)
    assert (training.lr_scheduler_type, training.warmup_ratio, training.adam_beta2) == ("wsd", 0.1, 0.95)
    model = config.actor_train.model_args
    assert (model.dtype, model.ulysses_size, model.lora_rank, model.lora_target) == ("fp32", 2, 8, "q_proj,v_proj")
    words = ["data.multiturn.enable=true", "data.multiturn.messages_key=talk", "data.truncation=left"]
    other = convert("verl", [FILES / "run_verl_sft.sh"], [*words, "data.multiturn.tools_key=functions"])
    assert loaded(other, tmp_path).actor_train.data_args.messages == "talk"
    assert kinds(other, Kind.IMPOSSIBLE) == {"data.truncation", "data.multiturn.tools_key"}


def test_supervised_training_of_verl_with_an_engine(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        "torchrun --nproc_per_node 4 -m verl.trainer.sft_trainer data.train_files=a.parquet model.path=Qwen/Qwen3-0.6B "
        "engine=megatron optim=megatron optim.lr=1e-5 engine.tensor_model_parallel_size=2 data.train_batch_size=64 "
        "trainer.test_freq=after_each_epoch trainer.save_freq=after_each_epoch data.val_files=null"
    )
    imported = convert("verl", [script])
    config = loaded(imported, tmp_path)
    assert isinstance(config, SFTConfig) and config.validation is None
    assert config.actor_train.data_args.messages == "messages" and config.actor_train.data_args.response is None
    assert config.actor_train.strategy_args.strategy_config["tensor_model_parallel_size"] == 2
    assert (config.actor_train.max_tokens_per_microbatch_in_train, config.num_gpus_per_node) == (8192, 4)
    training = config.actor_train.training_args
    assert (training.lr_scheduler_type, training.warmup_ratio) == ("constant_with_warmup", 0.0)
    assert not kinds(imported, Kind.IMPOSSIBLE) and imported.exit_code == 0
    assert (config.eval_steps, config.save_steps) == (0, 0)
    told = {outcome.key: outcome.note for outcome in imported.outcomes}
    assert all("rows / global batch" in told[f"trainer.{name}_freq"] for name in ("test", "save"))


@pytest.mark.parametrize("word", ["", "trainer.save_freq=-1"])
def test_supervised_training_of_verl_saves_its_last_step_whatever_is_said(word, tmp_path):
    (tmp_path / "run.sh").write_text(
        "torchrun --nproc_per_node 1 -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet "
        f"data.train_batch_size=8 model.partial_pretrain=Qwen/Qwen3-0.6B {word}"
    )
    assert loaded(convert("verl", [tmp_path / "run.sh"]), tmp_path).save_steps == 0


TEACHER = "distillation.teacher_models.teacher_model"
TAUGHT = [
    "distillation.enabled=True",
    "distillation.n_gpus_per_node=4",
    "distillation.nnodes=1",
    f"{TEACHER}.model_path=Qwen/Qwen2.5-32B-Instruct",
    f"{TEACHER}.inference.tensor_model_parallel_size=4",
    f"{TEACHER}.inference.gpu_memory_utilization=0.7",
    f"{TEACHER}.inference.engine_kwargs.vllm.max_logprobs=64",
    "distillation.distillation_loss.use_task_rewards=False",
]


def test_on_policy_distillation_of_verl(tmp_path):
    loss = "distillation.distillation_loss"
    imported = convert("verl", [SCRIPT], [*TAUGHT, f"{loss}.loss_mode=k1", f"{loss}.use_policy_gradient=True"])
    config = loaded(imported, tmp_path)
    assert isinstance(config, RLVRConfig) and imported.exit_code == 0, report(imported)
    assert (config.is_pure_opd, config.opd_form) == (True, "advantage")
    assert (config.teacher_pretrain, config.num_gpus_per_node) == ("Qwen/Qwen2.5-32B-Instruct", 8)
    assert config.teacher is not None and config.teacher.device_mapping == [4, 5, 6, 7]
    assert (config.teacher.num_gpus_per_worker, config.teacher.model_args.dtype) == (4, "bf16")
    strategy = config.teacher.strategy_args
    assert (strategy.strategy_name, strategy.strategy_config["gpu_memory_utilization"]) == ("vllm", 0.7)

    words = [f"{loss}.{each}" for each in ("loss_mode=forward_kl_topk", "topk=64")]
    other = convert("verl", [SCRIPT], [*TAUGHT, *words, f"{TEACHER}.inference.name=sglang"])
    whole = loaded(other, tmp_path)
    assert isinstance(whole, RLVRConfig) and other.exit_code == 0, report(other)
    assert (whole.opd_form, whole.kd_objective, whole.logits_topk) == ("loss", "forward_kl", 64)
    assert whole.teacher is not None and whole.teacher.strategy_args.strategy_config["mem_fraction_static"] == 0.7

    warm = [*words, f"{loss}.kd_temperature=2.0", "actor_rollout_ref.rollout.temperature=0.5"]
    config = loaded(convert("verl", [SCRIPT], [*TAUGHT, *warm]), tmp_path)
    assert isinstance(config, RLVRConfig) and (config.kd_temperature, config.teacher_temperature) == (1, 1)

    apart = loaded(convert("verl", [SCRIPT], [*TAUGHT, *words, "trainer.n_gpus_per_node=8"]), tmp_path)
    assert isinstance(apart, RLVRConfig) and apart.teacher is not None
    assert (apart.num_nodes, apart.teacher.device_mapping) == (2, [8, 9, 10, 11])

    usual = loaded(convert("verl", [SCRIPT], [*TAUGHT, words[0]]), tmp_path)
    assert isinstance(usual, RLVRConfig) and (usual.opd_form, usual.logits_topk) == ("loss", 32)

    given = ("use_task_rewards=true", "distillation_loss_coef=0.5", "loss_max_clamp=10", "log_prob_min_clamp=-9")
    given = (*given, "use_policy_gradient=true")
    mixed = [f"{loss}.{each}" for each in given]
    changed = convert("verl", [SCRIPT], [*TAUGHT[:-1], *mixed])
    own = loaded(changed, tmp_path)
    assert isinstance(own, RLVRConfig) and (own.is_pure_opd, own.opd_kl_coef) == (False, 0.5)
    assert (own.opd_token_kld_clip, own.opd_logprob_min) == (5, -9)
    assert kinds(changed, Kind.IMPOSSIBLE) == {f"{loss}.loss_mode"}, "k3 is its default"

    off = convert("verl", [SCRIPT], ["distillation.enabled=False", *TAUGHT[1:]])
    assert off.exit_code == 0 and loaded(off, tmp_path).num_gpus_per_node == 4


def test_several_teachers_of_verl(tmp_path):
    entries = "distillation.teacher_models"
    words = ["distillation.enabled=True", "distillation.n_gpus_per_node=4", "distillation.nnodes=2"]
    sources = {"a": "openai/gsm8k", "b": "lighteval/MATH"}
    for name, source in sources.items():
        inference = f"+{entries}.{name}.inference.tensor_model_parallel_size=2"
        words += [f"+{entries}.{name}.key={source}", f"+{entries}.{name}.model_path=org/{name}", inference]
        words.append(f"+{entries}.{name}.num_replicas=2")
    mode = "distillation.distillation_loss.loss_mode=k1"
    words.append("distillation.distillation_loss.use_policy_gradient=true")
    tags = "algorithm.adv_estimator=grpo"
    imported = convert("verl", [SCRIPT], [*words, mode, tags])
    found = imported.exit_code, yaml.safe_load(imported.text)["teachers"]
    assert found[0] == 0, report(imported)
    assert {name: (each["pretrain"], each["tag_included"]) for name, each in found[1].items()} == {
        name: (f"org/{name}", [source]) for name, source in sources.items()
    }
    assert [each["device_mapping"] for each in found[1].values()] == ["list(range(4,8))", "list(range(8,12))"]
    assert yaml.safe_load(imported.text)["num_nodes"] == 3
    elsewhere = convert("verl", [SCRIPT], [*words, mode, "distillation.teacher_key=ability"])
    assert kinds(elsewhere, Kind.IMPOSSIBLE) == {"distillation.teacher_key"}


def test_megatron_of_verl_and_no_key_without_a_word(tmp_path):
    script = tmp_path / "run.sh"
    text = SCRIPT.read_text().replace("main_ppo \\", "main_ppo --config-name=ppo_megatron_trainer.yaml \\")
    script.write_text(text)
    words = [
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.megatron.dtype=float16",
        "actor_rollout_ref.rollout.multi_turn.max_turns=4",
    ]
    imported = convert("verl", [script], words)
    config = loaded(imported, tmp_path)
    assert config.actor_train.strategy_args.strategy_name == "megatron_train"
    assert config.actor_train.data_parallel_size == 2
    assert kinds(imported, Kind.IMPOSSIBLE) == {"actor_rollout_ref.actor.megatron.dtype"}
    told = {key for outcome in imported.outcomes for key in outcome.key.split(", ")}
    given = {word.partition("=")[0] for word in words} | {"data.truncation", "trainer.project_name", "trainer.nnodes"}
    assert told >= given and "actor_rollout_ref.rollout.multi_turn.max_turns" in kinds(imported, Kind.DROPPED)


TOOLS = """
tools:
  - class_name: verl.tools.sandbox_fusion_tools.SandboxFusionTool
    config: {type: native, sandbox_fusion_url: "http://box", default_timeout: 20}
    tool_schema: {type: function, function: {name: run_code, parameters: {properties: {code: {type: string}}}}}
  - class_name: my_package.find.FindTool
    config: {type: native, timeout: 7, top: 3}
    tool_schema: {type: function, function: {name: find, parameters: {properties: {words: {}, most: {}}}}}
  - class_name: verl.tools.search_tool.SearchTool
    config: {type: native, retrieval_service_url: "http://box/retrieve", topk: 3, timeout: 9, num_workers: 120}
    tool_schema: {type: function, function: {name: search, parameters: {properties: {query_list: {type: array}}}}}
  - class_name: verl.tools.mcp_search_tool.MCPSearchTool
    config: {type: mcp, timeout: 120}
    mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [search]}
"""
SERVERS = """
{"mcpServers": {"The Web": {"url": "http://web/mcp", "auth_token": "x"}, "sums": {"command": "uvx", "args": ["s"]}}}
"""


def test_tools_of_verl(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.yaml").write_text(TOOLS)
    (tmp_path / "servers.json").write_text(SERVERS)
    turns = "actor_rollout_ref.rollout.multi_turn"
    words = [
        f"{turns}.tool_config_path=tools.yaml",
        f"{turns}.enable=true",
        f"{turns}.max_assistant_turns=5",
        f"{turns}.max_parallel_calls=3",
        f"{turns}.format=hermes",
        "+actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
    ]
    imported = convert("verl", [SCRIPT], words)
    config = loaded(imported, tmp_path)
    assert isinstance(config, RLVRConfig) and config.tools is not None
    program, find = config.tools.use["run_code"], config.tools.use["find"]
    assert (program.tool, program.args, program.timeout) == ("python", {"wall_seconds": 20.0}, 30.0)
    assert (find.tool, find.args, find.timeout) == ("my_package.find:FindTool", {"top": 3}, 7.0)
    search, asked = config.tools.use["search"], {"url": "http://box/retrieve", "num_results": 3, "seconds": 9.0}
    assert (search.tool, search.args) == ("retrieval", asked)
    web, sums = config.tools.servers["The_Web"], config.tools.servers["sums"]
    assert (web.url, web.only, web.timeout, sums.command) == ("http://web/mcp", ["search"], 120.0, ["uvx", "s"])
    assert (config.tools.max_turns, config.tools.max_parallel_calls, config.tools.dialect) == (4, 3, "hermes")
    notes = {outcome.note for outcome in imported.outcomes if outcome.kind == Kind.TO_DO}
    assert any("FindTool a subclass" in note and "words, most" in note for note in notes)
    assert [outcome.got for outcome in imported.outcomes if outcome.kind == Kind.IMPOSSIBLE] == ["The Web"]


def test_tools_of_verl_that_cannot_be_read(tmp_path):
    key = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
    (tmp_path / "empty.yaml").write_text("a: 1\n")
    for path, words in (("nowhere.yaml", "is not there"), (str(tmp_path / "empty.yaml"), "no list of tools")):
        imported = convert("verl", [SCRIPT], [f"{key}={path}"])
        (told,) = [outcome for outcome in imported.outcomes if outcome.kind == Kind.IMPOSSIBLE]
        assert told.key == key and words in told.note
    alone = convert("verl", [SCRIPT], ["actor_rollout_ref.rollout.multi_turn.enable=true"])
    assert kinds(alone, Kind.IMPOSSIBLE) == {"actor_rollout_ref.rollout.multi_turn.enable"}


def test_a_critic_and_a_reward_function_of_verl(tmp_path):
    function = tmp_path / "score.py"
    function.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    )
    words = [
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.use_kl_loss=false",
        "critic.model.path=Qwen/other",
        "critic.optim.lr=3e-5",
        f"custom_reward_function.path={function}",
    ]
    config = loaded(convert("verl", [SCRIPT], words), tmp_path)
    assert isinstance(config, RLVRConfig)
    assert config.critic is not None and config.critic.training_args.learning_rate == 3e-5
    assert config.reward_pretrain == "Qwen/other"
    assert config.critic.global_train_batch_size == config.actor_train.global_train_batch_size
    assert config.whiten_advantages and config.reference is None
    assert config.rewards["custom"].verifiers[0].args["path"] == f"{function}:compute_score"
    assert config.actor_train.data_args.default_tag == "custom"


def test_a_reward_function_of_lists_and_a_package_of_verl(tmp_path):
    imported = convert(
        "verl",
        [SCRIPT],
        [
            "reward_model.reward_manager=batch",
            "reward_model.reward_kwargs={bonus: 2}",
            "custom_reward_function.path=mine.py",
            "custom_reward_function.name=score_all",
            "actor_rollout_ref.model.external_lib=json",
        ],
    )
    config = loaded(imported, tmp_path)
    assert isinstance(config, RLVRConfig)
    assert config.plugins == ["json"]
    [verifier] = config.rewards["custom"].verifiers
    assert verifier.args == {"path": "mine.py:score_all", "batch": True, "kwargs": {"bonus": 2}}
    other = convert("verl", [SCRIPT], ["reward_model.reward_manager=prime", "reward_model.reward_kwargs={bonus: 2}"])
    assert kinds(other, Kind.IMPOSSIBLE) == {"reward_model.reward_kwargs.bonus"}
    prime = loaded(other, tmp_path)
    assert isinstance(prime, RLVRConfig)
    assert {domain.timeout_score for domain in prime.rewards.values()} == {0.0}


def test_a_sandbox_service_of_verl_and_roll(tmp_path):
    url = "http://sandbox:8080/run_code"
    words = [
        "data.train_files=taco/train.parquet",
        "data.val_files=taco/test.parquet",
        f"reward_model.sandbox_fusion.url={url}",
        "reward_model.sandbox_fusion.max_concurrent=64",
    ]
    config = loaded(convert("verl", [SCRIPT], words), tmp_path)
    assert isinstance(config, RLVRConfig)
    [verifier] = config.rewards["code"].verifiers
    assert verifier.args == {"remote": {"url": url, "max_concurrency": 64}, "limits": {"memory_mb": 1024}}
    worker = "rewards.sums.worker_cls=roll.pipeline.rlvr.rewards.code_sandbox_reward_worker.CodeSandboxRewardWorker"
    words = [worker, f"rewards.sums.code_url={url}", "rewards.sums.use_local=false"]
    config = loaded(convert("roll", [FILES / "roll" / "run" / "rlvr.yaml"], words), tmp_path)
    assert isinstance(config, RLVRConfig)
    assert config.rewards["sums"].verifiers[0].args == {"tests_key": "test_cases", "remote": {"url": url}}


def test_a_penalty_of_short_answers_is_a_verifier_of_the_one_worker_that_has_it(tmp_path):
    worker, coefficient = "rewards.sums.worker_cls=roll.rewards.{}", "rewards.sums.response_length_penalty_coef=0.4"
    file, names = FILES / "roll" / "run" / "rlvr.yaml", {}
    for cls in ("CrossThinkQARuleRewardWorker", "MathRuleRewardWorker"):
        imported = convert("roll", [file], [worker.format(cls), coefficient])
        config = loaded(imported, tmp_path)
        assert isinstance(config, RLVRConfig)
        names[cls] = [(each.name, each.weight) for each in config.rewards["sums"].verifiers]
    assert names["CrossThinkQARuleRewardWorker"] == [("multiple_choice", 1.0), ("length", 0.4)]
    assert names["MathRuleRewardWorker"] == [("math", 1.0)]
    assert coefficient.partition("=")[0] in kinds(imported, Kind.DROPPED)


def test_a_reward_model_of_verl_and_an_older_spelling(tmp_path):
    words = [
        "reward_model.enable=true",
        f"reward_model.model.path={tmp_path}",
        "actor_rollout_ref.actor.use_token_level_loss=false",
        "custom_reward_function.overlong_buffer.enable=true",
        "custom_reward_function.overlong_buffer.len=128",
        "algorithm.filter_groups.enable=true",
    ]
    config = loaded(convert("verl", [SCRIPT], words), tmp_path)
    assert isinstance(config, RLVRConfig)
    assert config.rewards["reward_model"].verifiers[0].args == {"model_path": str(tmp_path)}
    assert config.rewards["reward_model"].query_filter_config.type == "std_filter"
    assert (config.loss_agg_mode, config.overlong_buffer.len) == ("seq-mean-token-sum", 128)
    words = ["reward.reward_model.enable=true", f"reward.reward_model.model_path={tmp_path}"]
    config = loaded(convert("verl", [SCRIPT], words), tmp_path)
    assert isinstance(config, RLVRConfig)
    assert config.rewards["reward_model"].verifiers[0].args == {"model_path": str(tmp_path)}
    for word in ("reward.reward_model.rollout.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=4"):
        words.append(word)
    config = loaded(convert("verl", [SCRIPT], words), tmp_path)
    assert isinstance(config, RLVRConfig)
    domain = config.rewards["reward_model"]
    assert domain.verifiers[0].args == {"model_path": str(tmp_path), "tensor_parallel_size": 2}
    assert domain.num_gpus_per_worker == 2 and domain.device_mapping == config.actor_train.device_mapping
    apart = convert("verl", [SCRIPT], [*words, "reward.reward_model.enable_resource_pool=true"])
    assert words[2].partition("=")[0] in kinds(apart, Kind.TO_DO)
    asking = convert("verl", [SCRIPT], [*words, "reward.custom_reward_function.path=score.py"])
    assert "reward.reward_model.model_path" in kinds(asking, Kind.IMPOSSIBLE)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"rs": "token", "rs_threshold": "1.5"}, [("token", 1 / 1.5, 1.5, False)]),
        ({"rs": "geometric", "rs_threshold": "2", "rs_threshold_lower": "0.9"}, [("geometric", 0.9, 2, False)]),
        (
            {"rs": "'token_k1,seq_mean_k1'", "rs_threshold": "'0.5_4.0,1.25'"},
            [("token", 0.25, 2, False), ("geometric", 0.8, 1.25, False)],
        ),
        ({"rs": "token_k2", "rs_threshold": "0.5"}, [("token", math.exp(-1), math.e, False)]),
        ({"rs": "seq_max_k3", "rs_threshold": "0.5"}, [("token", 0.3017096, 2.3576767, True)]),
        ({"token_veto_threshold": "1e-4"}, [("token", 1e-4, 1e9, True)]),
    ],
)
def test_rejections_of_verl_become_bounds_of_the_ratio(tmp_path, words, expected):
    given = [f"algorithm.rollout_correction.rollout_{key}={value}" for key, value in words.items()]
    imported = convert("verl", [SCRIPT], given)
    config = loaded(imported, tmp_path)
    assert isinstance(config, RLVRConfig) and imported.exit_code == 0, report(imported)
    found = config.train_infer_correction.filters
    assert [(f.agg_type, f.whole_rows) for f in found] == [(level, rows) for level, _, _, rows in expected]
    for f, (_, low, high, _) in zip(found, expected, strict=True):
        assert (f.ratio_low, f.ratio_high) == pytest.approx((low, high), rel=1e-5)
        if "k3" in words.get("rs", ""):
            assert [r - 1 - math.log(r) for r in (f.ratio_low, f.ratio_high)] == pytest.approx([0.5, 0.5])


def test_a_mean_of_k3_is_no_bound_of_a_ratio():
    words = ["rs=seq_mean_k3", "rs_threshold=0.01", "is=token", "is_threshold='0.5_5.0'"]
    imported = convert("verl", [SCRIPT], [f"algorithm.rollout_correction.rollout_{word}" for word in words])
    base = "algorithm.rollout_correction"
    assert {f"{base}.rollout_rs", f"{base}.rollout_is_threshold"} == kinds(imported, Kind.IMPOSSIBLE)


def test_numbers_that_the_environment_has(tmp_path, monkeypatch):
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.read_text().replace("${NODES:-1}", "$COUNTED"))
    imported = convert("verl", [script])
    assert kinds(imported, Kind.IMPOSSIBLE) == {"trainer.nnodes"} and imported.exit_code == 1
    monkeypatch.setenv("COUNTED", "2")
    assert loaded(convert("verl", [script]), tmp_path).num_nodes == 2


def test_chatlearn(tmp_path):
    imported = convert("chatlearn", [FILES / "chatlearn.yaml"])
    config = loaded(imported, tmp_path)
    assert isinstance(config, RLVRConfig)
    assert imported.exit_code == 0, report(imported)
    assert (config.rollout_batch_size, config.num_return_sequences_in_group) == (8, 8)
    assert config.actor_train.global_train_batch_size == 32
    assert (config.pg_clip_low, config.pg_clip_high, config.kl_penalty) == (0.2, 0.28, "k3")
    assert config.actor_train.use_sequence_packing and config.actor_train.max_tokens_per_microbatch_in_infer == 8192
    assert (config.track_with, config.tracker_kwargs) == ("wandb", {"project": "p", "name": "n"})
    assert config.val_sampling.top_k == 5 and not config.val_before_train


@pytest.mark.parametrize(
    ("system", "file", "words", "trusted"),
    [
        ("verl", SCRIPT, ["data.trust_remote_code=true"], {"actor_train", "actor_infer", "reference"}),
        ("verl", SCRIPT, ["actor_rollout_ref.model.trust_remote_code=false", "data.trust_remote_code=false"], set()),
        (
            "verl",
            SCRIPT,
            ["algorithm.adv_estimator=gae", "critic.model.path=other/model", "critic.model.trust_remote_code=true"],
            {"critic"},
        ),
        (
            "verl",
            SCRIPT,
            ["actor_rollout_ref.model.trust_remote_code=true", "algorithm.adv_estimator=gae"],
            {"actor_train", "actor_infer", "reference", "critic"},
        ),
        ("verl", SCRIPT, ["data.trust_remote_code=true", "actor_rollout_ref.actor.strategy=megatron"], set()),
        ("verl_sft", FILES / "run_verl_sft.sh", ["model.trust_remote_code=true"], {"actor_train"}),
        (
            "chatlearn",
            FILES / "chatlearn.yaml",
            ["models.policy.trust_remote_code=true", "runtime_args.train_backend=fsdp"],
            {"actor_train", "actor_infer", "reference"},
        ),
        ("mindspeed", FILES / "mindspeed.yaml", ["generate_config.trust_remote_code=true"], set()),
        (
            "roll",
            FILES / "roll" / "run" / "rlvr.yaml",
            [f"{role}.model_args.trust_remote_code=true" for role in ("actor_train", "actor_infer", "reference")],
            set(),  # its trainer is Megatron
        ),
    ],
)
def test_code_that_comes_with_a_model_runs_where_they_ask(system, file, words, trusted, tmp_path):
    imported = convert(system, [file], words)
    config = loaded(imported, tmp_path)
    assert {role for role in ROLES if config.trusts(role)} == trusted
    asked = {word.partition("=")[0] for word in words if "trust_remote_code=true" in word}
    told = {key for outcome in imported.outcomes for key in outcome.key.split(", ")}
    assert asked <= told


@pytest.mark.parametrize(
    ("words", "kept", "kind"),
    [
        ([], True, Kind.KEPT),
        (["+enable_old_logprobs_recompute=true"], True, Kind.KEPT),
        (["+ppo_epochs=2"], False, Kind.IMPOSSIBLE),
        (["+add_token_level_kl=true"], False, Kind.DROPPED),
        (["+train_infer_correction={is_weight: {enabled: true}}"], False, Kind.DROPPED),
    ],
)
def test_old_log_probabilities_of_roll(words, kept, kind, tmp_path):
    key = "force_disable_old_logprobs_recompute"
    imported = convert("roll", [FILES / "roll" / "run" / "rlvr.yaml"], [f"+{key}=true", *words])
    config = loaded(imported, tmp_path)
    assert isinstance(config, RLVRConfig)
    assert config.force_disable_old_logprobs_recompute is kept and not config.enable_old_logprobs_recompute
    assert key in kinds(imported, kind)


def test_replayed_experts_of_roll_and_verl():
    replay = "router_replay.mode"
    roll = [f"+{role}.router_replay={{mode: R3}}" for role in ("actor_train", "actor_infer")]
    written = yaml.safe_load(convert("roll", [FILES / "roll" / "run" / "rlvr.yaml"], roll).text)
    assert written["actor_train"]["router_replay"] == {"mode": "R3"} == written["actor_infer"]["router_replay"]
    actor, words = "actor_rollout_ref.actor", ["actor_rollout_ref.rollout.enable_rollout_routing_replay=true"]
    for theirs, ours in (("disabled", "disable"), ("R2", "R2"), ("R3", "R3")):
        imported = convert("verl", [SCRIPT], [*words, f"{actor}.{replay}={theirs}"])
        found = yaml.safe_load(imported.text)["actor_train"].get("router_replay", {"mode": "disable"})
        assert found == {"mode": ours}
    imported = convert("verl", [SCRIPT], [f"{actor}.router_replay.record_file=experts.pt"])
    assert f"{actor}.router_replay.record_file" in kinds(imported, Kind.IMPOSSIBLE)


def test_a_reward_model_of_verl_is_trusted_by_itself():
    words = ["reward_model.enable=true", "reward_model.model.path=a/b", "reward_model.model.trust_remote_code=true"]
    written = yaml.safe_load(convert("verl", [SCRIPT], words).text)
    (verifier,) = written["rewards"]["reward_model"]["verifiers"]
    assert verifier["args"] == {"model_path": "a/b", "trust_remote_code": True}
    assert "trust_remote_code" not in str(written["actor_train"])


@pytest.mark.parametrize(
    ("system", "file", "word"),
    [
        ("verl", SCRIPT, "actor_rollout_ref.rollout.multi_turn.enable=true"),
        ("verl", SCRIPT, "actor_rollout_ref.actor.policy_loss.loss_mode=nobodys"),
        ("verl", SCRIPT, "a_key.of_nobody=1"),
        ("roll", FILES / "roll" / "run" / "rlvr.yaml", "actor_train.mtp_training_mode=joint"),
        ("roll", FILES / "roll" / "run" / "agentic.yaml", "train_env_manager.tags=[Shop]"),
        ("chatlearn", FILES / "chatlearn.yaml", "models.policy_trainer.moe_router_force_load_balancing=true"),
        ("mindspeed", FILES / "mindspeed.yaml", "rl_config.multi_turn_enable=true"),
        ("mindspeed", FILES / "mindspeed.yaml", "rl_config.a_switch_of_nobody=true"),
        ("verl", SCRIPT, "actor_rollout_ref.actor.optim.a_rate_of_nobody=1"),
    ],
)
def test_what_changes_results_is_impossible(system, file, word):
    imported = convert(system, [file], [word])
    assert imported.exit_code == 1
    told = kinds(imported, Kind.IMPOSSIBLE) | kinds(imported, Kind.UNKNOWN)
    expected = "custom_envs.Shop.env_type" if "Shop" in word else word.partition("=")[0]
    assert told >= {expected}
    assert expected in report(imported)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    (tmp_path / "other.sh").write_text("python train.py a=1\n")
    (tmp_path / "number.yaml").write_text("5\n")
    (tmp_path / "including.yaml").write_text("defaults: [number]\n")
    for number, defaults in enumerate(("5", "[1]", "one")):
        (tmp_path / f"defaults{number}.yaml").write_text(f"defaults: {defaults}\n")
    for name, words in {
        "including.yaml": "including.yaml: Invalid loaded object type: int",
        "defaults0.yaml": "defaults: expected a list, not int",
        "defaults1.yaml": "Unsupported type in defaults",
        "defaults2.yaml": "defaults: expected a list, not str",
        "list.yaml": "expected a mapping",
        "broken.yaml": "no YAML",
        "other.sh": "no command that starts",
        "none.yaml": "no such file",
    }.items():
        with pytest.raises(UnreadableError, match=words):
            convert("verl", [tmp_path / name])


@pytest.mark.parametrize(
    ("system", "name", "word", "words"),
    [
        ("roll", "roll/run/rlvr.yaml", "adv_estimator=[x]", "TypeError: unhashable type: 'list', near adv_estimator"),
        ("roll", "roll/run/rlvr.yaml", "rewards.sums=[1]", "AttributeError: .* near rewards.sums"),
        (
            "mindspeed",
            "mindspeed.yaml",
            "rl_config.mini_batch_size={a: 1}",
            "TypeError: .* near rl_config.mini_batch_size",
        ),
    ],
)
def test_values_of_another_kind_than_a_key_has_are_refused(system, name, word, words):
    with pytest.raises(UnreadableError, match=f"{name}: a value has another type than .* takes: {words}"):
        convert(system, [FILES / name], [word])


def test_included_files_that_are_missing_are_told(tmp_path):
    file = tmp_path / "grpo.yaml"
    file.write_text(
        "defaults:\n  - ppo_trainer\n  - actor@actor_rollout_ref.actor: dp\n  - _self_\nalgorithm: {gamma: 0.9}\n"
    )
    imported = convert("verl", [file])
    missing = {note.partition(" was not")[0] for note in imported.notes if " was not found" in note}
    assert missing == {"ppo_trainer", "actor/dp"}
    assert yaml.safe_load(imported.text)["gamma"] == 0.9


def test_the_command_writes_and_reports(tmp_path, capsys):
    target = tmp_path / "mine.yaml"
    assert main(["import", "verl", str(SCRIPT), "trainer.total_training_steps=7", "-o", str(target)]) == 0
    assert yaml.safe_load(target.read_text())["max_steps"] == 7
    out = capsys.readouterr().out
    assert "the result is valid" in out and f"written to {target}" in out
    assert main(["import", "verl", str(tmp_path / "none.yaml")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main(["import", "verl", "a=1"]) == 2
    missing = str(tmp_path / "none" / "mine.yaml")
    assert main(["import", "verl", str(SCRIPT), "trainer.total_training_steps=7", "-o", missing]) == 2
    assert f"roll import verl: -o {missing}: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "system"),
    [(FILES / "chatlearn.yaml", "chatlearn"), (FILES / "mindspeed.yaml", "mindspeed"), (SCRIPT, "verl")],
)
def test_files_of_others_are_answered_with_the_command(file, system, capsys):
    assert main(["train", str(file)]) == 2
    err = capsys.readouterr().err
    assert f"roll import {system} {file} -o mine.yaml" in err and err.count("\n") == 1


def test_a_file_of_roll_is_told_what_is_wrong_and_the_command(capsys):
    assert main(["validate", str(FILES / "roll" / "run" / "rlvr.yaml")]) == 2
    err = capsys.readouterr().err
    assert "rewards.sums.model_args" in err and "roll import roll" in err


def test_a_model_of_roll_has_one_configuration_and_fsdp2_its_options(tmp_path):
    options = "actor_infer.strategy_args.strategy_config"
    words = ["actor_train.model_args.model_config_kwargs.rope_theta=5000.0", f"{options}.max_num_seqs=8"]
    words += ["actor_infer.strategy_args.strategy_name=vllm", "checkpoint_config.async_upload=false"]
    imported = convert("roll", [FILES / "roll" / "run" / "rlvr.yaml"], words)
    assert not {problem.path for problem in imported.problems}, imported.problems
    config = loaded(imported, tmp_path)
    assert config.actor_infer.model_args.model_config_kwargs == {"rope_theta": 5000.0}
    assert config.max_running_requests == 8
    options = "actor_train.strategy_args.strategy_config"
    words = ["actor_train.strategy_args.strategy_name=fsdp2_train", f"{options}={{fsdp_size: 1, reduce_dtype: bf16}}"]
    words += [f"{options}.offload_policy=false", "max_tokens_per_step=128"]
    imported = convert("roll", [FILES / "roll" / "run" / "agentic.yaml"], words)
    assert not {problem.path for problem in imported.problems}, imported.problems
    assert "max_tokens_per_step" not in kinds(imported, Kind.IMPOSSIBLE)
    assert loaded(imported, tmp_path).actor_train.strategy_args.strategy_config.get("reduce_dtype") is None


def test_devices_of_chatlearn_on_several_nodes(tmp_path):
    words = [f"models.{name}.num_gpu=16" for name in ("policy", "policy_trainer", "ref_policy")]
    config = loaded(convert("chatlearn", [FILES / "chatlearn.yaml"], words), tmp_path)
    assert isinstance(config, RLVRConfig) and config.num_nodes == 2
