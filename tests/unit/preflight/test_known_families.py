"""What a run is told of its model's family: nobody has compared it, or a kernel or length would compute it wrong."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, Gemma2Config, MptConfig, Phi3Config, Qwen2Config

from roll.configs.agentic import AgenticConfig
from roll.configs.loader import validate
from roll.configs.problems import ConfigErrors
from roll.preflight.choices import CHECKS
from roll.preflight.models import untried_models
from tests.support.configs import words_of
from tests.support.sizes import sizes
from tests.unit.preflight.test_wrong_choices import VALUES

ROOT = Path(__file__).resolve().parents[3]
SHAPE = {**sizes(160, 64, 96, 2, 4, 2), "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **FACTORS}


def config(folder: Path, model: Any, **actor: Any) -> AgenticConfig:
    if not folder.exists():
        AutoModelForCausalLM.from_config(model).save_pretrained(folder)
    generator = {"strategy_args": {"strategy_name": "vllm"}, "device_mapping": [0]}
    train = {**VALUES["actor_train"], "model_args": actor}
    roles = {"actor_infer": generator, "actor_train": train, "reference": train}
    return validate(AgenticConfig, {**VALUES, "pretrain": str(folder), **roles}, CHECKS[AgenticConfig])


def test_a_family_that_nobody_has_compared_is_named_once(tmp_path):
    (line,) = untried_models(config(tmp_path / "mpt", MptConfig(vocab_size=160, d_model=64, n_heads=4, n_layers=2)))
    assert line.startswith("no test has compared these with plain Transformers: mpt in ") and "docs/models.md" in line
    assert line.count("fsdp2_train") == line.count("vllm") == 1
    assert untried_models(config(tmp_path / "qwen2", Qwen2Config(**SHAPE))) == []


def test_a_kernel_that_leaves_out_a_cap_is_refused(tmp_path):
    model = Gemma2Config(**SHAPE, head_dim=16)
    config(tmp_path / "gemma2", model)
    found = words_of(config, tmp_path / "gemma2", model, attn_implementation="sdpa")
    assert "gemma2 caps attention scores at 50.0" in found["actor_train.model_args.attn_implementation"]


def test_a_length_at_which_rotary_frequencies_change_is_refused(tmp_path):
    model = Phi3Config(**SHAPE, rope_parameters=LONGROPE, original_max_position_embeddings=64)
    with pytest.raises(ConfigErrors, match=r"sequence_length: got 128, expected at most 64: a longer row"):
        config(tmp_path / "phi3", model)


def test_the_page_of_models_is_current():
    command = [sys.executable, str(ROOT / "scripts" / "generate_model_docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
