"""Runs of the four systems: imported, they are what one would write here, and go to the end on the tiny model."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roll.__main__ import main
from roll.configs.compose import compose_config
from roll.configs.loader import load_composed
from roll.configs.rlvr import RLVRConfig
from tests.integration.conftest import RLVR_LAUNCHER
from tests.support.choice import needs
from tests.support.lines import write_lines

HERE = Path(__file__).parent / "imported"
RUNS = ("verl_grpo.sh", "roll.yaml", "verl_ppo.sh", "chatlearn.yaml", "mindspeed.yaml")
OTHERS_DATA = {"gsm8k", "math_rule", "math"}
"""Domains that the rows below belong to; an import names more, for whatever else may be in the files."""


@pytest.fixture
def data(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files as the four systems document them, of sums; where they and the model are, the environment says."""
    for name, count, shift in (("train", 12, 1), ("val", 4, 3)):
        rows = []
        for number in range(count):
            question, answer = f"what is {number} + {number + shift}?", str(2 * number + shift)
            messages = [{"role": "user", "content": question}]
            verl = {
                "data_source": "openai/gsm8k",
                "prompt": messages,
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": answer},
                "extra_info": {"split": name, "index": number},
            }
            ours = {"id": str(number), "tag": "math_rule", "messages": messages, "ground_truth": answer}
            rows.append({**verl, **ours, "problem": question, "answer": answer})
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
        write_lines(tmp_path / f"{name}.jsonl", rows)
        write_lines(tmp_path / "problems.jsonl", [{key: row[key] for key in ("problem", "answer")} for row in rows])
    monkeypatch.setenv("DATA", str(tmp_path))
    monkeypatch.setenv("MODEL", str(model))
    return tmp_path


def import_run(file: str, folder: Path) -> None:
    """``roll import`` of a file to ``mine.yaml``, with nothing left to edit."""
    system = file.partition(".")[0].partition("_")[0]
    assert main(["import", system, str(HERE / file), "-o", str(folder / "mine.yaml")]) == 0


def load(name: str, folder: Path) -> dict[str, Any]:
    """The whole configuration, with the rewards that the data asks for."""
    config = load_composed(RLVRConfig, name, compose_config(name, folder, ()))
    values = config.model_dump()
    rewards = values.pop("rewards")
    del values["reward_pretrain"]
    return values | {"rewards": {domain: rewards[domain] for domain in rewards if domain in OTHERS_DATA}}


@pytest.mark.parametrize("file", RUNS)
def test_what_is_imported_is_what_one_would_write(file, data):
    import_run(file, data)
    found, own = load("mine", data), load(Path(file).stem, HERE / "ours")
    if file.endswith(".sh") or file == "chatlearn.yaml":  # no row is of these
        found["rewards"].pop("math")
    assert found == own


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", RUNS)
def test_an_imported_run_goes_to_the_end(file, data, launch):
    import_run(file, data)
    needs(load("mine", data)["actor_train"]["strategy_args"]["strategy_name"])
    run = launch("infer=hf", "exp_name=run", config="mine", folder=data, script=RLVR_LAUNCHER).ended()
    assert run.summary["status"] == "completed" and run.summary["steps"] == 2
    assert all(run.metrics[step]["rollout/dropped"] == 0 for step in (1, 2))
    assert all("actor/grad_norm" in run.metrics[step] for step in (1, 2))
    run.assert_nothing_left()
