"""MindSpeed RL's files: what becomes of stages, roles, tools and devices."""

from functools import partial
from pathlib import Path

import pytest

from roll.configs.offline import SFTConfig
from roll.configs.preference import DPOConfig, RewardTrainingConfig
from roll.configs.rlvr import RLVRConfig
from roll.extras.importers.recognise import system_of
from tests.unit.extras.importers.imported import DROPPED, GIVEN, IMPOSSIBLE, TO_DO, UNKNOWN, imported

RL, TRAIN, ACTOR, CRITIC = "rl_config", "megatron_training", "actor_config", "critic_config"
mindspeed = partial(imported, "mindspeed")
PPO = [f"{TRAIN}.stage=ray_ppo", f"{RL}.adv_estimator=gae"]
VALUES = [f"{CRITIC}.lr=5.0e-6", f"{CRITIC}.tensor_model_parallel_size=4", f"{CRITIC}.adam_beta2=0.9"]
APART = [f"{RL}.use_integrated_worker=false", f"{RL}.critic_resource.num_npus=4"]
INHERITED = [f"+{TRAIN}.adam_beta2=0.9", f"+{TRAIN}.lr=1.0e-7"]
INHERITED += [f"+{CRITIC}={{lr: 5.0e-6, tensor_model_parallel_size: 4}}"]
DROPOUT = f"{TRAIN}.hidden_dropout"

# What is said: words, keys of the result, kinds of their keys: all that are lost, and those that matter here.
CASES = {
    "a policy and its reference, model and devices": ([],
        {"use_kl_loss": True, "kl_loss_coef": 0.001, "add_token_level_kl": False, "optimizer_steps_per_epoch": 1,
         "actor_train.global_train_batch_size": 64, "loss_agg_mode": "token-mean", "pretrain": "./weights/hf",
         "actor_train.training_args.min_lr_ratio": pytest.approx(0.1), "rewards.math.verifiers.0.name": "math",
         "rewards.math.verifiers.0.weight": 1, "rewards.math.verifiers.1.name": "format",
         "rewards.math.verifiers.1.weight": 0.5},
        {f"{ACTOR}.load": TO_DO, f"{TRAIN}.data_path": TO_DO, DROPOUT: TO_DO}),
    "weights where no tokenizer is named": ([f"{TRAIN}.tokenizer_name_or_path=null"],
        {"pretrain": "./weights/megatron"}, {f"{ACTOR}.load": TO_DO}),
    "several nodes": ([f"{RL}.actor_resource.num_npus=16", f"{RL}.verifier_function=[acc_for_ppo]"],
        {"num_nodes": 2, "actor_train.num_devices": 16}, {}),
    "DAPO": ([f"{TRAIN}.stage=ray_dapo"], {"loss_agg_mode": "token-mean"}, {}),
    "a critic": ([*PPO, f"{RL}.cliprange_value=0.3", *VALUES],
        {"critic.training_args.learning_rate": 5e-6, "critic.training_args.adam_beta2": 0.9, "value_clip": 0.3,
         "whiten_advantages": True, "critic.strategy_args.strategy_config.tensor_model_parallel_size": 4,
         "critic.global_train_batch_size": 64}, {}),
    "a critic on devices of its own": ([*PPO, *VALUES, *APART],
        {"critic.device_mapping": [8, 9, 10, 11], "num_nodes": 2}, {}),
    "what a critic does not say is the training section's": ([*PPO, *INHERITED],
        {"critic.training_args.learning_rate": 5e-6, "critic.training_args.adam_beta2": 0.9,
         "critic.training_args.weight_decay": 0.01, "actor_train.training_args.adam_beta2": 0.9}, {}),
    # its driver waits for all stages before it updates the actor
    "stages may overlap within a step": ([f"{RL}.blocking=false"], {}, {f"{RL}.blocking": DROPPED}),
    "a stage without a pipeline": ([f"{TRAIN}.stage=prm"], {}, {f"{TRAIN}.stage": IMPOSSIBLE}),
    "a key that changes results": ([f"{RL}.a_switch_of_nobody=true"], {}, {f"{RL}.a_switch_of_nobody": UNKNOWN}),
    "dropout": (["+actor_config.hidden_dropout=0.2"], {}, {"actor_config.hidden_dropout": IMPOSSIBLE}),
    "tools that nothing lists": ([f"{RL}.multi_turn_enable=true"], {}, {f"{RL}.multi_turn_enable": IMPOSSIBLE}),
    "tools that cannot be read": ([f"{RL}.multi_turn_enable=true", f"{RL}.tool_config_path=/nowhere.yaml"], {},
        {f"{RL}.tool_config_path": IMPOSSIBLE}),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
def test_keys_that_are_read_together(what):
    words, expected, kinds = CASES[what]
    mindspeed(*words, lost=kinds).check(expected, kinds)


TOOLS = """
tools:
  - class_name: mindspeed_rl.tools.sandbox_fusion_tools.SandboxFusionTool
    config: {default_timeout: 20, default_language: python}
    tool_schema: {type: function, function: {name: code_interpreter, parameters: {type: object}}}
"""


def test_tools_of_episodes_with_several_turns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tools.yaml").write_text(TOOLS)
    given = ("multi_turn_enable=true", "tool_config_path=./tools.yaml", "max_tool_calls=3", "max_parallel_calls=2",
             "max_tool_response_length=100", "tool_response_truncate_side=left", "tool_parser_format=hermes",
             "max_total_response_length=3000")  # fmt: skip
    found = mindspeed(*(f"{RL}.{word}" for word in given), lost=set())
    tools = found["tools"]
    program = tools.use["code_interpreter"]
    assert (program.tool, program.args) == ("python", {"wall_seconds": 20.0})
    assert (tools.max_turns, tools.max_parallel_calls, tools.dialect) == (3, 2, "hermes")
    assert (tools.max_tool_response_tokens, tools.tool_response_truncate_side) == (100, "left")
    assert found["prompt_length", "response_length", "sequence_length"] == (512, 1024, 3512)


PREFERENCES = """
megatron_training:
  {stage: dpo, is_pairwise_dataset: true, dpo_loss_type: ipo, ref_model: ./weights, model: small, split: "90,10,0",
   tokenizer_name_or_path: Qwen/Qwen3-30B-A3B, data_path: ./pairs, load: ./weights, global_batch_size: 64,
   micro_batch_size: 2, train_iters: 1000, save_interval: 500, eval_iters: 5, lr: 5.0e-8, min-lr: 5.0e-9,
   lr_decay_style: cosine, weight_decay: 0.0, tensor_model_parallel_size: 2, pipeline_model_parallel_size: 8,
   seq_length: 4096, qk_layernorm: true}
"""
OTHER = PREFERENCES.replace("dpo_loss_type: ipo, ref_model: ./weights, ", "")


def test_preferences_stay_preferences():
    found = mindspeed(text=PREFERENCES, lost=set())
    expected = {
        "preference_loss": "ipo", "beta": 0.1, "precompute_reference": True, "max_steps": 1000, "save_steps": 500,
        "sequence_length": 4096, "actor_train.global_train_batch_size": 64, "actor_train.num_devices": 16,
        "actor_train.training_args.learning_rate": 5e-8, "actor_infer": None,
        "actor_train.training_args.min_lr_ratio": pytest.approx(0.1),
    }  # fmt: skip
    assert found.schema is DPOConfig and {key: found[key] for key in expected} == expected
    assert "rollout_batch_size" not in found.text
    left = {f"{TRAIN}.data_path", f"{TRAIN}.split", f"{TRAIN}.tensor_model_parallel_size"}
    assert {(key, TO_DO) for key in left} <= found.kinds
    assert mindspeed(f"{TRAIN}.ref_model=./other", text=PREFERENCES).lost == {f"{TRAIN}.ref_model"}


@pytest.mark.parametrize(
    ("section", "stage", "schema", "key", "value"),
    [("sft", "sft", SFTConfig, "loss_agg_mode", "token-mean"),
     ("reward", "orm", RewardTrainingConfig, "reward_loss", "bradley_terry")],
)  # fmt: skip
def test_other_stages_stay_what_they_are(tmp_path, section, stage, schema, key, value):
    text = OTHER.replace("megatron_training:", f"{section}:").replace("stage: dpo", f"stage: {stage}")
    text = text.replace("is_pairwise_dataset", "is_instruction_dataset") if stage == "sft" else text
    (tmp_path / "theirs.yaml").write_text(text)
    found = mindspeed(text=text, lost=set())
    assert found.schema is schema and system_of(tmp_path / "theirs.yaml") == "mindspeed"
    assert found["actor_train.global_train_batch_size", key] == (64, value)
    assert (("sft.split", TO_DO) in found.kinds) == (stage == "sft")


def test_packed_rows_and_warm_ups_of_supervised_training_are_told():
    text = (
        "sft: {stage: sft, data_path: ./pack, tokenizer_name_or_path: ./model, seq_length: 4096, train_iters: 5, "
        "global_batch_size: 8, micro_batch_size: 2, lr: 1.0e-5, lr_warmup_fraction: 0.01, reset_position_ids: %s}"
    )
    for packed in ("true", "false"):
        found = mindspeed(text=text % packed)
        assert (("sft.reset_position_ids", TO_DO) in found.kinds) == (packed == "true")
        assert "rate of 0" in found.notes["sft.lr_warmup_fraction"]


def test_dropout_experts_and_the_models_own_file():
    off = mindspeed("+actor_config.hidden_dropout=0", "+megatron_training.attention_dropout=0.0")
    assert not {(DROPOUT, TO_DO), ("actor_config.hidden_dropout", TO_DO)} & off.kinds
    sizes = "model:\n  qwen25_7b: {num_experts: 8, hidden_dropout: 0.1, attention_dropout: 0.0}\n"
    experts = GIVEN["mindspeed"].read_text() + sizes
    found = mindspeed(text=experts)
    assert {key for key, kind in found.kinds if kind == TO_DO and "dropout" in key} == {DROPOUT}
    coefficient = "moe_aux_loss_coeff"
    assert f"{coefficient}: 0.001" in found.text
    assert coefficient not in mindspeed(f"+actor_config.{coefficient}=0", text=experts).text + mindspeed().text


def test_scores_of_another_scale_are_reported():
    found = mindspeed(f"{RL}.verifier_function=[base_acc]", f"{RL}.verifier_weight=[1.0]")
    assert found.schema is RLVRConfig
    (note,) = (each.note for each in found.outcomes if each.ours == "rewards.math")
    assert "base_acc" in note and "<think>" in note
