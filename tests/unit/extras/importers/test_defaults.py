"""Defaults of the other systems, from their sources: what is written out says the same as what is not."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.configs.problems import NOTHING
from roll.extras.importers.common import leaves
from roll.extras.importers.convert import convert
from roll.extras.importers.draft import Kind, value_at
from roll.extras.importers.table import FOLDER, rows, usual
from roll.preflight.choices import CHECKS
from tests.unit.extras.importers.test_rows import GIVEN

RELEASES = {"verl": ("0.6.1", "0.7.0", "0.8.0", "0.9.1"), "roll": ("0.3.0",)}
SPEED = (
    "preprocessing_num_workers",
    "max_num_batched_tokens",
    "max_running_requests",
    "model_update_buffer_size_mb",
    "rollout_workers",
    "rpc_timeout",
    "tokenization_sanity_check",
    "enable_chunked_prefill",
    "share_prompts",
    "use_sequence_packing",
    "infer_batch_size",
    "max_tokens_per_microbatch_in_infer",
    "sequence_length_round",
    "logging_dir",
)
"""Parts of keys that change no result, or where something is written."""
OLDER = ("actor_rollout_ref.actor.optim.warmup_style", "algorithm.rollout_is_level", "algorithm.rollout_is_mode")
"""Keys with a default that none of these releases has, or that has been null since."""
MANDATORY = ("actor_rollout_ref.rollout.name",)


def lines(system: str) -> list[dict[str, str]]:
    with (FOLDER / f"{system}_defaults.tsv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def written_out(system: str, release: str, megatron: bool) -> dict[str, Any]:
    """All defaults of a release as a tree."""
    values: dict[str, Any] = {}
    for line in lines(system):
        key = line["key"]
        others = "experimental" in line["source"] or ("megatron" in line["source"] and not megatron)
        if release not in line["releases"].split() or "<" in key or others:
            continue
        *above, last = key.split(".")
        node = values
        for part in above:
            inside = node.setdefault(part, {})
            node = inside if isinstance(inside, dict) else node.setdefault(part, {})
        node[last] = line["link"] or yaml.safe_load(line["value"])
    return values


CRITIC = ("algorithm.adv_estimator=gae", "critic.model.path=a", "critic.ppo_micro_batch_size_per_gpu=2")
PENALTY = ("algorithm.use_kl_in_reward=true", "actor_rollout_ref.actor.use_kl_loss=false")


@pytest.mark.parametrize(
    ("release", "words"), [*((release, CRITIC) for release in RELEASES["verl"]), ("0.7.0", PENALTY), ("0.9.1", ())]
)
def test_a_file_with_all_defaults_of_verl_is_the_file_without(
    release: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "defaults.yaml"
    file.write_text(yaml.safe_dump(written_out("verl", release, megatron=False)))
    alone = convert("verl", [GIVEN["verl"]], words, CHECKS)
    whole = convert("verl", [file, GIVEN["verl"]], words, CHECKS)
    told = {each.key for each in whole.outcomes if each.kind in (Kind.UNKNOWN, Kind.IMPOSSIBLE)}
    assert not told and not whole.problems
    texts = [dict(leaves(yaml.safe_load(each.text))) for each in (alone, whole)]
    changed = {key for key in texts[0].keys() | texts[1].keys() if texts[0].get(key) != texts[1].get(key)}
    assert {key for key in changed if not any(part in key for part in SPEED)} == set()


@pytest.mark.parametrize("system", ["verl", "verl_sft", "roll"])
def test_what_a_row_says_of_a_default_is_what_the_releases_have(system: str) -> None:
    given = {row.key: row.default for row in rows(system) if row.default is not NOTHING and row.key not in OLDER}
    known = {key: usual(system, key).values for key in given if key not in MANDATORY}
    assert len(known) > 4
    wrong = {key: (given[key], values) for key, values in known.items() if given[key] not in values}
    assert wrong == {}


@pytest.mark.parametrize("system", ["verl", "verl_sft", "roll"])
def test_every_default_has_its_source_and_releases(system: str) -> None:
    found = lines(system)
    assert len(found) > 100 and len({(line["key"], line["value"], line["link"]) for line in found}) == len(found)
    suffix = ".py" if system == "roll" else ".yaml"
    assert all(line["source"].endswith(suffix) and line["releases"] for line in found)
    assert value_at(written_out(system, found[0]["releases"].split()[0], True), "x") is NOTHING
