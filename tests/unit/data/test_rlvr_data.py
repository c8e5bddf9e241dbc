"""What happens before any worker starts: the data is made and read, and everything wrong with it ends the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.configs.prompts import DataGeneratorConfig
from roll.configs.rlvr import RLVRConfig
from roll.data.prompts import DataError
from roll.distributed.cluster.errors import WorkerDiedError
from roll.models.tiny import make_tiny_model
from roll.pipeline.prompts import PromptRolloutWorkers, load_datasets, load_renderer, make_data
from roll.pipeline.rlvr import run_rlvr

CALLS: list[dict[str, Any]] = []


def generate(folder: Path, **args: Any) -> None:
    CALLS.append(args)
    if args.get("fail"):
        raise ValueError("fail: got true, expected false")
    (folder / "train.jsonl").write_text("made")


def rows(tag: str, count: int) -> str:
    lines = ({"id": f"{tag}{n}", "tag": tag, "prompt": f"{n}?", "solution": n} for n in range(count))
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(path, seed=1)
    return str(path)


def config(model: str, tmp_path: Path, **data: Any) -> RLVRConfig:
    (tmp_path / "train.jsonl").write_text(rows("a", 3) + rows("b", 2))
    (tmp_path / "val.jsonl").write_text(rows("a", 1))
    files = {name: {"file_name": str(tmp_path / f"{name}.jsonl"), "prompt": "prompt"} for name in ("train", "val")}
    verifiers = [{"name": "format"}]
    return RLVRConfig.model_validate(
        {
            "pretrain": model,
            "adv_estimator": "grpo",
            "output_dir": str(tmp_path / "output"),
            "rewards": {"one": {"tag_included": ["a", "b"], "verifiers": verifiers}}
            if "domain_interleave_probs" not in data
            else {name: {"tag_included": [tag], "verifiers": verifiers} for name, tag in (("one", "a"), ("two", "b"))},
            "actor_train": {"data_args": files["train"] | data},
            "validation": {"data_args": files["val"]},
        }
    )


def test_datasets_are_read_and_told_of_in_a_line_each(model: str, tmp_path: Path) -> None:
    run = config(model, tmp_path)
    datasets = load_datasets(run, load_renderer(run))
    assert datasets.train is not None and len(datasets.train) == 5
    train, val = datasets.describe()
    assert train.startswith("training data: 5 prompts (a 3, b 2): 5 rows read")
    assert val.startswith("held-out data: 1 prompts (a 1)")
    only = run.model_copy(update={"eval_only": True})
    assert load_datasets(only, load_renderer(only)).train is None
    assert len(load_datasets(run.model_copy(update={"validation": None}), load_renderer(run)).describe()) == 1


def test_held_out_prompts_have_a_bound_of_their_own(model: str, tmp_path: Path) -> None:
    run = config(model, tmp_path, prompt_overflow="drop")
    renderer, short = load_renderer(run), {"prompt_length": 1}
    with pytest.raises(DataError, match="more than prompt_length = 1 tokens"):
        load_datasets(run.model_copy(update=short), renderer)
    datasets = load_datasets(run.model_copy(update={**short, "val_prompt_length": 64, "eval_only": True}), renderer)
    assert datasets.val is not None and len(datasets.val) == 1


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"file_name": "no-such.jsonl"}, "no-such.jsonl: no such file or folder"),
    ({"prompt": "question"}, "train.jsonl:1: "),
    ({"dataset_cls": "roll.nowhere:Data", "file_name": None}, "roll.nowhere"),
    ({"domain_interleave_probs": {"one": 1.0}}, "domain_interleave_probs: got no share for 'two' (2 prompts)"),
    ({"template": "{{ no such"}, "template"),
]


@pytest.mark.parametrize(("data", "message"), WRONG, ids=[" ".join(data) for data, _ in WRONG])
def test_wrong_data_is_exit_code_2_before_anything_starts(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], data: dict[str, Any], message: str
) -> None:
    assert run_rlvr(config(model, tmp_path, **data)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "output").exists()


def test_data_is_made_once_for_equal_arguments(tmp_path: Path) -> None:
    def make(**args: Any) -> int:
        CALLS.clear()
        make_data(DataGeneratorConfig(path=f"{__name__}:generate", folder=str(tmp_path / "data"), args=args))
        return len(CALLS)

    assert make(size=3) == 1 and CALLS == [{"size": 3}]
    assert (tmp_path / "data" / "train.jsonl").read_text() == "made"
    assert make(size=3) == 0
    assert make(size=4) == 1
    with pytest.raises(ValueError, match="expected false"):
        make(fail=True)
    assert make(size=4) == 1, "what a failed call may have left counts as not made"


def test_a_generator_that_refuses_its_arguments_is_exit_code_2(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = DataGeneratorConfig(path=f"{__name__}:generate", folder=str(tmp_path / "data"), args={"fail": True})
    assert run_rlvr(config(model, tmp_path).model_copy(update={"data_generator": generator})) == 2
    assert "fail: got true, expected false" in capsys.readouterr().err


class Rewards:
    """A reward cluster, alive or not."""

    def __init__(self, retries: list[int] | None) -> None:
        self.retries = retries

    def call(self, method: str) -> list[int]:
        assert method == "take_retries"
        if self.retries is None:
            raise WorkerDiedError("reward_dead", 0, method, 3, "killed")
        return self.retries


def test_a_reward_worker_that_died_after_its_last_answer_does_not_end_the_step() -> None:
    roles = PromptRolloutWorkers.__new__(PromptRolloutWorkers)
    roles._rewards = {"alive": Rewards([2, 3]), "dead": Rewards(None)}  # type: ignore[dict-item]
    assert roles.take_retries() == {"reward/alive/retries": 5, "reward/dead/retries": 0}
