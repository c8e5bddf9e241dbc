"""Packages of a user's own: imported before their names are looked for, here and in processes that are started."""

import os
import sys

from roll.configs.loader import plugin_problems
from roll.configs.rewards import RewardConfig
from roll.rewards import VERIFIERS, Sample
from roll.rewards.scorer import DomainScorer
from roll.utils.registry import PLUGINS, load_inherited_plugins, plugin_variables

_PLUGIN = """
from roll.rewards import VERIFIERS, RuleVerifier, RewardResult
ANSWERS = {"asked": 0.0}
VERIFIERS.register("of_a_plugin", "{folder}/verifier.py:Own")
"""
_VERIFIER = """
import sys
from roll.rewards import RuleVerifier, RewardResult
class Own(RuleVerifier):
    def check(self, sample):
        told = any(hasattr(module, "ANSWERS") for name, module in sys.modules.items() if name.startswith("_file_"))
        return RewardResult(float(told), True)
"""


async def test_a_plugin_is_imported_here_and_in_the_children(tmp_path, monkeypatch):
    (tmp_path / "verifier.py").write_text(_VERIFIER)
    (tmp_path / "plugin.py").write_text(_PLUGIN.replace("{folder}", str(tmp_path)))
    monkeypatch.setattr(VERIFIERS, "_entries", dict(VERIFIERS._entries))
    monkeypatch.chdir(tmp_path)
    variables = plugin_variables(["plugin.py", "json"])
    assert variables == {PLUGINS: f"{tmp_path}/plugin.py{os.pathsep}json"} and plugin_variables([]) == {}
    assert plugin_problems(["plugin.py", "json"]) == [] and "of_a_plugin" in VERIFIERS
    monkeypatch.setenv(PLUGINS, variables[PLUGINS])
    config = RewardConfig.model_validate({"tag_included": ["tag"], "verifiers": [{"name": "of_a_plugin"}]})

    scorer = DomainScorer("own", config)
    try:
        sample = Sample(prompt="?", response="", ground_truth=None, data_source="tag")
        assert (await scorer.score(sample)).score == 1.0
    finally:
        await scorer.close()


def test_plugins_that_cannot_be_imported_are_told(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    first, second = map(str, plugin_problems(["no_such_package_here", f"{tmp_path}/broken.py"]))
    assert first.startswith("plugins.0: got") and "No module named 'no_such_package_here'" in first
    assert "plugins.1" in second and "ZeroDivisionError" in second
    assert plugin_problems(None) == []
    (tmp_path / "fine_plugin.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(PLUGINS, "fine_plugin")
    load_inherited_plugins()
    assert "fine_plugin" in sys.modules
