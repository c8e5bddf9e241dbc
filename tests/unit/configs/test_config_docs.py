"""``docs/configuration.md`` and its sections follow the classes, and the site's menu has every page."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from roll.configs.agentic import AgenticConfig
from roll.configs.rlvr import RLVRConfig
from roll.configs.schema import leaf_paths

ROOT = Path(__file__).resolve().parents[3]


def test_the_configuration_reference_is_current():
    command = [sys.executable, str(ROOT / "scripts" / "generate_config_docs.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("schema", [AgenticConfig, RLVRConfig])
def test_every_key_is_documented(schema):
    text = "".join(page.read_text() for page in (ROOT / "docs" / "configuration").glob("*.md"))
    for path, field in leaf_paths(schema):
        assert field.description, path
        assert f"| `{path.rpartition('.')[2]}` |" in text, path


def test_every_page_is_in_the_menu_of_the_site():
    named = re.findall(r'= "([\w/]+\.md)" }', (ROOT / "zensical.toml").read_text(encoding="utf-8"))
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted(pages)
