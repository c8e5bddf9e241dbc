"""A policy with tools on real Ray: what it calls is answered, scored, trained and evaluated."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import FAULTS, RLVR_LAUNCHER, ROOT, assert_same_tensors
from tests.integration.conftest import rows as data
from tests.integration.test_agents import LOGGED, assert_trained_is_what_was_sampled
from tests.integration.test_async_runs import ORDERS, OVERLAP, assert_finished, repeatable
from tests.support.lines import write_lines
from tests.support.mcp_http import SCRIPT, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
"""tests/unit/rollout/test_tool_env.py has each kind of tool."""

FEW = (
    "pretrain=tiny",
    "max_steps=2",
    "eval_steps=2",
    "save_steps=2",
    "rollout_batch_size=8",
    "val_batch_size=32",
    "actor_train.training_args.per_device_train_batch_size=8",
    "warm_start.max_steps=150",
    "warm_start.eval_steps=150",
    "warm_start.eval_episodes=64",
    "warm_start.min_success=0",
    "rewards.products.query_filter_config={type: std_filter}",
)
CALLING = (  # an untrained model, half of whose samples are calls of four tools
    *OVERLAP,
    "actor_train.data_args.template=chatml_tool_names",
    "prompt_length=100",
    "sequence_length=400",
    "tools.dialect=tests.support.calling:Letters",
    "tools.max_turns=3",
    "tools.malformed_call_penalty=-0.1",
    "tools.use.subtract={tool: 'my_tools.py:subtract', isolation: process, timeout: 60}",
    "tools.use.divide={tool: 'tests.support.acting_tool:divide'}",
    f"tools.servers.pipes={{command: [{sys.executable}, {SCRIPT}], only: [add], timeout: 60}}",
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as address:
        yield address


def prepare(folder: Path) -> None:
    """A file of tools and data, where the run is started."""
    shutil.copy(ROOT / "tests" / "support" / "acting_tool.py", folder / "my_tools.py")
    write_lines(folder / "train.jsonl", data("t", ORDERS))


def test_a_tool_is_called_answered_and_learnt_from(launch):
    run = launch(*FEW, config="rlvr_tools", script=RLVR_LAUNCHER, folder=ROOT / "examples" / "config").ended()
    for step in (1, 2):
        record = run.metrics[step]
        assert record["rollout/tool_calls"] > 0.1, record
        assert record["rollout/failed_calls"] <= record["rollout/tool_calls"] / 2
        assert record["rollout/turns"] > 1.1
        assert record["rollout/penalty"] == pytest.approx(-0.1 * record["rollout/malformed_calls"])
        assert record["rollout/tokens/differ"] < 1
    assert run.summary["status"] == "completed"
    assert "chat template: append-only, speaks the tool dialect hermes" in run.said


def test_tools_of_all_kinds_beside_training_through_epochs_filters_and_evaluations(rlvr, url, tmp_path):
    prepare(tmp_path)
    run = rlvr(
        *CALLING,
        f"tools.servers.http={{url: '{url}', only: [multiply], timeout: 60}}",
        f"tools.servers.pipes.env={{{FAULTS}: '{tmp_path / 'faults-0'}'}}",  # so that one which stays behind is found
        "max_steps=4",
        "eval_steps=4",
        *LOGGED,
    ).ended()
    assert_finished(run, 4)
    answers = assert_trained_is_what_was_sampled(run)
    assert set(answers.values()) == {1, 2, 3, 4}, "an episode is a row of up to three turns with calls and an answer"
    metrics = [run.metrics[step] for step in range(1, 5)]
    for each in metrics:
        assert each["rollout/tool_calls"] > 0 and each["rollout/malformed_calls"] > 0
        assert each["rollout/call_timeouts"] == 0
        assert each["rollout/failed_calls"] <= each["rollout/tool_calls"] / 2, "divisions by nought"
        assert each.get("rollout/tokens/rewritten", 0) == 0, "absent where no episode of the step had two turns"
    assert any("rollout/tokens/rewritten" in each for each in metrics)
    assert sum(each["rollout/failed_calls"] for each in metrics) > 0
    assert sum(each["rollout/filtered"] for each in metrics) > 0 and metrics[-1]["rollout/epoch"] >= 1
    assert run.metrics[4]["eval/tool_calls"] > 0
    run.assert_nothing_left()


def test_a_run_with_tools_is_the_same_through_a_kill_and_a_resume(rlvr, url, tmp_path):
    prepare(tmp_path)
    more = (f"tools.servers.http={{url: '{url}', only: [multiply], timeout: 60}}", "max_steps=4", "eval_steps=2")
    first = rlvr(*CALLING, *more, orders=("hold-actor_train-0-train-3",))
    first.pid_at("actor_train-0-train-3")
    first.kill()
    recorded = rlvr(*CALLING, *more, "resume_from_checkpoint=true").ended()
    assert_finished(recorded, 4)
    path = recorded.path / "schedule.jsonl"
    again = rlvr(*CALLING, *more, f"replay_schedule={path}", output="again").ended()
    assert (again.path / "schedule.jsonl").read_text() == path.read_text()
    assert repeatable(again) == repeatable(recorded)
    assert_same_tensors(again.tensors(4), recorded.tensors(4))
