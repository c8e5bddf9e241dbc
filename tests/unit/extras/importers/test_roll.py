"""ROLL's files: what becomes of its pipelines, engines, teachers, rewards, environments and devices."""

import re
from collections.abc import Iterable
from typing import Any

import pytest

from roll.configs.agentic import AgenticConfig
from roll.configs.distill import DistillConfig
from roll.configs.offline import SFTConfig
from roll.configs.preference import DPOConfig
from roll.configs.rlvr import RLVRConfig
from roll.pipeline.programs import program_of
from tests.support.choice import one_in
from tests.unit.extras.importers.imported import DERIVED, DROPPED, FILES, IMPOSSIBLE, ROLL, TO_DO, UNKNOWN, imported

TRAIN, INFER = (f"{role}.strategy_args.strategy_config" for role in ("actor_train", "actor_infer"))
MODEL, DATA = "actor_train.model_args", "actor_train.data_args"
NAME = "strategy_args.strategy_name"


def roll(name: str, *words: str, lost: Iterable[str] | None = None) -> Any:
    return imported("roll", *words, file=ROLL[name], lost=lost)


# A pipeline: its configuration, the program that runs it, keys of the result, kinds of their keys.
RUNS = {
    "rlvr": (RLVRConfig, "rlvr", {
        "sequence_length": 768, "num_nodes": 3, "total_optimizer_steps": 20, "pg_variant": "topr",
        "topr_positive_weight": 0.5, "norm_mean_type": "group", "norm_std_type": None,
        f"{DATA}.domain_interleave_probs": {"sums": 0.5, "talk": 0.5}, f"{DATA}.response": "ground_truth",
        "validation.data_args.messages": "messages", "validation.data_args.response": "ground_truth",
        f"reference.{NAME}": "hf_infer", "rewards.sums.query_filter_config.type": "mean_filter",
        "rewards.sums.query_filter_config.low": 0.1, "rewards.sums.query_filter_config.high": 0.9,
        "rewards.talk.verifiers.0.name": "judge", "rewards.talk.verifiers.0.args.judge_model_name": "some/judge",
        "rewards.talk.verifiers.0.args.max_tokens": 100, "rewards.talk.device_mapping": [4, 5],
        "rewards.talk.verifiers.0.args.judge_model_type": "inference",
        "rewards.talk.verifiers.0.args.engine.strategy_args": {"strategy_name": "vllm"},
        # what it does not say has the default of ROLL
        "actor_infer.generating_args.temperature": 0.95, "actor_infer.generating_args.top_p": 0.99,
        "actor_infer.generating_args.top_k": 50,
    }, {
        "difficulty_low_threshold": DROPPED, "actor_infer.infer_batch_size": DROPPED,
        "rewards.sums.model_args": DROPPED, f"{TRAIN}.sequence_parallel": DROPPED,
        f"{INFER}.max_model_len": DROPPED,  # below sequence_length
    }),
    "distill": (DistillConfig, "distill", {
        "pretrain": "Qwen/Qwen2.5-0.5B", "teacher_pretrain": "Qwen/Qwen2.5-7B", "kd_objective": "skewed_reverse_kl",
        "skew_lambda": 0.2, "kd_temperature": 2, "logits_topk": 64, "distill_loss_weight": 0.5,  # ROLL's defaults
        f"{DATA}.prompt": "question_zh", f"{DATA}.response": "answer_zh", f"{DATA}.file_names": ["data/train.jsonl"],
        f"teacher.{NAME}": "megatron_infer", "max_grad_norm": pytest.approx(1e9, rel=1),  # it clips no gradients
    }, {"logits_transfer_backend": DROPPED}),
    "sft": (SFTConfig, "sft", {
        "num_train_epochs": 2, "sequence_length": 128, "val_batch_size": None, f"{DATA}.prompt": "question",
        f"{DATA}.response": "output", f"{DATA}.shuffle": False, f"{DATA}.template": "native",
        "validation.data_args.prompt": "question", f"actor_train.{NAME}": "megatron_train",
        "actor_train.training_args.gradient_accumulation_steps": 4,
    }, {}),
    "dpo": (DPOConfig, "dpo", {
        "preference_loss": "sigmoid", "beta": 0.2, "label_smoothing": 0.1, "preferences.chosen": "better",
        "preferences.rejected": "worse", "max_steps": 500, "num_train_epochs": None,
        f"reference.{NAME}": "megatron_infer",
    }, {"chosen_key": TO_DO}),  # nothing says where the question is
    "opd": (RLVRConfig, "rlvr", {
        "is_pure_opd": True, "opd_kl_coef": 0.5, "teacher_pretrain": "Qwen/Qwen2.5-7B",
        "actor_train.training_args.learning_rate": 2e-6, f"actor_infer.{NAME}": "vllm",
    }, {}),
    "agentic": (AgenticConfig, "agentic", {
        "custom_envs.Boxes.env_manager_cls": "traj", "custom_envs.Boxes.max_steps": 5,
        "custom_envs.Boxes.env_config.format_penalty": -0.2, "custom_envs.Shop": None,  # which no manager plays
        "adv_estimator": "reinforce", "reward_normalization.grouping": "state", "prompt_length": 1984,
        "response_length": 64, "sequence_length": 2048, "num_nodes": 2, "actor_infer.num_gpus_per_worker": 2,
        "val_batch_size": 32,  # whole groups of 4
        "actor_train.global_train_batch_size": 16,  # 24 does not divide the 32 episodes of a step
        f"{TRAIN}.zero_optimization.stage": 2, "train_infer_correction.is_weight.enabled": True,
        "tracker_kwargs": {"project": "p", "name": "boxes_a"},
    }, {"tracker_kwargs.api_key": TO_DO, "system_envs.USE_MODELSCOPE": TO_DO}),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_every_pipeline(name):
    schema, program, expected, kinds = RUNS[name]
    found = roll(name, lost=set())
    assert found.schema is schema and program_of(found.written) == program
    found.check(expected, kinds)
    assert "not-to-be-copied" not in found.text


REWARD, BOXES, WRAPPER = "rewards.sums", "custom_envs.Boxes", "custom_envs.Boxes.tool_wrapper"
WORKER = f"{REWARD}.worker_cls=roll.pipeline.rlvr.rewards"
RUNNER = "roll.pipeline.agentic.agent_runner.gem_runner.GEMRunner"
PROXIES = "env_manager_cls=roll.pipeline.agentic.env_manager.proxy_env_manager.ProxyEnvManager"
VALIDATION = ["~actor_train", "~reference", "~val_env_manager", "~async_generation_ratio", "max_steps=9"]
TOLD = ["opsd_mode=true", "is_pure_opd=false", "opsd_solution_key=worked"]
TOLD += ["opsd_teacher_template='{problem} is {solution}'"]
KL, NO_RECOMPUTE = ["use_kl_loss=true", "kl_loss_coef=0.01"], "force_disable_old_logprobs_recompute"
MEGATRON = ["actor_train.model_args.dtype=null", f"actor_train.{NAME}=megatron_train"]
MEGATRON += [f"{TRAIN}={{bf16: true, recompute_granularity: selective, save_only_model: true, max_grad_norm: 0.5}}"]
MEGATRON += [f"+{TRAIN}.recompute_modules='moe, mlp'", f"+{TRAIN}.additional_configs={{moe_permute_fusion: true}}"]
FSDP2 = "{fsdp_size: 2, param_dtype: bfloat16, reduce_dtype: float32, apply_expert_patch: false, "
FSDP2 += "wrap_policy: {transformer_layer_cls_to_wrap: [Qwen2DecoderLayer]}}"
BAND = ["+reward_norm=batch", "+reward_shift=true", "+reward_scale=true", "+use_reward_norm=true"]
BAND += ["norm_mean_type=null", "norm_std_type=null"]
JUDGE = "+reward={model_args: {model_name_or_path: a/judge}, strategy_args: {strategy_name: vllm}, "
JUDGE += "device_mapping: 'list(range(8,10))'}"
LORA = [f"+{MODEL}.lora_target=all-linear", "+actor_infer.model_args.lora_target='q_proj,v_proj'"]
WRAPPED = "{wrapper_args: {tool_reward: 0.1, max_tool_uses: 2}, tool_configs: [{tool_id: python_code, tool_args: "
WRAPPED += "{timeout: 3}}, {tool_id: mcp, tool_args: {server_url: 'http://a/mcp'}}, "
WRAPPED += "{tool_id: search, tool_args: {topk: 3}}]}"
QUESTIONS = "{env_type: roll_math, max_steps: 4, env_manager_cls: null, agent_template: '{observation}', env_config: "
QUESTIONS += "{dataset_name: some/questions, split: train, question_key: problem, answer_key: null}, tool_wrapper: "
QUESTIONS += "{tool_configs: [{tool_id: search, tool_args: {search_url: 'http://a/retrieve', topk: 2}}]}}"
TAGS = ["train_env_manager.tags=[Boxes,Shop]", "custom_env.Shop.env_type=sokoban", "train_env_manager.n_groups=null"]
for _tag, _seconds in (("Boxes", 9), ("Shop", 4)):
    _tool = f"{{tool_id: python_code, tool_args: {{timeout: {_seconds}}}}}"
    TAGS.append(f"+custom_envs.{_tag}.tool_wrapper={{tool_configs: [{_tool}]}}")
SANDBOX = "http://sandbox:8080/run_code"
ENGINE_TYPE = f"+{INFER}.dtype"

# What is said: the run, words, keys of the result, kinds of their keys: all that are lost, and those that matter here.
CASES = {
    "options of Megatron": ("rlvr", [*MEGATRON, "reference.model_args.dtype=fp32",
        "reference.strategy_args={strategy_name: megatron_infer, strategy_config: {bf16: true}}"],
        {f"{MODEL}.dtype": "bf16", "max_grad_norm": 0.5, "checkpoint_config.save_contents": ["model"],
         f"{TRAIN}.recompute_modules": ["moe", "mlp"], f"{TRAIN}.moe_permute_fusion": True},
        {"reference.strategy_args.strategy_config.bf16": IMPOSSIBLE}),
    "options of FSDP2 by their longer names": ("rlvr", [f"actor_train.{NAME}=fsdp2_train", f"{TRAIN}={FSDP2}"],
        {TRAIN: {"fsdp_size": 2, "param_dtype": "bf16", "reduce_dtype": "fp32"}},
        {f"{TRAIN}.tensor_model_parallel_size": IMPOSSIBLE}),
    "options that FSDP2 has as defaults": ("agentic", [f"actor_train.{NAME}=fsdp2_train",
        f"{TRAIN}={{fsdp_size: 1, reduce_dtype: bf16}}", f"{TRAIN}.offload_policy=false", "max_tokens_per_step=128"],
        {f"{TRAIN}.reduce_dtype": None}, {}),
    "one configuration of a model": ("rlvr", [f"{MODEL}.model_config_kwargs.rope_theta=5000.0",
        f"{INFER}.max_num_seqs=8", f"actor_infer.{NAME}=vllm", "checkpoint_config.async_upload=false"],
        {"actor_infer.model_args.model_config_kwargs": {"rope_theta": 5000.0}, "max_running_requests": 8}, {}),
    "another data type in a preset": ("agentic", [f"{TRAIN}={{fp16: {{enabled: true}}}}"], {},
        {f"{TRAIN}.fp16": IMPOSSIBLE}),
    "the data type of the engine again": ("rlvr", [f"{ENGINE_TYPE}=bfloat16"],
        {"actor_infer.model_args.dtype": "bf16"}, {f"{INFER}.dtype": DROPPED}),
    "the data type of the model": ("rlvr", [f"{ENGINE_TYPE}=auto"], {"actor_infer.model_args.dtype": "bf16"},
        {f"{INFER}.dtype": DROPPED}),
    "the data type of the engine alone": ("rlvr", [f"{ENGINE_TYPE}=float16", "actor_infer.model_args.dtype=null"],
        {"actor_infer.model_args.dtype": "fp16"}, {f"{INFER}.dtype": DERIVED}),
    "two data types": ("rlvr", [f"{ENGINE_TYPE}=float32"], {"actor_infer.model_args.dtype": "bf16"},
        {f"{INFER}.dtype": IMPOSSIBLE}),
    "the generator has the adapter that is trained": ("agentic", LORA,
        {f"{MODEL}.lora_target": "all-linear", "actor_infer.model_args.lora_target": None}, {}),
    "an option that no engine has": ("agentic", [f"+{INFER}.online_quantization=mx8",
        f"{BOXES}={{env_type: sokoban, max_steps: 2, env_config: {{grid_colours: 3}}}}"], {},
        {f"{BOXES}.env_config.grid_colours": IMPOSSIBLE, f"{INFER}.online_quantization": UNKNOWN}),
    "a checkpoint of another machine": ("rlvr", ["resume_from_checkpoint=/nowhere/checkpoint-50"], {},
        {"resume_from_checkpoint": TO_DO}),
    "ROLL's own rollout loop": ("rlvr", ["+user_defined_rollout_loop_cls=roll.distributed.scheduler."
        "user_defined_rollout_loop.UserDefinedRolloutLoop"], {}, {"user_defined_rollout_loop_cls": DROPPED}),
    "a rollout loop of one's own": ("rlvr", ["+user_defined_rollout_loop_cls=mine.Loop"], {},
        {"user_defined_rollout_loop_cls": IMPOSSIBLE}),
    "a tracker that is not here": ("rlvr", ["track_with=ml_tracker", "tracker_kwargs={project: p}"],
        {"track_with": "stdout", "tracker_kwargs": {}}, {"track_with": TO_DO}),
    "a recording": ("sft", ["profiler_timeline=true"], {"profiler.steps": [2], "profiler.stacks": True}, {}),
    # losses and rewards
    "old log-probs are not computed again": ("rlvr", [f"+{NO_RECOMPUTE}=true", "+enable_old_logprobs_recompute=true"],
        {NO_RECOMPUTE: True, "enable_old_logprobs_recompute": False}, {}),
    "old log-probs of several epochs": ("rlvr", [f"+{NO_RECOMPUTE}=true", "+ppo_epochs=2"], {NO_RECOMPUTE: False},
        {NO_RECOMPUTE: IMPOSSIBLE}),
    "old log-probs for a KL penalty": ("rlvr", [f"+{NO_RECOMPUTE}=true", "+add_token_level_kl=true"],
        {NO_RECOMPUTE: False}, {NO_RECOMPUTE: DROPPED}),
    "old log-probs for weights": ("rlvr", [f"+{NO_RECOMPUTE}=true",
        "+train_infer_correction={is_weight: {enabled: true}}"], {NO_RECOMPUTE: False}, {NO_RECOMPUTE: DROPPED}),
    "the dual clip follows the range": ("rlvr", ["dual_clip_loss=true", "pg_clip=0.28", "actor_train.pg_variant=ppo",
        "use_topr_loss=false"], {"dual_clip_loss": True, "dual_clip_c": 1.56}, {}),
    "a KL loss is k3": ("rlvr", [*KL, "add_token_level_kl=false"], {"kl_penalty": "k3"}, {}),
    "two KL terms": ("rlvr", [*KL, "add_token_level_kl=true", "kl_penalty=mse"],
        {"kl_penalty": "mse", "kl_loss_penalty": "k3"}, {}),
    "two KL terms, one by default": ("rlvr", [*KL, "add_token_level_kl=true"],
        {"kl_penalty": "kl", "kl_loss_penalty": "k3"}, {}),
    "no bound of gradients": ("rlvr", ["max_grad_norm=0"], {"max_grad_norm": pytest.approx(1e9, rel=1)}, {}),
    "a bound of a distillation": ("distill", ["max_grad_norm=0.5"], {"max_grad_norm": 0.5}, {}),
    "normalisations that nothing reads": ("rlvr", BAND,
        {"reward_norm": "batch", "reward_shift": True, "reward_scale": False},
        {"reward_scale": DROPPED, "use_reward_norm": DROPPED}),
    "a sandbox service": ("rlvr", [f"{WORKER}.code_sandbox_reward_worker.CodeSandboxRewardWorker",
        f"{REWARD}.code_url={SANDBOX}", f"{REWARD}.use_local=false"],
        {f"{REWARD}.verifiers.0.args": {"tests_key": "test_cases", "remote": {"url": SANDBOX}}}, {}),
    "a penalty of short answers": ("rlvr", [f"{WORKER}.CrossThinkQARuleRewardWorker",
        f"{REWARD}.response_length_penalty_coef=0.4"],
        {f"{REWARD}.verifiers.0.name": "multiple_choice", f"{REWARD}.verifiers.1.name": "length",
         f"{REWARD}.verifiers.1.weight": 0.4}, {}),
    "a letter and a box": ("rlvr", [f"{WORKER}.CrossThinkQARuleRewardWorker", f"{REWARD}.reward_type=soft"],
        {f"{REWARD}.verifiers.0.weight": 1.5, f"{REWARD}.verifiers.1.name": "format",
         f"{REWARD}.verifiers.1.weight": 0.5}, {f"{REWARD}.reward_type": DERIVED}),
    "a letter in a box": ("rlvr", [f"{WORKER}.CrossThinkQARuleRewardWorker", f"{REWARD}.reward_type=strict"],
        {f"{REWARD}.verifiers.0.weight": 2.0, f"{REWARD}.verifiers.0.args.answer_pattern": r"\\boxed\{([^}]+)\}"}, {}),
    "a reward type that a worker does not read": ("rlvr", [f"{WORKER}.MathRuleRewardWorker",
        f"{REWARD}.reward_type=soft"], {f"{REWARD}.verifiers.0.name": "math"}, {f"{REWARD}.reward_type": DROPPED}),
    "a penalty that a worker does not read": ("rlvr", [f"{WORKER}.MathRuleRewardWorker",
        f"{REWARD}.response_length_penalty_coef=0.4"], {f"{REWARD}.verifiers.0.name": "math"},
        {f"{REWARD}.response_length_penalty_coef": DROPPED}),
    # teachers
    "a teacher at another temperature": ("distill", ["teacher_temperature=1", "distill_on_prompt=true"],
        {"distill_on_prompt": True}, {"teacher_temperature": IMPOSSIBLE}),
    "steps of supervised training": ("sft", ["+max_steps=7"], {"max_steps": 7, "num_train_epochs": None},
        {"actor_train.training_args.num_train_epochs": DROPPED}),
    "epochs without Megatron": ("sft", ["+max_steps=7", "sft_train.strategy_args.strategy_name=fsdp2_train",
        "sft_train.strategy_args.strategy_config=null"], {"num_train_epochs": 2}, {"max_steps": DROPPED}),
    "columns of samples": ("sft", ["system_key=system", "query_key=input"],
        {f"{DATA}.system": "system", f"{DATA}.query": "input"}, {}),
    "IPO": ("dpo", ["ipo=true", "~reference", f"{DATA}.prompt=question"],
        {"preference_loss": "ipo", "label_smoothing": 0.0, "precompute_reference": True}, {}),
    "no teacher": ("opd", ["is_pure_opd=false"], {"teacher": None}, {}),
    "a student's name": ("opd", ["+student_pretrain=Qwen/Qwen2.5-0.5B", "+is_pure_opd=true"], {"is_pure_opd": True},
        {}),
    "a script sets it": ("opd", ["~is_pure_opd", "+pure_opd_pipeline_type=rlvr_vlm", "+checkpoint_config.type=mos"],
        {"is_pure_opd": True, "checkpoint_config.type": "file_system"}, {"checkpoint_config.type": TO_DO}),
    "a teacher that is told the solution": ("opd", [*TOLD, "sequence_length=1024"],
        {"teacher_prompt": "{prompt} is {worked}", "is_pure_opd": True}, {}),
    "such a teacher beside rewards": ("opd", ["opsd_mode=true", "is_pure_opd=false", "use_opd=true"],
        {"is_pure_opd": False}, {"opsd_teacher_template": TO_DO}),
    "such a teacher with bounds": ("opd", [*TOLD, "opsd_max_solution_length=64", "opd_token_kld_clip=0.5"],
        {"teacher_column_length": 64, "opd_token_kld_clip": 0.5}, {}),
    # environments
    "environments of GEM": ("agentic", [f"{BOXES}={{env_type: 'rg:letter_counting', max_steps: 1, "
        "env_config: {size: 9, seed: 2}}"],
        {f"{BOXES}.env_type": "gem", f"{BOXES}.env_config.env_id": "rg:letter_counting",
         f"{BOXES}.env_config.env_kwargs": {"size": 9, "seed": 2}}, {}),
    "tools of one environment": ("agentic", [f"+{WRAPPER}={WRAPPED}"],
        {"tools.use.python.tool": "python", "tools.use.python.args": {"wall_seconds": 3.0},
         "tools.use.python.tags": ["Boxes"], "tools.servers.mcp.url": "http://a/mcp",
         "tools.servers.mcp.tags": ["Boxes"], "tools.max_turns": 2},
        dict.fromkeys((f"{WRAPPER}.tool_configs", f"{WRAPPER}.wrapper_args.tool_reward"), IMPOSSIBLE)),
    "a tool of several has the most time": ("agentic", TAGS,
        {"tools.use.python.tags": ["Boxes", "Shop"], "tools.use.python.args": {"wall_seconds": 9.0}},
        {"custom_envs.Shop.env_config.observation_mode": IMPOSSIBLE}),
    "questions of a dataset are one turn": ("agentic", [f"{BOXES}={QUESTIONS}"],
        {f"{BOXES}.env_type": "single_turn", "tools.use.search.tool": "retrieval",
         f"{BOXES}.env_config.dataset": {"file_name": "some/questions", "prompt": "problem", "answer": "answer"},
         f"{BOXES}.env_config.scorer": "math",
         "tools.use.search.args": {"url": "http://a/retrieve", "num_results": 2}},
        {f"{BOXES}.env_config.dataset_name": TO_DO}),
    "a game that tells itself": ("agentic", ["custom_env.Boxes.env_type=sokoban_native_env",
        "custom_env.Boxes.agent_template=placeholder"],
        {f"{BOXES}.env_type": "sokoban", f"{BOXES}.agent_template": None}, {"agent_template": UNKNOWN}),
    "a file that trains nothing": ("agentic", VALIDATION,
        {"eval_only": True, "val_batch_size": 32, "val_env_manager.env_groups": 8, "val_env_manager.tags": ["Boxes"]},
        {"max_steps": DROPPED}),
    "a runner that plays turns": ("agentic", [PROXIES, f"+custom_env.Boxes.agent_runner_cls={RUNNER}"],
        {f"{BOXES}.env_manager_cls": "traj"}, {}),
    "a runner of one's own": ("agentic", [PROXIES, "+custom_env.Boxes.agent_runner_cls=mine.Runner"], {},
        {f"{BOXES}.agent_runner_cls": IMPOSSIBLE}),
}  # fmt: skip


@pytest.mark.parametrize("what", one_in(4, CASES))
def test_keys_that_are_read_together(what):
    name, words, expected, kinds = CASES[what]
    roll(name, *words, lost=kinds).check(expected, kinds)


def test_what_is_read_in_one_pipeline_alone_is_written_nowhere_else():
    clip = ("dual_clip_loss=true", "actor_train.pg_variant=cispo")
    assert "dual_clip_c" not in roll("rlvr", "dual_clip_loss=false").text + roll("rlvr", *clip).text
    assert "student_train is read as actor_train" in roll("opd").remarks
    told = roll("opd", "opsd_mode=true", "is_pure_opd=false", "use_opd=true")["teacher_prompt"]
    assert "{prompt}" in told and "{reference_solution}" in told


TWO_TENSOR = "{strategy_name: megatron_infer, strategy_config: {tensor_model_parallel_size: 2}}"
OF_A_TAG = f"model_args: {{model_name_or_path: %s, dtype: bf16}}, strategy_args: {TWO_TENSOR}, device_mapping: [0, 1]"


def test_several_teachers():
    def taught(of_maths: str) -> Any:
        maths = f"{{{of_maths}, {OF_A_TAG % 'Qwen/Qwen2.5-7B'}}}"
        code = f"{{tag_included: [code], opd_kl_coef: 0.5, {OF_A_TAG % 'Qwen/Qwen2.5-Coder-7B'}}}"
        keys = ("opd_kl_coef", "tag_included", "model_args", "strategy_args", "device_mapping")
        teachers = (*(f"~teacher.{key}" for key in keys), f"teacher={{m: {maths}, c: {code}}}")
        return roll("opd", *teachers, "rewards.sums.tag_included=[sums,code]", lost=set())

    found = taught("tag_included: [sums], opd_kl_coef: 0.5")
    assert found["teacher", "teacher_coefficients"] == (None, [0.5, 0.5])
    told = {name: (each.pretrain, each.tag_included) for name, each in found.config.teachers.items()}
    assert told == {"m": ("Qwen/Qwen2.5-7B", ["sums"]), "c": ("Qwen/Qwen2.5-Coder-7B", ["code"])}
    assert found[f"teachers.c.{NAME}", "teachers.c.model_args.dtype"] == ("megatron_infer", "bf16")
    assert found["teachers.c.strategy_args.strategy_config.tensor_model_parallel_size"] == 2
    config = taught("tag_included: [], opd_kl_coef: 0.3").config
    assert dict(zip(config.tags, config.teacher_coefficients, strict=True)) == {"sums": 0.3, "code": 0.8}


def test_a_single_teacher_judges_every_tag_of_a_students_own_samples():
    rewards = "++rewards={one: {worker_cls: a.MathRuleRewardWorker, tag_included: [gsm8k, sums]}}"
    assert roll("opd", rewards, "+teacher.tag_included=[gsm8k, sums]").kinds >= {("teacher.tag_included", DROPPED)}
    found = roll("opd", rewards, "+teacher.tag_included=[sums]")
    assert found.lost == {"teacher.tag_included"} and "gsm8k" in found.notes["teacher.tag_included"]


def test_a_preset_may_leave_the_data_type_to_the_model(tmp_path):
    for folder, name in (("run", "agentic.yaml"), ("config", "traj_envs.yaml")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text((FILES / "roll" / folder / name).read_text())
    auto = "{fp16: {enabled: auto, loss_scale: 0}, bf16: {enabled: auto}, zero_optimization: {stage: 2}}"
    (tmp_path / "config" / "deepspeed_zero2.yaml").write_text(f"deepspeed_zero2: {auto}\n")
    assert (f"{TRAIN}.fp16", DROPPED) in imported("roll", file=tmp_path / "run" / "agentic.yaml", lost=set()).kinds


@pytest.mark.parametrize(("name", "role"), [("dpo", "actor_train"), ("sft", "sft_train"), ("distill", "student")])
def test_nodes_follow_from_the_devices_of_training_on_given_samples(name, role):
    found = roll(name, "num_gpus_per_node=2", f"{role}.device_mapping='list(range(0,4))'")
    assert found.written["num_nodes"] >= 2 and not any(each.path == "num_nodes" for each in found.result.problems)


def test_devices_of_the_model_that_is_asked_count():
    assert roll("agentic", JUDGE, "num_gpus_per_node=8")["judge.device_mapping", "num_nodes"] == ([8, 9], 2)


def test_a_reward_worker_without_a_counterpart_trains_on_no_other_reward():
    found = roll("rlvr", f"{REWARD}.worker_cls=mine.rewards.PoemRewardWorker")
    verifiers = found.written["rewards"]["sums"]["verifiers"]
    own = {"name": "custom", "args": {"path": "poem_reward_worker.py:score"}}
    assert [each for each in verifiers if each["name"] != "format"] == [own]
    assert found.result.problems and (f"{REWARD}.worker_cls", IMPOSSIBLE) in found.kinds


def test_an_environment_that_is_not_here_is_told_with_the_nearest():
    found = roll("agentic", "custom_env.Boxes.env_type=webshop")
    assert found.lost == {f"{BOXES}.env_type"} and "the nearest here is shop" in found.notes[f"{BOXES}.env_type"]


@pytest.mark.parametrize(("word", "told"), [("steps=20", True), ("ratio=0.1", True), ("steps=0", False)])
def test_a_warm_up_begins_otherwise_and_this_is_told(word, told):
    base = "actor_train.training_args.warmup_"
    found = roll("rlvr", f"+{base}steps=0", f"+{base}ratio=0", f"+{base}{word}")
    assert bool(re.search("rate k / W", found.remarks)) == told


def test_replayed_experts():
    written = roll("rlvr", *(f"+{role}.router_replay={{mode: R3}}" for role in ("actor_train", "actor_infer"))).written
    assert written["actor_train"]["router_replay"] == {"mode": "R3"} == written["actor_infer"]["router_replay"]
