"""The command line: exit codes, reports, printing, and how little a wrong configuration loads."""

import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from roll.configs.agentic import AgenticConfig
from roll.configs.loader import load_config
from roll.pipeline.cli import main
from roll.pipeline.programs import PROGRAMS

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples" / "start_agentic_pipeline.py"
CONFIGS = ROOT / "examples" / "config"


def test_a_wrong_configuration_ends_with_code_2_within_5_seconds_of_a_processor():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, str(SCRIPT), "--config_name", "agentic_sokoban", "max_stepz=3", "seed=x"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/", check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
    assert result.returncode == 2
    assert result.stdout == ""
    assert "2 problems" in result.stderr
    assert "did you mean max_steps?" in result.stderr
    assert "Traceback" not in result.stderr


def test_validate_only_says_what_the_configuration_amounts_to(capsys):
    assert main(["--config_name", "agentic_sokoban_qwen2.5_0.5b", "--validate-only"]) == 0
    out = capsys.readouterr().out
    assert "1024 episodes" in out
    assert "8 data-parallel" in out
    assert "actor_infer, reference" in out  # the placement table


def test_print_config_is_resolved_has_no_secrets_and_can_be_read_back(capsys, tmp_path):
    secret = "system_envs.WANDB_API_KEY=hunter2hunter2"
    assert main(["--print-config", "max_steps=5", secret, "actor_train.device_mapping=list(range(0,1))",
                 "actor_train.training_args.gradient_accumulation_steps=8", "critic.device_mapping=[1]",
                 "critic.training_args.gradient_accumulation_steps=8"]) == 0  # fmt: skip
    text = capsys.readouterr().out
    assert "hunter2" not in text
    values = yaml.safe_load(text)
    assert values["max_steps"] == 5
    assert values["actor_train"]["device_mapping"] == [0]
    assert "${" not in text
    (tmp_path / "printed.yaml").write_text(text)
    again = load_config(AgenticConfig, "printed", tmp_path)
    assert again.model_dump(mode="json") == values


def test_options_and_overrides_may_come_in_any_order_and_help_gives_examples(capsys):
    assert (
        main(
            ["seed=3", "--print-config", "--config_path", str(CONFIGS), "max_steps=2", "--config-name=agentic_sokoban"]
        )
        == 0
    )
    values = yaml.safe_load(capsys.readouterr().out)
    assert (values["seed"], values["max_steps"]) == (3, 2)
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "agentic_sokoban_qwen2.5_0.5b" in out
    assert "actor_train.training_args.learning_rate=1e-4" in out


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_what_the_help_of_a_start_script_shows_is_valid(capsys, program):
    with pytest.raises(SystemExit):
        main(["--help"], program)
    option = f"--config_name {program.default}"
    lines = [line for line in capsys.readouterr().out.splitlines() if option in line]
    shown = [shlex.split(line[line.index(option) :]) for line in lines]
    assert len(shown) == 4
    for words in shown:
        assert main([*words, "--validate-only"], program) == 0, words


def test_an_unknown_option_and_an_unknown_configuration_end_with_code_2(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["--confg_name", "x"])
    assert ended.value.code == 2
    assert main(["--config_name", "agentic_sokobann"]) == 2
    assert "did you mean agentic_sokoban?" in capsys.readouterr().err
    assert main(["--config_path", str(tmp_path / "nowhere")]) == 2
