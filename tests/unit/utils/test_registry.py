"""The registry, packages of a user's own that add to it, and derived seeds."""

import os
import subprocess
import sys
from collections import Counter

import pytest

from roll.configs.loader import plugin_problems
from roll.configs.rewards import RewardConfig
from roll.rewards import VERIFIERS, Sample
from roll.rewards.scorer import DomainScorer
from roll.utils.hashing import derive_seed
from roll.utils.registry import (
    PLUGINS,
    Registry,
    UnknownNameError,
    import_path,
    load_inherited_plugins,
    plugin_variables,
)


@pytest.fixture
def counters() -> Registry[type]:
    registry: Registry[type] = Registry("counter")
    registry.register("plain", Counter)
    registry.register("by_path", "collections:Counter")
    return registry


def test_objects_and_paths_give_the_same(counters):
    assert counters.get("plain") is counters.get("by_path") is counters.get("collections:Counter") is Counter
    assert counters.get("collections.Counter") is Counter
    assert counters.names() == ["by_path", "plain"] and "plain" in counters and "collections:Counter" not in counters


def test_a_path_is_imported_at_first_use_only(tmp_path, monkeypatch):
    (tmp_path / "late_plugin.py").write_text("thing = object()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry: Registry[object] = Registry("thing")
    registry.register("late", "late_plugin:thing")
    registry.check("late")
    assert registry.names() == ["late"] and "late_plugin" not in sys.modules
    registry.get("late")
    assert "late_plugin" in sys.modules


def test_a_wrong_name_is_answered_with_a_suggestion(counters):
    with pytest.raises(UnknownNameError, match=r"unknown counter 'plian'. Did you mean 'plain'\?") as caught:
        counters.get("plian")
    assert "Registered: by_path, plain; or give package.module:attribute" in str(caught.value)
    with pytest.raises(UnknownNameError) as caught:
        counters.check("xyz")
    assert "Did you mean" not in str(caught.value)
    with pytest.raises(UnknownNameError, match="Registered: nothing"):
        Registry("engine").check("any")


def test_what_is_no_path_is_never_imported(counters):
    for name in ("", ":", "collections:", ":Counter", ".Counter", "a-b:c", "a:b-c", "a..b:c", "os:a.b"):
        with pytest.raises(UnknownNameError, match="unknown counter"):
            counters.get(name)


def test_a_path_that_leads_nowhere_says_how_far_it_led():
    with pytest.raises(UnknownNameError, match="cannot import module 'no_such_module'"):
        import_path("no_such_module:thing", "reward")
    told = r"reward 'collections:Countr': module 'collections' has no 'Countr'; did you mean"
    with pytest.raises(UnknownNameError, match=told):
        import_path("collections:Countr", "reward")


def test_a_name_is_not_taken_twice(counters):
    counters.register("plain", Counter)  # the same thing again is harmless: modules are imported twice in tests
    with pytest.raises(ValueError, match="counter 'plain' is already registered as"):
        counters.register("plain", dict)
    counters.register("plain", dict, override=True)
    assert counters.get("plain") is dict


def test_seeds_depend_on_every_part_and_on_nothing_else():
    seeds = [derive_seed(*parts) for parts in [(0,), (1,), (0, 0), (0, "train", 1), (0, "train", 2), (0, "val", 1)]]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed("a", "bc") != derive_seed("ab", "c")
    command = [sys.executable, "-c", "from roll.utils.hashing import derive_seed; print(derive_seed(0, 'train', 1))"]
    for seed in ("1", "2"):
        said = subprocess.run(command, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout
        assert said == f"{seeds[3]}\n"


def test_a_python_file_is_imported_by_its_path(tmp_path):
    (tmp_path / "mine.py").write_text("from __future__ import annotations\nVALUE = object()\n")
    path = f"{tmp_path}/mine.py:VALUE"
    assert import_path(path) is import_path(path) is Registry("value").get(path)
    with pytest.raises(UnknownNameError, match=r"there_is_none\.py"):
        import_path(f"{tmp_path}/there_is_none.py:VALUE")
    with pytest.raises(UnknownNameError, match="did you mean 'VALUE'"):
        import_path(f"{tmp_path}/mine.py:VALUES")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("LIMIT = undefined", "importing it raised NameError: name 'undefined' is not defined"),
        ("raise SystemExit(2)", "importing it raised SystemExit: 2"),
        ("from math import cosine", "importing it raised ImportError: cannot import name 'cosine'"),
    ],
)
def test_code_that_cannot_be_imported_is_an_error_about_its_path(code, words, tmp_path):
    (tmp_path / "mine.py").write_text(f"{code}\n")
    with pytest.raises(UnknownNameError, match=rf"reward .*mine\.py:score': {words}"):
        import_path(f"{tmp_path}/mine.py:score", "reward")


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
    scorer = DomainScorer("own", RewardConfig(tag_included=["tag"], verifiers=[{"name": "of_a_plugin"}]))
    assert (await scorer.score(Sample("?", "", None, "tag"))).score == 1.0
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
