"""Open mappings: what goes to a class or function is checked before the run against what that takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.configs.arguments import argument_problems, plain_problems, takes
from roll.configs.loader import load_config
from roll.configs.problems import ConfigErrors
from roll.configs.shipped import SHIPPED
from roll.pipeline.programs import PROGRAMS, configurations
from roll.preflight.choices import CHECKS
from roll.utils.registry import import_path

PIPELINES = {name: found[0] for name, found in configurations(SHIPPED).items()}


def found(name: str, *overrides: str) -> list[str]:
    schema: Any = import_path(PROGRAMS[PIPELINES[name]].schema)
    try:
        load_config(schema, name, SHIPPED, overrides, CHECKS[schema])
    except ConfigErrors as errors:
        return [problem.path for problem in errors.problems]
    return []


ARGS = "data_generator.args"
ENV = "custom_envs.SimpleSokoban.env_config"


@pytest.mark.parametrize(
    ("name", "override", "path"),
    [
        ("rlvr_math", f"{ARGS}.max_operand=99.5", f"{ARGS}.max_operand"),
        ("rlvr_math", f"{ARGS}.max_operand=true", f"{ARGS}.max_operand"),
        ("rlvr_math", f"{ARGS}.max_operand=.nan", f"{ARGS}.max_operand"),
        ("rlvr_math", f'{ARGS}.operations="+\\0"', f"{ARGS}.operations"),
        ("rlvr_math", f"{ARGS}.max_oprand=9", f"{ARGS}.max_oprand"),
        ("rlvr_math", f"{ARGS}.max_operand=5", ARGS),
        ("rlvr_math", f"{ARGS}.held_out_share=1", f"{ARGS}.held_out_share"),
        ("rlvr_math", "data_generator.path=roll.demo.arithmetic:nope", "data_generator.path"),
        ("rlvr_math", "tracker_kwargs={flush_secs: true}", "tracker_kwargs"),
        ("dpo_math", f"{ARGS}.forget_rate=3", f"{ARGS}.forget_rate"),
        ("dpo_math", f"{ARGS}.nothing=3", f"{ARGS}.nothing"),
        ("rlvr_tools", f"{ARGS}.call_rate=.inf", f"{ARGS}.call_rate"),
        ("rlvr_tools", f"{ARGS}={{call_rate: 0.9, slip_rate: 0.9}}", ARGS),
        (
            "rlvr_tools",
            "tools.use.s={tool: search, args: {corpus: x, num_results: 99}}",
            "tools.use.s.args.num_results",
        ),
        ("rlvr_tools", "tools.use.s={tool: python, args: {memory_mb: 1}}", "tools.use.s.args"),
        ("rlvr_tools", "tools.use.s={tool: retrieval, args: {url: 'ftp://x'}}", "tools.use.s.args"),
        ("agentic_sokoban", f"{ENV}.num_boxes=true", f"{ENV}.num_boxes"),
        ("agentic_sokoban", f"{ENV}.num_boxes=1.0", f"{ENV}.num_boxes"),
        ("agentic_sokoban", f"{ENV}.dim_room=[6, true]", f"{ENV}.dim_room"),
        ("agentic_sokoban", f"{ENV}.step_penalty=.inf", f"{ENV}.step_penalty"),
        ("sft_math", 'exp_name="a\\0b"', "exp_name"),
        (
            "rlvr_math",
            'actor_train.data_args.chat_template_kwargs={x: "\\uD800"}',
            "actor_train.data_args.chat_template",
        ),
    ],
)
def test_what_its_receiver_would_refuse_or_take_for_something_else_is_refused_before_the_run(
    name: str, override: str, path: str
) -> None:
    assert [each for each in found(name, override) if each.startswith(path)]


@pytest.mark.parametrize("name", sorted(PIPELINES))
def test_arguments_of_the_shipped_configurations_pass(name: str) -> None:
    assert found(name) == []


def test_all_problems_of_a_users_own_receiver_are_found_at_once_as_far_as_it_says(tmp_path: Path) -> None:
    def check(**args: Any) -> None:
        if args.get("size", 1) > 3:
            raise ValueError("size: at most 3")

    @takes(check=check)
    def make(
        folder: Path, size: int = 1, *, names: list[str] | None = None, share: float = 0.5, loose=None, must
    ) -> None:  # type: ignore[no-untyped-def]
        """Makes something."""

    problems = argument_problems(
        make, {"size": 1.5, "names": [3], "share": 1, "loose": {"any": [1]}, "more": 1}, given=1
    )
    assert [problem.path for problem in problems] == ["size", "names", "more", "must"]
    (problem,) = argument_problems(make, {"size": 9, "must": None}, given=1)
    assert problem.hint == "size: at most 3"
    assert argument_problems(dict, {"anything": 1}) == []
    nested = {"a": [1, {"b": float("nan"), "c": "\0"}], "d": b"x", "e": [True, None, "ü"]}
    assert [problem.path for problem in plain_problems(nested)] == ["a.1.b", "a.1.c", "d"]


@pytest.mark.parametrize("key", ["actor_train.data_args.system_prompt", "tokenizer_path", "tools"])
def test_the_word_none_is_not_taken_for_text(tmp_path: Path, key: str) -> None:
    *above, last = key.split(".")
    text = "defaults: [rlvr_math, _self_]\n" + "".join(f"{'  ' * n}{part}:\n" for n, part in enumerate(above))
    (tmp_path / "mine.yaml").write_text(f"{text}{'  ' * len(above)}{last}: None\n")
    schema: Any = import_path(PROGRAMS["rlvr"].schema)
    with pytest.raises(ConfigErrors) as caught:
        load_config(schema, "mine", tmp_path, (), CHECKS[schema])
    assert key in {problem.path for problem in caught.value.problems}


def test_null_in_place_of_a_section_is_answered_with_what_leaving_it_out_means() -> None:
    schema: Any = import_path(PROGRAMS["agentic"].schema)
    with pytest.raises(ConfigErrors) as caught:
        load_config(schema, "agentic_sokoban", SHIPPED, ["train_env_manager.query_filter_config=null"])
    (problem,) = caught.value.problems
    assert "leave the section out" in problem.hint and "type: " in problem.hint and "no_filter" in problem.hint
