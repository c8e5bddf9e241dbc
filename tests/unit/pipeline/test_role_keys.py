"""Keys in a file of YAML that a role's engine, a session and its evaluations are told of."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roll.algorithms.losses import policy_needs
from roll.algorithms.quantities import BASIC, KlToReference, hidden_states, logprobs
from roll.configs.loader import load_config
from roll.configs.rlvr import RLVRConfig
from roll.data.templates import ChatTemplate
from roll.distributed.strategy.base import StrategyContext
from roll.models.lora import LoraSpec
from roll.pipeline.roles import Roles, _lora, updates_after_offload
from roll.pipeline.rollouts import keep_episodes
from roll.pipeline.session import RunSession
from tests.unit.pipeline.rlvr.test_metrics import answer, group

BASE = """
pretrain: org/model
adv_estimator: grpo
track_with: []
rewards: {maths: {tag_included: [a], verifiers: [{name: gsm8k}]}}
actor_train: {training_args: {learning_rate: 1e-3}, data_args: {file_name: a.jsonl, prompt: q}}
actor_infer: {strategy_args: {strategy_name: hf_infer}}
reference: {}
use_kl_loss: true
kl_loss_coef: 0.1
"""
MODEL, DATA = "actor_train.model_args", "actor_train.data_args"


def loaded(folder: Path, *words: str) -> RLVRConfig:
    (folder / "run.yaml").write_text(BASE)
    return load_config(RLVRConfig, "run", folder, words)


def context(config: RLVRConfig, role: str) -> StrategyContext:
    roles = Roles.__new__(Roles)
    roles.config, roles.needs = config, policy_needs(config)
    return roles._own_context(role, "policy")


@pytest.mark.parametrize(
    ("role", "words", "name", "value"),
    [
        ("actor_train", "checkpoint_config.save_contents=[model]", "saves", {"model"}),
        ("actor_train", "checkpoint_config.load_contents=[model,rng]", "loads", {"model", "rng"}),
        ("actor_train", "tokenizer_path=own", "tokenizer_path", "own"),
        ("actor_infer", "tokenizer_path=own", "tokenizer_path", "own"),
        ("reference", "reference_pretrain=org/other", "model_path", "org/other"),
        ("actor_train", "kl_penalty=full", "needs", (*BASIC, KlToReference())),
        ("reference", "kl_penalty=full", "needs", (logprobs, hidden_states)),
        ("actor_infer", f"{DATA}.chat_template_kwargs={{a: 1}}", "template", ChatTemplate("native", {"a": 1})),
    ],
)
def test_an_engine_is_told_what_is_asked_for(role, words, name, value, tmp_path):
    before, after = context(loaded(tmp_path), role), context(loaded(tmp_path, words), role)
    assert getattr(before, name) != value and getattr(after, name) == value


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["lora_rank=2"], "rank", 2),
        (["lora_alpha=5"], "alpha", 5),
        (["lora_exclude=q_proj"], "excluded", ("q_proj",)),
        (["adapter_name_or_path=/made/before"], "start", "/made/before"),
    ],
)
def test_an_adapter_is_the_one_that_is_asked_for(words, name, value, tmp_path):
    whole = [f"{MODEL}.lora_target=all-linear", f"{MODEL}.lora_rank=4", "~reference"]
    plain = _lora(loaded(tmp_path, *whole).actor_train.model_args)
    asked = _lora(loaded(tmp_path, *whole, *(f"{MODEL}.{each}" for each in words)).actor_train.model_args)
    assert isinstance(plain, LoraSpec) and getattr(plain, name) != value and getattr(asked, name) == value
    assert _lora(loaded(tmp_path).actor_train.model_args) is None


def test_a_session_runs_the_hook_where_checkpoints_are_to_go(tmp_path):
    folders = [f"output_dir={tmp_path}/out", f"checkpoint_config.output_dir={tmp_path}/kept"]
    hook = f"checkpoint_config.post_save_hook=[sh, -c, 'echo $ROLL_STEP $ROLL_CHECKPOINT >> {tmp_path}/told']"
    with RunSession(loaded(tmp_path, *folders, hook, "max_ckpt_to_keep=1"), time.time()) as session:
        for step in (1, 2):
            session.checkpointer.save(step, lambda path: (path / "weights").touch(), {})
            session.checkpointer.wait()
    assert [path.name for path in (tmp_path / "kept").glob("checkpoint-*")] == ["checkpoint-2"]
    assert len((tmp_path / "told").read_text().splitlines()) == 2


@pytest.mark.parametrize(("given", "written"), [("2", 2), ("0", 0), ("null", 70)])
def test_as_many_answers_of_an_evaluation_are_written_as_asked(given, written, tmp_path):
    config = loaded(tmp_path, f"num_written_episodes={given}", f"output_dir={tmp_path}/out")
    shown: list[Any] = []
    with RunSession(config, time.time()) as session:
        told: Any = SimpleNamespace(config=config, folder=session.folder)
        told.log_answers = lambda step, rows: shown.extend(rows)
        assert len(keep_episodes(told, 3, [group(*[answer() for _ in range(70)])])) == 70
        file = session.folder.path / "trajectories" / "eval-00003.jsonl"
        assert len(file.read_text().splitlines() if file.exists() else ()) == len(shown) == written


@pytest.mark.parametrize(
    ("role", "words", "expected"),
    [
        ("actor_infer", [], True),
        ("actor_infer", ["actor_train.model_update_frequency=2"], False),
        ("actor_infer", ["async_generation_ratio=1", "train_infer_correction.is_weight.enabled=true"], False),
        ("val_infer", ["async_generation_ratio=1", "train_infer_correction.is_weight.enabled=true"], True),
        ("actor_infer", ["eval_only=true", "validation={data_args: {file_name: b.jsonl, prompt: q}}"], False),
        ("actor_infer", [f"{MODEL}.lora_target=all-linear", "~reference"], False),
        ("reference", [], False),
    ],
)
def test_who_gets_all_weights_before_it_generates_again(role, words, expected, tmp_path):
    assert updates_after_offload(loaded(tmp_path, *words), role) is expected
