"""What a resumed run may differ in from the one that saved its checkpoint."""

import functools
import json
from dataclasses import asdict
from typing import Any

import pytest

from roll.configs import SHIPPED
from roll.configs.data import DataArguments, DatasetFilterConfig
from roll.configs.explain import all_keys, engine_options
from roll.configs.loader import PIPELINE_RULES, load_config
from roll.configs.pipeline import PipelineConfig
from roll.configs.resuming import Effect, Record, Rows, compare, effect_of, patterns
from roll.configs.rlvr import RLVRConfig
from roll.data.prompts import load_prompts
from roll.pipeline.programs import PROGRAMS
from roll.utils.registry import import_path

SCHEMAS = {program.default: import_path(program.schema) for program in PROGRAMS.values()}
ROWS = Rows(100, 100, "0" * 32)


def loaded(name: str, *overrides: str) -> Any:
    schema: Any = SCHEMAS[name]
    return load_config(schema, name, SHIPPED, overrides)


def record(config: PipelineConfig, rows: Rows = ROWS) -> Record:
    made = Record.of(config, config.model_dump(mode="json"), {"actor_train.data_args": rows})
    return Record(**json.loads(json.dumps(asdict(made))))  # as a checkpoint holds it


def differences(name: str, *overrides: str, rows: Rows = ROWS) -> tuple[set[str], set[str]]:
    """Keys that are refused, and that are reported, when a run is resumed with changes."""
    moved, told = compare(record(loaded(name)), record(loaded(name, *overrides), rows), SCHEMAS[name])
    return {each.key for each in moved}, {each.key for each in told}


def test_every_key_of_every_pipeline_has_an_effect_and_every_pattern_a_key():
    schemas = {schema.__name__: schema for schema in PIPELINE_RULES}
    places = {place for key in all_keys(schemas, ()) for place in key.places}
    assert not sorted(place for place in places if effect_of(place) is None)
    options = {f"actor_train.strategy_args.strategy_config.{name}" for name in ("moe_aux_loss_coeff", "param_dtype")}
    assert {effect_of(key) for key in options} == {Effect.RESULT}
    names = {key.name for key in all_keys(schemas, engine_options())}
    places |= {f"actor_train.strategy_args.strategy_config.{name}" for name in (*names, "quantization", "dtype")}
    idle = [pattern.pattern for pattern, _ in patterns() if not any(map(pattern.fullmatch, places))]
    assert [each for each in idle if not each.endswith(r"\..*")] == [], "no key is called so"


@pytest.mark.parametrize("name", list(SCHEMAS))
def test_layout_engine_and_length_of_a_run_are_free_and_a_seed_is_not(name):
    free = ["max_steps=7", "save_steps=3", "eval_steps=5", "exp_name=other", "track_with=stdout", "logging_steps=2"]
    free += ["actor_train.infer_batch_size=3", "max_worker_restarts=0", "actor_train.use_sequence_packing=true"]
    assert differences(name, *free) == (set(), set())
    assert differences(name, "seed=99") == ({"seed"}, set())
    learned = "actor_train.training_args.learning_rate"
    assert differences(name, f"{learned}=0.5", "max_grad_norm=0.1") == (set(), {learned, "max_grad_norm"})


def test_a_batch_that_is_as_large_on_other_devices_is_the_same(name="sft_math"):
    args = loaded(name).actor_train.training_args
    per_device, accumulated = args.per_device_train_batch_size, args.gradient_accumulation_steps
    batch = "actor_train.training_args.per_device_train_batch_size"
    wide = (f"{batch}={per_device * accumulated}", "actor_train.training_args.gradient_accumulation_steps=1")
    assert differences(name, *wide) == (set(), set())
    assert differences(name, f"{batch}={per_device * accumulated * 2}") == ({batch}, set())


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("rlvr_math", "rollout_batch_size", 8),
        ("rlvr_math", "num_return_sequences_in_group", 3),
        ("rlvr_math", "actor_train.data_args.shuffle", False),
        ("agentic_sokoban", "rollout_batch_size", 8),
        ("agentic_sokoban", "train_env_manager.group_size", 3),
    ],
)
def test_what_the_draws_of_a_step_follow_from_is_refused(name, key, value):
    config = loaded(name)
    other = config.model_copy(deep=True)
    *sections, last = key.split(".")
    setattr(functools.reduce(getattr, sections, other), last, value)
    ((change,), told) = compare(record(config), record(other), SCHEMAS[name])
    problem = change.refused()
    assert (problem.path, problem.got, told) == (key, value, [])
    assert str(change.was).lower() in problem.expected and "resume_with_changes=true" in problem.hint


def test_environments_at_once_are_layout_with_one_tag_and_the_order_of_tags_with_several():
    one = loaded("agentic_sokoban")
    more = one.model_copy(deep=True)
    more.train_env_manager.env_groups *= 2
    assert compare(record(one), record(more), type(one)) == ([], [])
    for config in (one, more):
        config.train_env_manager.tags = ["SimpleSokoban", "Other"]
    moved, _ = compare(record(one), record(more), type(one))
    assert [each.key for each in moved] == ["train_env_manager.n_groups"]
    more.train_env_manager.tags = ["Other", "SimpleSokoban"]
    assert "train_env_manager.tags" in {each.key for each in compare(record(one), record(more), type(one))[0]}


def test_a_file_may_move_but_not_change(tmp_path):
    file = "actor_train.data_args.file_name"
    assert differences("rlvr_math", f"{file}=/elsewhere/train.jsonl") == (set(), set())
    config, other = loaded("rlvr_math"), loaded("rlvr_math", f"{file}=other.jsonl")
    ((change,), told) = compare(record(config), record(other, Rows(101, 101, "1" * 32)), RLVRConfig)
    assert change.key == file and not told
    assert "101 rows" in str(change.refused()) and "100 rows" in str(change.refused())
    assert "other.jsonl" in change.refused().hint
    # The same rows, of which fewer are left: the key that left them out is named.
    shorter = loaded("rlvr_math", "prompt_length=9", "actor_train.data_args.prompt_overflow=drop")
    ((change,), told) = compare(record(config), record(shorter, Rows(100, 90, "0" * 32)), RLVRConfig)
    assert "90 of them used" in str(change) and "prompt_length" in change.hint
    assert "prompt_length" in {each.key for each in told}


def test_sections_that_come_or_go_are_reported_as_a_whole_and_keys_of_other_versions_not_at_all():
    config = loaded("rlvr_math")
    without = record(config.model_copy(update={"validation": None}))
    assert [each.key for each in compare(without, record(config), RLVRConfig)[1]] == ["validation"]
    earlier = record(config)
    del earlier.values["max_grad_norm"], earlier.values["actor_train"]["training_args"]["muon_momentum"]  # type: ignore[attr-defined]
    assert compare(earlier, record(config), RLVRConfig) == ([], [])
    rewards = json.loads(json.dumps(earlier.values["rewards"]))
    next(iter(rewards.values()))["verifiers"][0]["args"] = {"more": 1}
    changed = Record(**{**asdict(record(config)), "values": {**record(config).values, "rewards": rewards}})
    assert len(compare(record(config), changed, RLVRConfig)[1]) == 1


def test_the_identity_of_a_dataset_is_the_content_of_its_rows_in_their_order(tmp_path):
    rows = [{"prompt": f"{n}?", "solution": n, "tag": "t"} for n in range(5)]

    def identity(name: str, written: list[Any], **args: Any) -> Rows:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in written))
        data = DataArguments(file_name=str(file), prompt="prompt", **args)
        found = load_prompts(data, renderer=None, prompt_length=None, allowed_tags=None, seed=3).report.identity
        assert found is not None
        return found

    first = identity("a.jsonl", rows)
    assert (first.rows, first.samples) == (5, 5)
    assert identity("moved/b.jsonl", [dict(reversed(row.items())) for row in rows]) == first
    for changed in ([*rows[:-1], {**rows[-1], "prompt": "another"}], rows[::-1], [*rows, rows[0]], rows[:-1]):
        assert identity("a.jsonl", changed) != first
    drawn = {"dataset_filter": DatasetFilterConfig(num_samples=3)}
    assert identity("a.jsonl", rows, **drawn).samples == 3
    assert identity("a.jsonl", rows, **drawn).digest != first.digest, "drawn at random"
