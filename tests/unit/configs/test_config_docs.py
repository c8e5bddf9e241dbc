"""``docs/configuration.md`` follows the classes."""

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
    text = (ROOT / "docs" / "configuration.md").read_text()
    for path, field in leaf_paths(schema):
        assert field.description, path
        assert f"| `{path.rpartition('.')[2]}` |" in text, path
