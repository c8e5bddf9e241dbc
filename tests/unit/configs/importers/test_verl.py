"""verl's runs as other people's scripts spell them: what becomes of sizes, adapters and losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.configs.compose import compose_config
from roll.configs.importers.convert import Imported, convert
from roll.configs.importers.draft import Kind
from roll.configs.loader import load_composed
from roll.configs.rlvr import RLVRConfig

SCRIPT = Path(__file__).parent / "files" / "run_verl.sh"
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))


def imported(folder: Path, *words: str, old: str = "", new: str = "") -> tuple[Imported, RLVRConfig]:
    """The script of this folder with further words, and what ``roll train`` would read."""
    script = folder / "run.sh"
    script.write_text(SCRIPT.read_text().replace(old, new) if old else SCRIPT.read_text())
    result = convert("verl", [script], words)
    (folder / "mine.yaml").write_text(result.text)
    config = load_composed(RLVRConfig, "mine", compose_config("mine", folder, ()))
    assert isinstance(config, RLVRConfig)
    return result, config


def impossible(result: Imported) -> set[str]:
    return {outcome.key for outcome in result.outcomes if outcome.kind == Kind.IMPOSSIBLE}


@pytest.mark.parametrize("loss", ["gspo", "sapo"])
def test_losses_of_whole_answers_average_each_answer_whatever_is_said(loss: str, tmp_path: Path) -> None:
    _, config = imported(tmp_path, f"{ACTOR}.policy_loss.loss_mode={loss}", f"{ACTOR}.loss_agg_mode=token-mean")
    assert config.loss_agg_mode == "seq-mean-token-mean"


def test_an_adapter_of_megatron(tmp_path: Path) -> None:
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


def test_copies_of_a_prompt_are_its_group(tmp_path: Path) -> None:
    _, config = imported(tmp_path, f"{ROLLOUT}.n_agent=5", f"{ROLLOUT}.n=1", f"{ACTOR}.ppo_mini_batch_size=40")
    assert (config.num_return_sequences_in_group, config.actor_train.global_train_batch_size) == (5, 40)


def test_micro_batches_of_all_devices(tmp_path: Path) -> None:
    words = [f"{ACTOR}.use_dynamic_bsz=False", f"{ACTOR}.ppo_micro_batch_size=8"]
    words += [f"actor_rollout_ref.{part}.log_prob_micro_batch_size=16" for part in ("rollout", "ref")]
    _, config = imported(tmp_path, *words)
    assert config.actor_train.training_args.per_device_train_batch_size == 2
    assert (
        config.reference is not None and config.reference.infer_batch_size == config.actor_train.infer_batch_size == 4
    )


def test_a_budget_is_of_the_devices_that_share_a_sequence(tmp_path: Path) -> None:
    words = [f"{ACTOR}.megatron.{kind}_parallel_size=2" for kind in ("tensor_model", "context")]
    words += [f"{ACTOR}.ppo_max_token_len_per_gpu=4096"]
    _, config = imported(tmp_path, *words, old="main_ppo \\", new="main_ppo --config-name=ppo_megatron_trainer \\")
    assert config.actor_train.max_tokens_per_microbatch_in_train == 8192


@pytest.mark.parametrize("key", [f"{MODEL}.vla", f"{ROLLOUT}.use_tree_search", f"{ACTOR}.policy_loss.own_share"])
def test_keys_of_somebodys_own_verl_are_told(key: str, tmp_path: Path) -> None:
    result, _ = imported(tmp_path, f"{key}=1")
    assert impossible(result) == {key}


def test_values_that_only_a_shell_can_tell_are_told(tmp_path: Path) -> None:
    old, new = "trainer.nnodes=$NODES", "trainer.nnodes=$(nproc)"
    result, config = imported(tmp_path, old=old, new=new)
    assert impossible(result) == {"trainer.nnodes"} and result.exit_code == 1
    result, _ = imported(tmp_path, "trainer.nnodes=1", old=old, new=new)
    assert not impossible(result) and config.num_nodes == 1


def test_links_in_a_name_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB", "j7")
    _, config = imported(tmp_path, old='"a run"', new='"a run-$JOB"')
    assert config.exp_name == "a_run-j7"
