"""The chain of examples: its configurations are those that the script names, valid, and hold the same problems out."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from roll.configs.compose import compose_config
from roll.configs.loader import load_composed
from roll.demo.arithmetic import write_pairs
from roll.pipeline.programs import PROGRAMS, program_of
from roll.utils.registry import import_path

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
FOLDER = EXAMPLES / "chain_math"
STAGES = sorted(path.stem for path in FOLDER.glob("[0-9]*.yaml"))


def stages_of_the_script() -> dict[str, list[str]]:
    """Further words of each stage, with a folder in place of the variable."""
    text = (EXAMPLES / "chain_math.sh").read_text(encoding="utf-8")
    found = re.findall(r"^stage (\S+)([^#\n]*)", text, re.MULTILINE)
    return {name: words.replace('"', "").replace("$folder", "/chain").split() for name, words in found}


def test_the_script_runs_every_configuration():
    assert list(stages_of_the_script()) == STAGES and len(STAGES) == 5


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_is_valid_and_starts_from_an_earlier_one(name):
    words = stages_of_the_script()[name]
    composed = compose_config(name, FOLDER, ["output_dir=/chain", "seed=3", *words])
    program = PROGRAMS[str(program_of(composed.values))]
    config: Any = load_composed(import_path(program.schema), name, composed)
    assert (config.exp_name, config.output_dir, config.seed) == (name, "/chain", 3)
    assert config.data_generator.folder == "/chain/data"
    assert config.save_steps == config.max_steps, "one checkpoint, at the end"
    models = re.findall(r"/chain/models/([\w-]+)", json.dumps(composed.values))
    assert all(STAGES.index(model) < STAGES.index(name) for model in models)
    assert bool(models) == (name not in ("1-sft", "2-student"))


def test_what_is_held_out_is_trained_on_by_no_stage(tmp_path):
    args = compose_config("1-sft", FOLDER, []).values["data_generator"]["args"]
    sets = [compose_config(name, FOLDER, []).values["data_generator"]["args"] for name in STAGES]
    assert all(other == args for other in sets), "the stages share their data"
    write_pairs(tmp_path, **args)

    def problems(name: str) -> set[frozenset[int]]:
        rows = map(json.loads, (tmp_path / name).read_text(encoding="utf-8").splitlines())
        return {frozenset(map(int, re.findall(r"\d+", row["prompt"]))) for row in rows}

    held_out = problems("val.jsonl") | problems("val_pairs.jsonl")
    assert len(held_out) > 300
    for name in ("train.jsonl", "demonstrations.jsonl", "pairs.jsonl"):
        assert not held_out & problems(name)
