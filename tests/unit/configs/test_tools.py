"""The section ``tools`` among the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from roll.__main__ import main as roll
from roll.configs.agentic import AgenticConfig
from roll.configs.compose import compose_config
from roll.configs.loader import load_composed
from roll.configs.problems import ConfigErrors
from roll.configs.rlvr import RLVRConfig
from roll.preflight.choices import CHECKS

SHIPPED = Path(__file__).parents[3] / "examples" / "config"


def problems(name: str, *overrides: str) -> dict[str, str]:
    kind = AgenticConfig if name.startswith("agentic") else RLVRConfig
    with pytest.raises(ConfigErrors) as raised:
        load_composed(kind, name, compose_config(name, SHIPPED, list(overrides)), CHECKS[kind])
    return {problem.path: str(problem) for problem in raised.value.problems}


def test_what_the_document_shows_is_valid_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = (SHIPPED.parents[1] / "docs" / "agents.md").read_text(encoding="utf-8")
    agent, program, _, tools, functions = re.findall(r"```(?:yaml|python)\n(.*?)```", document, re.DOTALL)
    (tmp_path / "agent.yaml").write_text(f"defaults: [rlvr_math, _self_]\n{agent}")
    (tmp_path / "my_agent.py").write_text(program)
    (tmp_path / "mine.yaml").write_text(tools)
    (tmp_path / "my_tools.py").write_text(functions)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [roll(["validate", name]) for name in ("./agent.yaml", "./mine.yaml")] == [0, 0]


def test_wrong_tools_are_told_at_once() -> None:
    found = problems(
        "rlvr_tools",
        "tools.dialect=hermess",
        "tools.use.calculator.tool=calculater",
        "tools.use.calculator.tags=[prodcts]",
        "+tools.use.two.words={tool: calculator}",
        "+tools.use.find.tool=search",
    )
    assert "Did you mean 'hermes'?" in found["tools.dialect"]
    assert "Did you mean 'calculator'?" in found["tools.use.calculator.tool"]
    assert "did you mean products?" in found["tools.use.calculator.tags"]
    assert "missing a required argument: 'corpus'" in found["tools.use.find.args"]


def test_a_tool_has_a_name_that_dialects_can_write_and_its_environment_keeps_the_conversation() -> None:
    assert "letters, digits" in problems("rlvr_tools", "+tools.use={two words: {tool: calculator}}")["tools.use"]
    found = problems("agentic_sokoban", "+tools.use.calculator.tool=calculator")
    assert "traj with tools" in found["custom_envs.SimpleSokoban.env_manager_cls"]
    found = problems("agentic_sokoban", "+tools.use={calculator: {tool: calculator, tags: [Sokoban]}}")
    assert list(found) == ["tools.use.calculator.tags"]
