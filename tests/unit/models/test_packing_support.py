"""Which models may have several sequences in one row: those that ``packing.json`` lists, as it was measured."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig

from roll.configs.agentic import AgenticConfig
from roll.configs.loader import validate
from roll.configs.problems import ConfigErrors
from roll.distributed.strategy.base import StrategyContext
from roll.distributed.strategy.fsdp2.strategy import Fsdp2Infer, Fsdp2Train
from roll.distributed.strategy.hf_infer.strategy import HfInfer
from roll.models.packing_support import FILE, kinds, packing_problem, watched
from roll.preflight.choices import CHECKS
from tests.support.families import BOUND, FAMILIES, LAYERS, measured, packing_differences, tiny_config, tiny_model
from tests.support.trainers import make_batch, make_context

KNOWN: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["families"]
OTHERS: dict[str, str] = json.loads(FILE.read_text(encoding="utf-8"))["others"]
RIGHT = ("deepseek_v3", "gemma3_text", "gpt2", "llama", "mistral", "olmo2", "qwen2", "qwen3", "qwen3_moe")
WRONG = ("bloom", "falcon", "gpt_oss", "lfm2_moe", "mamba2", "mpt", "nemotron_h", "qwen3_5_text", "qwen3_next")


@pytest.mark.parametrize("family", RIGHT)
def test_what_is_listed_keeps_sequences_apart(family: str) -> None:
    config = tiny_config(family)
    found = packing_differences(config)
    assert {"sdpa", "eager"} <= found.keys() and max(found.values()) <= BOUND
    assert packing_problem(config) == ""


@pytest.mark.parametrize("family", WRONG)
def test_what_is_not_listed_does_not(family: str) -> None:
    config = tiny_config(family)
    assert max(packing_differences(config).values()) > 1000 * BOUND
    assert "see each other" in packing_problem(config)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_list_is_what_is_measured(family: str) -> None:
    entry, problem = measured(family)
    assert (family in KNOWN) == (entry is not None)
    if entry is not None:
        assert entry["values"] == KNOWN[family]["values"]
    else:
        assert problem.partition("(")[0] == OTHERS[family].partition("(")[0]


def test_every_family_is_in_the_list_which_the_documentation_shows() -> None:
    assert KNOWN.keys() | OTHERS.keys() == set(FAMILIES)
    for family in ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"):  # those that Megatron has, too
        assert family in KNOWN
    page = (Path(__file__).parents[3] / "docs" / "strategies.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- packing: begin -->")[2].partition("<!-- packing: end -->")[0]
    right, *others = [set(re.findall(r"`([\w.-]+)`", line)) for line in shown.strip().splitlines()[2:]]
    assert right == KNOWN.keys() and set().union(*others) == OTHERS.keys()


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
CONDITIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "rotary positions that depend on the longest": ("llama", {"rope_parameters": LONG}, '"longrope"'),
    "attention to both sides": ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "convolutions": ("lfm2", {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)}, "alone, not with"),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_an_entry_that_changes_who_sees_whom_counts(name: str) -> None:
    family, change, told = CONDITIONS[name]
    config = tiny_config(family, **change)
    assert max(packing_differences(config).values()) > 100 * BOUND
    assert told in packing_problem(config) and packing_problem(tiny_config(family)) == ""


def test_windows_and_mixtures_of_layers_are_fine_where_they_were_measured_and_other_classes_unknown() -> None:
    mixed = {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2), "use_sliding_window": True}
    assert packing_problem(tiny_config("qwen2", **mixed, sliding_window=8)) == ""
    assert packing_problem(tiny_config("mistral", sliding_window=None)) == ""

    class OtherConfig(PreTrainedConfig):
        model_type = "other"

    assert packing_problem(OtherConfig()) == "has not been measured"
    assert "its own code" in packing_problem(tiny_config("llama"), own_code=True)
    assert kinds([1, 0]) == ["number"] and kinds(8) == ["number"] and kinds(True) == [True] and kinds(None) == [None]
    assert kinds({"a": {"rope_type": "yarn"}, "b": {"rope_type": "default"}}) == ["default", "yarn"]
    assert "sliding_window" in watched(tiny_config("mistral"))


VALUES = {
    "adv_estimator": "reinforce",
    "rollout_batch_size": 8,
    "prompt_length": 24,
    "response_length": 8,
    "sequence_length": 32,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "custom_envs": {"Lake": {"env_type": "frozen_lake", "env_manager_cls": "traj"}},
    "train_env_manager": {"env_groups": 2, "group_size": 4, "tags": ["Lake"]},
    "val_env_manager": {"env_groups": 1, "tags": ["Lake"]},
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer is that of nobody, which no test here reads."""
    folder = tmp_path_factory.mktemp("models") / "hybrid"
    tiny_model(tiny_config("qwen3_5_text")).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("strategy", ["fsdp2_infer", "deepspeed_infer", "hf_infer"])
def test_validation_refuses_a_packed_role_with_its_reason(hybrid: Path, strategy: str) -> None:
    role = {"strategy_args": {"strategy_name": strategy}, "use_sequence_packing": True}
    values = {**VALUES, "pretrain": "tiny", "reference_pretrain": str(hybrid), "reference": role}
    with pytest.raises(ConfigErrors) as errors:
        validate(AgenticConfig, values, CHECKS[AgenticConfig])
    told = {problem.path: problem.expected for problem in errors.value.problems}
    assert told["reference.use_sequence_packing"].startswith("false: qwen3_5_text lets the sequences of a row see")


def test_loading_refuses_it_where_the_configuration_was_not_at_hand(hybrid: Path, tmp_path: Path) -> None:
    for kind, name in ((Fsdp2Train, "fsdp2_train"), (Fsdp2Infer, "fsdp2_infer")):
        context = make_context(hybrid, name, worker={"use_sequence_packing": True})
        with pytest.raises(ValueError, match=r"actor_train\.use_sequence_packing: true, expected false: q"):
            kind(context).setup()
    tiny_model(tiny_config("nemotron")).save_pretrained(tmp_path)
    context = make_context(
        tmp_path, "hf_infer", worker={"use_sequence_packing": True}, role="reference", sequence_length=64
    )
    with pytest.raises(ValueError, match=r"reference\.use_sequence_packing: true, expected false: nemotron lets"):
        HfInfer(context).start()


def test_prompts_are_not_shared_in_a_model_that_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sharing is on by default: the run goes on without it and says so once."""
    tiny_model(tiny_config("nemotron")).save_pretrained(tmp_path / "model")
    context: StrategyContext = make_context(tmp_path / "model", "fsdp2_infer")
    with caplog.at_level(logging.WARNING):
        scorer = Fsdp2Infer(context)
        scorer.setup()
    assert not scorer.shares_prompts
    (line,) = [record.getMessage() for record in caplog.records if "share_prompts" in record.getMessage()]
    assert line.startswith("actor_train.share_prompts: off, as nemotron lets the sequences of a row see each other")
    scorer.logprobs(make_batch())
