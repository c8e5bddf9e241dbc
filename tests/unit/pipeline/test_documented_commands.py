"""Commands of the README and the documents, and the chain of examples: what they name is there and valid.

A command of a kind that nobody has thought of here fails, so that it gets its check.
"""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roll.__main__ import command_line
from roll.__main__ import main as roll
from roll.configs.compose import compose_config
from roll.configs.loader import load_composed
from roll.demo.arithmetic import write_pairs
from roll.pipeline.cli import main as start_script
from roll.pipeline.programs import PROGRAMS, program_of
from roll.utils.registry import extra, import_path
from tests.support.lines import read_lines

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TOOLS = {".", "eval", "export", "lm_eval", "openssl", "python3", "ray"}
"""Commands of others, which are not checked."""
BESIDE = {"eval", "generate", "score", "chat", "serve", "export", "diagnose"}
BESIDE |= {"watch", "report", "compare", "verify", "replay", "bundle"}
"""Commands on files that a reader has."""
PLACEHOLDERS = ("NAME", "KEY", "…", "<")


def commands(text: str) -> Iterator[str]:
    """Lines of shell blocks, continued ones joined, and commands in the text."""
    for block in re.findall(r"```(?:bash|sh|console)\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            yield from line.split(" && ")
    yield from re.findall(r"`((?:\.venv/bin/)?(?:roll|make|pip|python|pytest|scripts/[^\s`]+) [^`\n]+)`", text)


FOUND = sorted(
    {
        shlex.join(words)
        for name in DOCUMENTS
        for command in commands((ROOT / name).read_text(encoding="utf-8"))
        if (words := shlex.split(command, comments=True)) and not any(mark in command for mark in PLACEHOLDERS)
    }
)


def test_the_documents_have_commands():
    assert len(FOUND) > 25 and any(command.startswith("roll train") for command in FOUND)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the examples, and a home with the configuration that documents call the reader's own."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for folder in (tmp_path, tmp_path / "configs"):
        folder.mkdir(exist_ok=True)
        (folder / "mine.yaml").write_text("defaults: [agentic_sokoban, _self_]\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = tmp_path / "smollm2"  # the tests do without the packages that it is made of
    model.mkdir()
    shape = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    (model / "config.json").write_text(json.dumps({**shape, **heads, "vocab_size": 49152, "tie_word_embeddings": True}))
    for name in ("make", "made"):
        monkeypatch.setattr(extra("smollm2"), name, lambda: model)
    monkeypatch.syspath_prepend(ROOT / "examples")  # as a start script there has it
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("command", FOUND)
def test_a_documented_command_is_one_that_works(command):
    words = shlex.split(command)
    settings = [words.pop(0) for word in list(words) if re.match(r"[A-Za-z_]+=", word) and words[0] == word]
    if not words:  # an override shown by itself
        assert roll(["validate", "rlvr_math", *settings]) == 0
        return
    tool, arguments = words[0].removeprefix(".venv/bin/"), words[1:]
    if tool == "roll" and len(arguments) > 1 and arguments[0] in BESIDE:  # their files are a reader's own
        assert not [word for word in command_line().parse_known_args(arguments)[1] if word.startswith("-")]
    elif tool == "roll" and len(arguments) > 1:  # `roll validate` alone is a name in a sentence
        assert roll(["validate", *arguments[1:]] if arguments[0] == "train" else arguments) == 0
    elif tool == "roll":
        assert arguments[0] in ("train", "validate", "import", "plan", "doctor", *BESIDE)
    elif tool == "make":
        check_make(arguments)
    elif tool == "pip":
        check_pip(arguments)
    elif tool == "python" and arguments[0].startswith("examples/start_"):
        check_start_script(arguments)
    elif tool == "pytest" or arguments[:2] == ["-m", "pytest"]:
        check_pytest(arguments[2:] if tool == "python" else arguments)
    elif tool == "python" or tool.startswith("scripts/"):
        assert (ROOT / (arguments[0] if tool == "python" else tool)).is_file()
    else:
        assert tool in TOOLS, f"no check for {tool}"


def test_make_demo_runs_a_valid_configuration(machine):
    (recipe,) = re.findall(r"^demo:.*\n\t\$\(BIN\)/python (.*) \$\(DEMO_ARGS\)$", makefile(), re.MULTILINE)
    check_start_script(shlex.split(recipe))


def check_start_script(arguments: list[str]) -> None:
    (program,) = [each for each in PROGRAMS.values() if f"examples/{each.script}" == arguments[0]]
    assert start_script([*arguments[1:], "--validate-only"], program) == 0


def check_make(arguments: list[str]) -> None:
    for word in arguments:
        name, equals, value = word.partition("=")
        if equals:
            assert name == "DEMO_ARGS" and roll(["validate", "agentic_sokoban", *shlex.split(value)]) == 0
        else:
            assert re.search(rf"^{name}:", makefile(), re.MULTILINE), f"no target {name}"


def check_pip(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for package in re.findall(r"(?:\.|roll-rl)\[([\w,-]+)\]", " ".join(arguments)):
        assert set(package.split(",")) <= set(project["optional-dependencies"])


def check_pytest(arguments: list[str]) -> None:
    marker = arguments[arguments.index("-m") + 1] if "-m" in arguments else "gpu"
    pytest_options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]
    assert marker in {line.partition(":")[0] for line in pytest_options["ini_options"]["markers"]}
    assert all((ROOT / path).exists() for path in arguments if path.startswith("tests"))


def makefile() -> str:
    return (ROOT / "Makefile").read_text(encoding="utf-8")


# The chain of examples: its stages are those of the script, and hold the same problems out

FOLDER = ROOT / "examples" / "chain_math"
STAGES = sorted(path.stem for path in FOLDER.glob("[0-9]*.yaml"))


def stages_of_the_script() -> dict[str, list[str]]:
    """Further words of each stage, with a folder in place of the variable."""
    text = FOLDER.with_suffix(".sh").read_text(encoding="utf-8")
    found = re.findall(r"^stage (\S+)([^#\n]*)", text, re.MULTILINE)
    return {name: words.replace('"', "").replace("$folder", "/chain").split() for name, words in found}


def test_the_script_runs_every_configuration():
    assert list(stages_of_the_script()) == STAGES and len(STAGES) == 5


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_is_valid_and_starts_from_an_earlier_one(name):
    words = stages_of_the_script()[name]
    composed = compose_config(name, FOLDER, ["output_dir=/chain", "seed=3", *words])
    program = PROGRAMS[str(program_of(composed.values))]
    config: Any = load_composed(import_path(program.schema), name, composed)
    assert (config.exp_name, config.output_dir, config.seed) == (name, "/chain", 3)
    assert config.data_generator.folder == "/chain/data"
    assert config.save_steps == config.max_steps, "one checkpoint, at the end"
    models = re.findall(r"/chain/models/([\w-]+)", json.dumps(composed.values))
    assert all(STAGES.index(model) < STAGES.index(name) for model in models)
    assert bool(models) == (name not in ("1-sft", "2-student"))


def test_what_is_held_out_is_trained_on_by_no_stage(tmp_path):
    args = compose_config("1-sft", FOLDER, []).values["data_generator"]["args"]
    sets = [compose_config(name, FOLDER, []).values["data_generator"]["args"] for name in STAGES]
    assert all(other == args for other in sets), "the stages share their data"
    write_pairs(tmp_path, **args)

    def problems(name: str) -> set[frozenset[int]]:
        return {frozenset(map(int, re.findall(r"\d+", row["prompt"]))) for row in read_lines(tmp_path / name)}

    held_out = problems("val.jsonl") | problems("val_pairs.jsonl")
    assert len(held_out) > 300
    for name in ("train.jsonl", "demonstrations.jsonl", "pairs.jsonl"):
        assert not held_out & problems(name)
