"""MindSpeed RL's files: what becomes of stages, roles and devices."""

from pathlib import Path

import pytest

from roll.configs.compose import compose_config
from roll.configs.loader import load_composed
from roll.configs.offline import SFTConfig
from roll.configs.preference import DPOConfig, RewardTrainingConfig
from roll.configs.rlvr import RLVRConfig
from roll.extras.importers.convert import Imported, convert, report
from roll.extras.importers.draft import Kind
from roll.extras.importers.recognise import system_of
from roll.preflight.choices import CHECKS

FILE = Path(__file__).parent / "files" / "mindspeed.yaml"


def loaded(imported: Imported, tmp_path: Path) -> RLVRConfig:
    """The result as ``roll train`` would read it."""
    (tmp_path / "mine.yaml").write_text(imported.text)
    config = load_composed(imported.schema, "mine", compose_config("mine", tmp_path, ()))
    assert isinstance(config, RLVRConfig)
    return config


def kinds(imported: Imported, kind: Kind) -> set[str]:
    return {outcome.key for outcome in imported.outcomes if outcome.kind == kind}


def test_a_policy_and_its_reference_their_model_and_their_devices(tmp_path):
    imported = convert("mindspeed", [FILE])
    config = loaded(imported, tmp_path)
    assert imported.exit_code == 0, report(imported)
    assert (config.use_kl_loss, config.kl_loss_coef, config.add_token_level_kl) == (True, 0.001, False)
    assert config.actor_train.global_train_batch_size == 64 and config.optimizer_steps_per_epoch == 1
    assert config.actor_train.training_args.min_lr_ratio == pytest.approx(0.1)
    assert [(entry.name, entry.weight) for entry in config.rewards["math"].verifiers] == [("math", 1), ("format", 0.5)]
    assert config.pretrain == "./weights/hf"
    assert {"actor_config.load", "megatron_training.data_path"} <= kinds(imported, Kind.TO_DO)
    imported = convert("mindspeed", [FILE], ["megatron_training.tokenizer_name_or_path=null"])
    config = loaded(imported, tmp_path)
    told = [outcome for outcome in imported.outcomes if outcome.ours == "pretrain" and outcome.kind == Kind.TO_DO]
    assert imported.exit_code == 0 and config.pretrain == "./weights/megatron"
    assert [outcome.key for outcome in told] == ["actor_config.load"]
    words = ["rl_config.actor_resource.num_npus=16", "rl_config.verifier_function=[acc_for_ppo]"]
    imported = convert("mindspeed", [FILE], words)
    config = loaded(imported, tmp_path)
    assert (config.num_nodes, config.actor_train.num_devices) == (2, 16)
    assert "rl_config.verifier_function" not in kinds(imported, Kind.IMPOSSIBLE)


def test_a_critic(tmp_path):
    words = ["megatron_training.stage=ray_ppo", "rl_config.adv_estimator=gae", "rl_config.cliprange_value=0.3"]
    words += ["critic_config.lr=5.0e-6", "critic_config.tensor_model_parallel_size=4", "critic_config.adam_beta2=0.9"]
    imported = convert("mindspeed", [FILE], words)
    config = loaded(imported, tmp_path)
    assert config.critic is not None
    assert imported.exit_code == 0, report(imported)
    arguments = config.critic.training_args
    assert (arguments.learning_rate, arguments.adam_beta2) == (5e-6, 0.9)
    assert (config.value_clip, config.whiten_advantages) == (0.3, True)
    assert config.critic.strategy_args.strategy_config["tensor_model_parallel_size"] == 4
    assert config.critic.global_train_batch_size == config.actor_train.global_train_batch_size
    apart = [*words, "rl_config.use_integrated_worker=false", "rl_config.critic_resource.num_npus=4"]
    config = loaded(convert("mindspeed", [FILE], apart), tmp_path)
    assert config.critic is not None and config.critic.device_mapping == [8, 9, 10, 11] and config.num_nodes == 2


TOOLS = """
tools:
  - class_name: mindspeed_rl.tools.sandbox_fusion_tools.SandboxFusionTool
    config: {default_timeout: 20, default_language: python}
    tool_schema: {type: function, function: {name: code_interpreter, parameters: {type: object}}}
"""


def test_tools_of_episodes_with_several_turns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.yaml").write_text(TOOLS)
    words = ["rl_config.multi_turn_enable=true", "rl_config.tool_config_path=./tools.yaml"]
    words += ["rl_config.max_tool_calls=3", "rl_config.max_parallel_calls=2", "rl_config.max_tool_response_length=100"]
    words += ["rl_config.tool_response_truncate_side=left", "rl_config.tool_parser_format=hermes"]
    imported = convert("mindspeed", [FILE], [*words, "rl_config.max_total_response_length=3000"])
    config = loaded(imported, tmp_path)
    assert imported.exit_code == 0 and config.tools is not None, report(imported)
    program = config.tools.use["code_interpreter"]
    assert (program.tool, program.args) == ("python", {"wall_seconds": 20.0})
    assert (config.tools.max_turns, config.tools.max_parallel_calls, config.tools.dialect) == (3, 2, "hermes")
    assert (config.tools.max_tool_response_tokens, config.tools.tool_response_truncate_side) == (100, "left")
    assert (config.prompt_length, config.response_length, config.sequence_length) == (512, 1024, 3512)


def test_tools_that_cannot_be_read_are_told():
    switch, file = "rl_config.multi_turn_enable", "rl_config.tool_config_path"
    assert switch in kinds(convert("mindspeed", [FILE], [f"{switch}=true"]), Kind.IMPOSSIBLE)
    assert file in kinds(convert("mindspeed", [FILE], [f"{switch}=true", f"{file}=/nowhere.yaml"]), Kind.IMPOSSIBLE)


def test_stages_may_overlap_within_a_step_but_none_without_a_pipeline_becomes_grpo_in_silence():
    """Its driver waits for all of them before it updates the actor."""
    imported = convert("mindspeed", [FILE], ["rl_config.blocking=false"])
    assert imported.exit_code == 0
    assert {each.kind for each in imported.outcomes if each.key == "rl_config.blocking"} == {Kind.DROPPED}
    imported = convert("mindspeed", [FILE], ["megatron_training.stage=prm"])
    assert "megatron_training.stage" in kinds(imported, Kind.IMPOSSIBLE) and imported.exit_code == 1


DPO = """
megatron_training:
  stage: dpo
  is_pairwise_dataset: true
  dpo_loss_type: ipo
  model: small
  tokenizer_name_or_path: Qwen/Qwen3-30B-A3B
  data_path: ./pairs
  global_batch_size: 64
  micro_batch_size: 2
  train_iters: 1000
  save_interval: 500
  lr: 5.0e-8
  min-lr: 5.0e-9
  lr_decay_style: cosine
  weight_decay: 0.0
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 8
  seq_length: 4096
  qk_layernorm: true
  load: ./weights
  ref_model: ./weights
  split: 90,10,0
  eval_iters: 5
"""


def test_preferences_stay_preferences(tmp_path):
    (tmp_path / "dpo.yaml").write_text(DPO)
    imported = convert("mindspeed", [tmp_path / "dpo.yaml"], checks=CHECKS)
    assert imported.exit_code == 0, report(imported)
    (tmp_path / "mine.yaml").write_text(imported.text)
    config = load_composed(imported.schema, "mine", compose_config("mine", tmp_path, ()))
    assert isinstance(config, DPOConfig)
    assert (config.preference_loss, config.beta, config.precompute_reference) == ("ipo", 0.1, True)
    assert (config.max_steps, config.save_steps, config.sequence_length) == (1000, 500, 4096)
    assert (config.actor_train.global_train_batch_size, config.actor_train.num_devices) == (64, 16)
    arguments = config.actor_train.training_args
    assert arguments.learning_rate == 5e-8 and arguments.min_lr_ratio == pytest.approx(0.1)
    assert config.actor_infer is None and "rollout_batch_size" not in imported.text
    names = {"megatron_training.data_path", "megatron_training.split", "megatron_training.tensor_model_parallel_size"}
    assert names <= kinds(imported, Kind.TO_DO)
    other = convert("mindspeed", [tmp_path / "dpo.yaml"], ["megatron_training.ref_model=./other"], CHECKS)
    assert kinds(other, Kind.IMPOSSIBLE) == {"megatron_training.ref_model"}


@pytest.mark.parametrize(
    ("section", "stage", "schema", "keys"),
    [
        ("sft", "sft", SFTConfig, {"loss_agg_mode": "token-mean"}),
        ("reward", "orm", RewardTrainingConfig, {"reward_loss": "bradley_terry"}),
    ],
)
def test_other_stages_stay_what_they_are(tmp_path, section, stage, schema, keys):
    text = DPO.replace("megatron_training:", f"{section}:").replace("stage: dpo", f"stage: {stage}")
    text = "\n".join(line for line in text.splitlines() if "ref_model" not in line and "dpo_loss" not in line)
    if stage == "sft":
        text = text.replace("is_pairwise_dataset", "is_instruction_dataset")
    (tmp_path / "theirs.yaml").write_text(text)
    imported = convert("mindspeed", [tmp_path / "theirs.yaml"], checks=CHECKS)
    assert imported.exit_code == 0, report(imported)
    assert imported.schema is schema and system_of(tmp_path / "theirs.yaml") == "mindspeed"
    (tmp_path / "mine.yaml").write_text(imported.text)
    config = load_composed(schema, "mine", compose_config("mine", tmp_path, ()))
    assert config.actor_train.global_train_batch_size == 64
    assert {key: getattr(config, key) for key in keys} == keys
    assert ("sft.split" in kinds(imported, Kind.TO_DO)) == (stage == "sft")


def test_dropout_that_nobody_switched_off_is_reported():
    silent = convert("mindspeed", [FILE])
    assert "megatron_training.hidden_dropout" in kinds(silent, Kind.TO_DO)
    off = convert("mindspeed", [FILE], ["+actor_config.hidden_dropout=0", "+megatron_training.attention_dropout=0.0"])
    assert not {"megatron_training.hidden_dropout", "actor_config.hidden_dropout"} & kinds(off, Kind.TO_DO)
    on = convert("mindspeed", [FILE], ["+actor_config.hidden_dropout=0.2"])
    assert "actor_config.hidden_dropout" in kinds(on, Kind.IMPOSSIBLE)


def test_scores_of_another_scale_are_reported():
    imported = convert(
        "mindspeed", [FILE], ["rl_config.verifier_function=[base_acc]", "rl_config.verifier_weight=[1.0]"]
    )
    (note,) = (each.note for each in imported.outcomes if each.ours == "rewards.math")
    assert "base_acc" in note and "<think>" in note


def test_the_model_s_file_and_experts(tmp_path):
    text = FILE.read_text() + "model:\n  qwen25_7b: {num_experts: 8, hidden_dropout: 0.1, attention_dropout: 0.0}\n"
    (tmp_path / "experts.yaml").write_text(text)
    imported = convert("mindspeed", [tmp_path / "experts.yaml"])
    assert "moe_aux_loss_coeff: 0.001" in imported.text
    assert {"megatron_training.hidden_dropout"} == {key for key in kinds(imported, Kind.TO_DO) if "dropout" in key}
    off = convert("mindspeed", [tmp_path / "experts.yaml"], ["+actor_config.moe_aux_loss_coeff=0"])
    assert "moe_aux_loss_coeff" not in off.text
    assert "moe_aux_loss_coeff" not in convert("mindspeed", [FILE]).text


def test_what_a_critic_does_not_say_is_the_training_section_s(tmp_path):
    words = ["megatron_training.stage=ray_ppo", "+megatron_training.adam_beta2=0.9", "rl_config.adv_estimator=gae"]
    words += ["+critic_config={lr: 5.0e-6, tensor_model_parallel_size: 4}", "+megatron_training.lr=1.0e-7"]
    config = loaded(convert("mindspeed", [FILE], words), tmp_path)
    assert config.critic is not None
    arguments = config.critic.training_args
    assert (arguments.learning_rate, arguments.adam_beta2, arguments.weight_decay) == (5e-6, 0.9, 0.01)
    assert config.actor_train.training_args.adam_beta2 == 0.9


def test_packed_rows_of_supervised_training_are_told(tmp_path):
    text = (
        "sft: {stage: sft, data_path: ./pack, tokenizer_name_or_path: ./model, seq_length: 4096, train_iters: 5, "
        "global_batch_size: 8, micro_batch_size: 2, lr: 1.0e-5, lr_warmup_fraction: 0.01, reset_position_ids: %s}"
    )
    for packed in ("true", "false"):
        (tmp_path / "sft.yaml").write_text(text % packed)
        result = convert("mindspeed", [tmp_path / "sft.yaml"])
        assert ("sft.reset_position_ids" in kinds(result, Kind.TO_DO)) == (packed == "true")
        warm = next(outcome for outcome in result.outcomes if outcome.key == "sft.lr_warmup_fraction")
        assert "rate of 0" in warm.note
