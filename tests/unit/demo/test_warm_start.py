"""When a warm start may be used again."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.configs.compose import compose_config
from roll.configs.loader import load_composed
from roll.configs.rlvr import RLVRConfig
from roll.configs.shipped import SHIPPED
from roll.demo.warm_start import AnswersStart


def test_other_tools_are_another_warm_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shown.jsonl").write_text("{}\n")

    def folder(*overrides: str) -> Path:
        words = (f"warm_start.file_name={tmp_path / 'shown.jsonl'}", *overrides)
        config = load_composed(RLVRConfig, "rlvr_tools", compose_config("rlvr_tools", SHIPPED, words))
        return AnswersStart(config).folder

    assert folder() == folder("max_steps=3")
    assert folder() != folder("tools.max_turns=3")
