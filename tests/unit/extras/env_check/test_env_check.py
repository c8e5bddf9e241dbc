"""The check of environments: a zoo of broken ones is caught, the built-in ones pass."""

import multiprocessing
import re
import subprocess
import threading
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check

import roll.agentic.env as envs
from roll.configs.problems import ConfigErrors
from roll.extras.env_check import RULES, assert_env_ok, check_env, probes
from tests.support import broken_envs as zoo
from tests.support.cli import call

QUICK: dict[str, Any] = {"episodes": 3, "timeout": 2.0}

ZOO: dict[type[envs.TextEnv], str] = {
    zoo.NeedsKey: "cannot-be-made", zoo.FaultyReset: "reset-raises", zoo.HangingReset: "reset-timeout",
    zoo.HangingStep: "step-timeout", zoo.FragileStep: "step-raises", zoo.TextReward: "protocol",
    zoo.Unseeded: "not-deterministic", zoo.HashSeeded: "differs-between-processes", zoo.Leaky: "state-leaks",
    zoo.GlobalRandom: "instances-interfere", zoo.Scratch: "not-thread-safe", zoo.Database: "thread-bound",
    zoo.PaidFailure: "failure-paid", zoo.Generous: "reward-constant", zoo.Rich: "reward-range",
    zoo.WrongSum: "reward-parts", zoo.Reward4Format: "penalty-positive", zoo.Gullible: "reward-tampered",
    zoo.Applauding: "success-for-nothing", zoo.Unending: "paid-after-end", zoo.Misspelt: "success-undefined",
    zoo.SeedBlind: "seeds-alike", zoo.Deaf: "actions-not-understood", zoo.WrongExpert: "expert-wrong",
    zoo.Talkative: "observation-size", zoo.Colourful: "observation-characters", zoo.Sleepy: "not-instant",
    zoo.Sluggish: "slow", zoo.BadPicture: "render-fails", zoo.CuriousPicture: "render-changes-state",
}  # fmt: skip


class Guess(zoo.Safe):
    """Has no named actions and takes an object."""

    action_names = ()

    def __init__(self, lock: Any = None) -> None:
        super().__init__()
        self.lock = lock or threading.Lock()

    def expert_actions(self) -> list[str]:
        raise NotImplementedError("nobody knows")


@pytest.fixture(scope="module", autouse=True)
def other_processes_are_forked() -> Iterator[None]:
    """Forks each check's other process of one that has imported all; those of the command start as a user's do."""
    forkserver._forkserver._stop()  # another's would have another hash
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["pytest", probes.__name__, zoo.__name__])

    def run(command: list[str], env: dict[str, str], **_: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONHASHSEED", env["PYTHONHASHSEED"])  # of the server, which the first one starts
            process = forks.Process(target=probes._main, args=(Path(command[-1]),))
            process.start()
        process.join()
        return SimpleNamespace(returncode=process.exitcode, stderr=b"")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "subprocess", SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired))
        yield
    forkserver._forkserver._stop()


@pytest.mark.parametrize("env", ZOO, ids=lambda env: env.__name__)
def test_a_broken_environment_is_caught_by_name(env):
    more = {"episodes": 10} if env is zoo.HashSeeded else {}  # one in a hundred draws three equal digits
    report = check_env(env, **QUICK | more, slow=0.02 if env is zoo.Sluggish else 1.0)
    assert {finding.name for finding in report.problems()} == {ZOO[env]}, report.findings


def test_what_they_all_would_be_passes():
    report = check_env(zoo.Safe)
    assert not report.problems(), report.findings
    assert len(report.tried) == 17 and dict(report.facts)["rewards"] == "-0.1 to 1 for a step"


SLIPPERY = {"is_slippery": True, "size": 6, "max_steps": 30, "hole_reward": -1.0, "split": "eval"}
TAXI = {"env_id": "Taxi-v4", "env_kwargs": {"render_mode": None}, "renderer": "values", "success_return": 0.0}
LAKE = {"env_id": "FrozenLake-v1", "success_return": 1, "action_names": ["Left", "Down", "Right", "Up"]}
DIGITS = {"answers": list("0123456789")}
GUESSES = {"answers": [f"[{number}]" for number in range(1, 21)], "allow": ["seeds-alike"], "episodes": 2}
BOXED = {"answers": [f"\\boxed{{{number}}}" for number in range(1, 11)], "episodes": 2}
BOXED |= {"allow": ["seeds-alike", "reward-tampered"]}  # it takes a number out of whatever stands around it
BUILT_IN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("sokoban", {}, {}),
    ("sokoban", {"dim_room": [8, 8], "num_boxes": 2, "max_steps": 20, "show_coordinates": True}, {}),
    ("frozen_lake", {}, {}),
    ("frozen_lake", {**SLIPPERY, "show_coordinates": True}, {}),
    ("hidden_word", {}, {}),
    ("hidden_word", {"words": ["one", "two", "six"], "show_history": False, "letter_reward": 0.1}, {}),
    ("adventure", {}, {}),
    ("adventure", {"num_rooms": 9, "num_doors": 3, "max_steps": 30, "door_reward": 0.1}, {}),
    ("shop", {}, {}),
    ("shop", {"dialect": "hermes", "num_products": 200, "num_shown": 3, "step_penalty": -0.01}, {}),
    ("single_turn", {"generator": "tests.unit.extras.env_check.test_env_check:sum_of_two"}, DIGITS),
    ("gymnasium", {**TAXI, "max_steps": 50}, {}),
    ("gymnasium", LAKE, {}),
    ("textarena", {"env_id": "GuessTheNumber-v0", "max_steps": 12}, GUESSES),
    ("gem", {"env_id": "game:GuessTheNumber-v0-easy", "max_steps": 12}, BOXED),
]


def sum_of_two(seed: int) -> tuple[str, str]:
    left, right = seed % 5, seed // 5 % 5
    return f"{left} + {right} =", str(left + right)


TYPES = [env_type for env_type, _, _ in BUILT_IN]


@pytest.mark.parametrize(
    ("env_type", "env_config", "options"),
    [
        pytest.param(*row, marks=pytest.mark.slow if row[0] in TYPES[:number] else [])
        for number, row in enumerate(BUILT_IN)
    ],
)
def test_built_in_environments_pass(env_type, env_config, options):
    if env_type in ("gem", "textarena"):
        pytest.importorskip(env_type, reason=f"pip install 'roll-rl[{env_type}]'")
    assert_env_ok(env_type, env_config, **options)
    gymnasium_check(envs.make(env_type, **env_config), skip_render_check=True)


def test_every_built_in_environment_is_checked_here_or_where_there_is_a_server():
    assert {env_type for env_type, _, _ in BUILT_IN} | {"openenv"} == set(envs.registered())


def test_every_rule_is_caught_here_and_documented():
    elsewhere = {"cannot-travel", "ends-process", "picture-size", "picture-state"}  # of tests/unit/rollout
    notes = {name for name, rule in RULES.items() if rule.severity == "note"}
    assert set(ZOO.values()) | elsewhere | notes == set(RULES)
    text = (Path(__file__).resolve().parents[4] / "docs" / "environments.md").read_text(encoding="utf-8")
    table = text.partition("## Checking an environment")[2].partition("\n## ")[0]
    assert all(f"| {rule.severity} |" in table for rule in RULES.values())
    assert re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE) == list(RULES)


def test_what_cannot_reach_another_process_is_told():
    report = check_env(Guess, {"lock": threading.Lock()}, answers=["<answer>1</answer>", "<answer>7</answer>"])
    assert [finding.name for finding in report.findings if finding.severity == "error"] == ["cannot-travel"]
    assert "cannot be pickled: TypeError" in str(report.findings[0])
    assert "instance-not-picklable" in {finding.name for finding in report.findings}


def test_answers_are_tried_where_actions_have_no_names():
    wins = check_env(Guess, answers=[f"<answer>{digit}</answer>" for digit in zoo.DIGITS])
    guessed = check_env(Guess)
    assert not wins.problems() and not guessed.problems()
    assert "success-not-seen" not in {finding.name for finding in wins.findings}
    assert "success-not-seen" in {finding.name for finding in check_env(Guess, answers=["hm"]).findings}


def test_the_example_passes_notes_are_no_problems_and_a_class_without_a_path_is_refused():
    report = check_env("examples.custom_environment:GuessNumber")
    assert not report.problems() and "step-after-end" in {finding.name for finding in report.findings}
    with pytest.raises(ConfigErrors, match="cannot import module 'nowhere'"):
        check_env(type("Inner", (zoo.Safe,), {"__module__": "nowhere"}))


def test_the_helper_raises_with_every_finding_and_its_fix():
    told = r"error failure-paid: .* got the reward 1, the best success 1. Reward a failed"
    with pytest.raises(AssertionError, match=told):
        assert_env_ok(zoo.PaidFailure, **QUICK)
    assert_env_ok(zoo.PaidFailure, allow=["failure-paid"], **QUICK)
    with pytest.raises(ValueError, match="did you mean failure-paid"):
        assert_env_ok(zoo.PaidFailure, allow=["failure_paid"])


CHECK = ["env", "check", "--episodes", "3"]


def test_the_command_prints_a_page_and_says_by_its_code_what_it_found(capsys):
    page, _ = call(capsys, *CHECK, "tests.support.broken_envs:Safe")
    assert "no problem was found" in page and "\x1b" not in page and max(map(len, page.splitlines())) <= 110
    gullible = [*CHECK, "tests.support.broken_envs:Gullible"]
    page, _ = call(capsys, *gullible, code=1)
    assert "error    reward-tampered" in page and "fix: Compute the reward" in page and "1 error\n" in page
    assert "allowed  reward-tampered" in call(capsys, *gullible, "--allow", "reward-tampered")[0]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("exit", ["error    step-raises", "SystemExit"]),
        ("_exit", ["error    ends-process\n         exit code 7; tried at that time: plays\n", "1 error\n"]),
        ("abort", ["error    ends-process\n         SIGABRT; tried at that time: plays\n", "1 error\n"]),
    ],
)
def test_an_environment_that_ends_its_process_gets_its_page(capsys, fault, told):
    page, _ = call(capsys, *CHECK, "tests.support.broken_envs:Fatal", f"fault={fault}", code=1)
    assert [line for line in told if line not in page] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["frozenlake"], "Did you mean 'frozen_lake'"), (["frozen_lake", "siz=5"], "did you mean size"),
        (["frozen_lake", "size"], "got size, expected key=value"),
        (["frozen_lake", "size=[5"], 'env_config.size: got "[5", expected valid YAML'),
        (["frozen_lake", "--episodes", "1"], "episodes: got 1, expected at least 2"),
        (["frozen_lake", "--allow", "sloww"], "did you mean slow"),
        (["tests.support.broken_envs:Saef"], "did you mean 'Safe'"),
    ],
)  # fmt: skip
def test_wrong_usage_is_told_with_the_nearest_name(capsys, words, said):
    assert said in call(capsys, "env", "check", *words, code=2)[1]
