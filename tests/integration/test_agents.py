"""Agent programs in runs of the RLVR pipeline as a user starts them: what is trained is what the engine saw."""

import itertools
import json
from collections import Counter

import pytest

from tests.integration.conftest import ROOT, Run, rows
from tests.support.lines import write_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
"""unit/rollout/agents/test_programs.py has their rows and each failure, test_rlvr_pipeline.py the pipeline."""

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
    write_lines(tmp_path / "train.jsonl", rows("t", [""] * 4))
    write_lines(tmp_path / "val.jsonl", rows("v", [""] * 2))
    run = rlvr(
        *SMALL,
        f"agent={{command: [python, {PROGRAM}], timeout: 200}}",
        "validation.generating_args={num_return_sequences: 1, max_new_tokens: 3}",
        "val_before_train=false",
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
        "custom_envs.Played={env_type: 'tests.support.faults:CountingEnv', max_steps: 3, agent_system_template: '', "
        "agent: {type: python, path: 'tests.support.agents:counting', max_calls: 3}}",
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


def test_programs_go_on_while_weights_are_updated(rlvr, tmp_path):
    write_lines(tmp_path / "train.jsonl", rows("t", [""] * 8))
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
    ).ended()
    answers = assert_trained_is_what_was_sampled(run)
    assert sum(answers.values()) == 4 * 8 * 3 and set(answers.values()) <= {1, 2}
    assert len({version for line in run.logged("sampled.jsonl") for version in line["versions"]}) > 1
    assert all(run.metrics[step]["rollout/agent/rows"] == 2 for step in range(1, 5))
    run.assert_nothing_left()


def test_programs_that_fail_are_tried_again_dropped_and_counted(rlvr, tmp_path):
    write_lines(tmp_path / "train.jsonl", rows("t", [""] * 4))
    run = rlvr(
        *SMALL,
        "agent={type: python, path: 'tests.support.agents:unreliable', retries: 1}",
        "actor_train.data_args.shuffle=false",
        "rewards.letters.max_error_rate=0.6",
        "validation=null",
    ).ended()
    first, second = run.metrics[1], run.metrics[2]
    assert (first["rollout/episodes"], first["rollout/dropped"], first["rollout/env_errors"]) == (4, 4, 8)
    assert (second["rollout/episodes"], second["rollout/dropped"]) == (8, 0)
    assert 1 <= second["rollout/env_errors"] <= 4, "those of the second task, played side by side"
    assert "ConnectionError: the browser went away" in (run.path / "logs" / "roll.log").read_text()
