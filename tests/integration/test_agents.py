"""Agent programs and tools in runs of the RLVR pipeline: what is trained is what the engine saw."""

import itertools
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import FAULTS, RLVR_LAUNCHER, ROOT, Run, counting, rows
from tests.integration.test_async_runs import ORDERS, OVERLAP, assert_finished, repeated_through_a_kill
from tests.support.lines import write_lines
from tests.support.mcp_http import SCRIPT, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
"""unit/rollout has agents' rows, each failure and each kind of tool, test_rlvr_pipeline.py the pipeline."""

PROGRAM = ROOT / "tests" / "support" / "programs" / "openai_agent.py"
LOGGED = (
    "actor_infer.worker_cls=tests.support.agents:LoggedInferWorker",
    "actor_train.worker_cls=tests.support.agents:LoggedTrainWorker",
)
SMALL = (
    *LOGGED,
    "sequence_length=160",
    "response_length=6",
    "rollout_batch_size=2",
    "val_batch_size=2",
    "rewards.letters.query_filter_config={type: no_filter}",
)


def assert_trained_is_what_was_sampled(run: Run) -> Counter[int]:
    """Each answer in a trained row was sampled so, from all that stands before it; returns answers by row."""

    def key(prompt: list[int], ids: list[int], logprobs: list[float]) -> str:
        return json.dumps([prompt, ids, logprobs])

    sampled = Counter(key(line["prompt"], line["ids"], line["logprobs"]) for line in run.logged("sampled.jsonl"))
    found: Counter[str] = Counter()
    answers: Counter[int] = Counter()
    for number, row in enumerate(run.logged("trained.jsonl")):
        ids, mask = row["ids"], row["mask"]
        edges = [0, *(i for i in range(1, len(ids)) if mask[i] != mask[i - 1]), len(ids)]
        for start, end in itertools.pairwise(edges):
            if mask[start]:
                part = slice(start, end)
                found[key(ids[:start], ids[part], row["logprobs"][part])] += 1
                answers[number] += 1
    assert found and found <= sampled
    return answers


def test_an_unmodified_client_script_is_trained_on_exactly_what_the_engine_saw(rlvr, tmp_path):
    write_lines(tmp_path / "val.jsonl", rows("v", [""] * 2))
    run = rlvr(
        *SMALL,
        f"agent={{command: [python, {PROGRAM}], timeout: 200}}",
        "validation.generating_args={num_return_sequences: 1, max_new_tokens: 3}",
        "val_before_train=false",
        train=[""] * 4,
    ).ended()
    answers = assert_trained_is_what_was_sampled(run)
    assert len(answers) == 2 * 8 and set(answers.values()) == {2}, "an episode is a row of two answers"
    for step in (1, 2):
        metrics = run.metrics[step]
        assert metrics["rollout/episodes"] == 8 and metrics["rollout/dropped"] == 0
        assert metrics["rollout/agent/calls"] == 2 and metrics["rollout/agent/rows"] == 1
        assert metrics["rollout/agent/rewritten"] == metrics["rollout/agent/refused"] == 0
        assert metrics["actor/grad_norm"] > 0
    assert run.metrics[2]["eval/agent/calls"] == 2
    assert run.summary["eval"]["after"].keys() >= {"accuracy", "accuracy_greedy", "mean@1"}
    run.assert_nothing_left()


def test_programs_play_environments_beside_a_policy_that_plays_itself(launch):
    run = launch(
        "max_steps=1",
        "sequence_length=160",
        counting("Played", ", agent: {type: python, path: 'tests.support.agents:counting', max_calls: 3}"),
        "train_env_manager.tags=[Counting, Played]",
        "val_env_manager.tags=[Played]",
        *LOGGED,
    ).ended()
    assert_trained_is_what_was_sampled(run)
    metrics = run.metrics[1]
    assert (metrics["rollout/episodes"], metrics["rollout/dropped"]) == (8, 0)
    assert metrics["rollout/agent/steps"] == metrics["rollout/agent/calls"] == 3
    assert metrics["rollout/agent/rows"] == 1 and metrics["rollout/valid_rate"] == 1
    assert abs(metrics["rollout/Played/reward"]) > 0 and abs(metrics["rollout/Counting/reward"]) > 0
    assert run.summary["eval"]["after"]["valid_rate"] is None
    turns = Counter(line["turn"] for line in run.logged("turns.jsonl"))
    assert turns[1] == turns[2] == turns[3] >= 8


def test_programs_go_on_while_weights_are_updated(rlvr):
    run = rlvr(
        *SMALL,
        "agent={type: python, path: 'tests.support.agents:two_turns'}",
        "validation=null",
        "actor_infer.device_mapping=[1]",
        "max_steps=4",
        "async_generation_ratio=1",
        "rollout_window=1",
        "response_length=24",
        "train_infer_correction={is_weight: {enabled: true}}",
        train=[""] * 8,
    ).ended()
    answers = assert_trained_is_what_was_sampled(run)
    assert sum(answers.values()) == 4 * 8 * 3 and set(answers.values()) <= {1, 2}
    assert len({version for line in run.logged("sampled.jsonl") for version in line["versions"]}) > 1
    assert all(run.metrics[step]["rollout/agent/rows"] == 2 for step in range(1, 5))
    run.assert_nothing_left()


def test_programs_that_fail_are_tried_again_dropped_and_counted(rlvr):
    run = rlvr(
        *SMALL,
        "agent={type: python, path: 'tests.support.agents:unreliable', retries: 1}",
        "actor_train.data_args.shuffle=false",
        "rewards.letters.max_error_rate=0.6",
        "validation=null",
        train=[""] * 4,
    ).ended()
    first, second = run.metrics[1], run.metrics[2]
    assert (first["rollout/episodes"], first["rollout/dropped"], first["rollout/env_errors"]) == (4, 4, 8)
    assert (second["rollout/episodes"], second["rollout/dropped"]) == (8, 0)
    assert 1 <= second["rollout/env_errors"] <= 4, "those of the second task, played side by side"
    assert "ConnectionError: the browser went away" in (run.path / "logs" / "roll.log").read_text()


# ---- a policy with tools: what it calls is answered, scored, trained and evaluated

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
    write_lines(folder / "train.jsonl", rows("t", ORDERS))


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
    served = f"tools.servers.http={{url: '{url}', only: [multiply], timeout: 60}}"
    repeated_through_a_kill(rlvr, 4, *CALLING, served)
