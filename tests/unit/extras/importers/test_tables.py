"""The tables of other systems' keys: where each leads, and that none is forgotten."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from roll.configs.agentic import AgenticConfig
from roll.configs.distill import DistillConfig
from roll.configs.dpo import DPOConfig
from roll.configs.engines import cards
from roll.configs.offline import SFTConfig
from roll.configs.rlvr import RLVRConfig
from roll.configs.schema import ROLES, locate
from roll.extras.importers import SYSTEMS
from roll.extras.importers.table import IMPOSSIBLE, TRANSFORMS, Omitted, Partial, Untranslatable, advice, find, rows

DOCUMENTED = [line.split() for line in (Path(__file__).parent / "documented.txt").read_text().splitlines()]
OPTIONS = "strategy_args.strategy_config."
ENGINE = ("actor_rollout_ref", "rollout", "engine_kwargs", "vllm")
OPEN = ("actor_train.data_args.chat_template_kwargs.", "tracker_kwargs.", "system_envs.", "pf_ppo.")
"""Sections whose keys are others' to check, or any."""


PASSED_ON = (
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "swap_space",
    "enable_expert_parallel",
    "attention_backend",
)
"""Arguments that engines take beside the options of their cards."""


def known(path: str) -> bool:
    """Whether a key of ours exists; those of a strategy in the options of some engine."""
    _, options, rest = path.partition(OPTIONS)
    if options:
        return rest in ("**", *PASSED_ON) or any(locate(card.options, rest.split(".")) for card in cards())
    parts = path.removesuffix(".**").split(".")
    return any(
        locate(schema, parts) is not None for schema in (AgenticConfig, DistillConfig, DPOConfig, RLVRConfig, SFTConfig)
    )


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_key_whose_own_keys_are_told_is_not_judged_as_a_whole(system: str) -> None:
    all_rows = list(rows(system))
    inner = [row.key for row in all_rows if not row.key.endswith("**")]
    judged = {row.key for row in all_rows if row.how == IMPOSSIBLE}
    assert [key for key in judged if any(other.startswith(f"{key}.") for other in inner)] == []


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_row_leads_to_a_key_that_exists(system: str) -> None:
    lost = []
    for row in rows(system):
        for key in (row.ours, *(setting.key for setting in row.beside)):
            for role in ROLES if "<role>" in key else ("",):
                path = key.replace("<role>", role)
                if path and not path.startswith(OPEN) and "env_config" not in path and not known(path):
                    lost.append((row.key, path))
    assert lost == []


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_key_has_one_row_and_says_what_becomes_of_it(system: str) -> None:
    assert [key for key, count in Counter(row.key for row in rows(system)).items() if count > 1] == []
    silent = [row.key for row in rows(system) if row.how in ("drop", "impossible") and not row.note]
    assert silent == []


def test_every_documented_key_has_a_row() -> None:
    assert len(DOCUMENTED) > 800
    assert {system for system, _ in DOCUMENTED} == set(SYSTEMS)
    assert [(system, key) for system, key in DOCUMENTED if find(system, key.split(".")) is None] == []


def test_the_closest_row_is_taken() -> None:
    row, found = find("roll", ["critic", "model_args", "flash_attn"]) or pytest.fail("no row")
    assert (row.ours, found) == ("<role>.model_args.attn_implementation", {"<role>": "critic"})
    assert find("roll", ["somebody", "model_args", "flash_attn"]) is None
    row, found = find("verl", [*ENGINE, "a", "b"]) or pytest.fail("no row")
    assert found["**"] == "a.b"
    row, _ = find("roll", ["actor_train", "training_args", "learning_rate"]) or pytest.fail("no row")
    assert row.default == 5e-5


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("clip_ratio", "use pg_clip"),
        ("actor_train.lr", "use training_args.learning_rate of the role"),
        ("actor_infer.offload_nccl", "remove it: roles that share devices leave them between their turns"),
        ("actor_train.model_args.flash_attn", "use model_args.attn_implementation of the role"),
        ("clip_ratio_high", "use pg_clip_high with use_pg_clip_range: true; read with use_pg_clip_range"),
        ("rollout_backend", "use actor_infer.strategy_args.strategy_name"),
    ],
)
def test_hints_are_made_from_the_tables(path: str, hint: str) -> None:
    assert advice(path.split(".")) == hint


def test_no_hint_where_no_system_has_the_name() -> None:
    assert advice(["nobodys_key"]) is None


def test_values_are_carried_over() -> None:
    assert TRANSFORMS["opposite"](True) is False
    assert TRANSFORMS["commas"](["q_proj", "v_proj"]) == "q_proj,v_proj"
    assert TRANSFORMS["never"](-1) is None and TRANSFORMS["never"](20) == 20
    assert TRANSFORMS["attention"]("disabled") == "eager"
    assert TRANSFORMS["trackers"](["console", "tensorboard"]) == ["stdout", "tensorboard"]
    assert TRANSFORMS["schedule"]("inverse-square-root") == "inverse_sqrt"
    with pytest.raises(Untranslatable, match="polynomial has no counterpart"):
        TRANSFORMS["schedule"]("polynomial")
    with pytest.raises(Omitted, match="no tracker clearml"):
        TRANSFORMS["trackers"]("clearml")
    with pytest.raises(Partial, match="no tracker clearml") as some:
        TRANSFORMS["trackers"](["console", "clearml"])
    assert some.value.value == "stdout"


def test_the_page_is_current() -> None:
    script = Path(__file__).resolve().parents[4] / "scripts" / "generate_migration_docs.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
