"""The ``roll`` command: what it lists, how it finds a pipeline, and what it says of a wrong line."""

import re
import subprocess
import sys
from pathlib import Path

import argcomplete
import pytest
import yaml

from roll import __version__
from roll.__main__ import command_line, main
from roll.configs import SHIPPED
from roll.models.tiny import make_tokenizer
from roll.pipeline import cli
from roll.pipeline.programs import PROGRAMS, configurations
from roll.utils.registry import extra, import_path
from tests.support.cli import call, refused


def test_version(capsys):
    for command in (main, cli.main):
        with pytest.raises(SystemExit) as ended:
            command(["--version"])
        assert ended.value.code == 0
        assert capsys.readouterr().out == f"roll {__version__}\n"


NOBODY = "^a path begins with ~ and a name that no user of this machine has$"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "usage: roll"),
        *(([group], f"usage: roll {group}") for group in ("config", "env", "verifiers", "template")),
        (["chat", "~nobody-here/m"], NOBODY),
        (["validate", "rlvr_math", "pretrain=~nobody-here"], NOBODY),
        (["validate", "./mine.yml"], "a file whose name ends in .yaml"),
        (["validate", "./mine"], "a file whose name ends in .yaml"),
        (["train", "traj_envs"], r"rewards \(rlvr\)"),  # a file without a pipeline's section is no configuration
        (["score", "x.jsonl", "--verifier", "math", "--overwrite"], "unrecognized arguments: --overwrite$"),
        (["chat", "x", "--engine"], "unrecognized arguments: --engine$"),
    ],
)
def test_what_is_wrong_with_a_command_line_is_told(capsys, tmp_path, monkeypatch, words, told):
    for name in ("mine.yml", "mine"):
        (tmp_path / name).write_text("defaults: [rlvr_math, _self_]\n")
    monkeypatch.chdir(tmp_path)
    assert re.search(told, refused(capsys, *words))


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_start_script_without_arguments_lists_its_configurations_and_runs_nothing(capsys, program):
    assert cli.main([], program) == 2
    err = capsys.readouterr().err
    assert "--config_name" in err and program.default in err


@pytest.mark.parametrize(
    ("call", "words"), [(main, ["validate", "rlvr_math"]), (cli.main, ["--config_name", "agentic_sokoban"])]
)
def test_a_command_that_is_interrupted_shows_no_traceback(monkeypatch, capsys, call, words):
    def stop(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("roll.pipeline.cli.read_config", stop)
    assert call(words) == 130
    assert capsys.readouterr() == ("", "")


def test_a_file_whose_name_begins_with_a_tilde_is_a_file(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("~mine.yaml").write_text("defaults: [sft_math, _self_]\nexp_name: mine\n")
    assert "~mine: valid" in call(capsys, "validate", "./~mine.yaml")[0]


def test_output_that_nobody_reads_to_its_end_shows_no_traceback():
    command = [sys.executable, "-m", "roll", "config", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # as head does when it has its lines
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_a_pipe_that_is_not_the_output_is_an_error_of_its_own(monkeypatch, capsys):
    def broken(*_: object) -> int:
        raise BrokenPipeError(32, "a worker has left")

    monkeypatch.setattr("roll.pipeline.cli.read_config", broken)
    with pytest.raises(BrokenPipeError, match="a worker has left"):
        main(["validate", "rlvr_math"])


def test_lists_name_what_a_configuration_may_choose(capsys):
    out, _ = call(capsys, "config", "list")
    assert "agentic_sokoban " in out and "rlvr_math " in out and "train=deepspeed|fsdp2|megatron" in out
    assert "traj_envs" not in out  # a file for others to include
    assert "rlvr_tools_agent " in out and "rlvr_mcp " in out  # whose pipeline is that of the file that they include
    for group in ("env", "envs"):
        assert "sokoban      Sokoban, as text or as a picture" in call(capsys, group, "list")[0]
    out, _ = call(capsys, "verifiers", "list")
    assert {"custom", "gsm8k", "math"} <= {line.split()[0] for line in out.splitlines()}


def test_no_pipeline_reads_the_sections_by_which_an_earlier_one_is_found():
    fields = [set(import_path(program.schema).model_fields) for program in PROGRAMS.values()]
    for position, program in enumerate(PROGRAMS.values()):
        assert set(program.sections) <= fields[position]
        assert not set(program.sections) & set().union(*fields[position + 1 :])
        assert (SHIPPED.parent / program.script).is_file()


@pytest.mark.parametrize("name", configurations(SHIPPED))
def test_every_shipped_configuration_is_valid_with_the_pipeline_that_is_found_for_it(capsys, monkeypatch, name):
    monkeypatch.syspath_prepend(SHIPPED.parent)  # where the agent programs of some are
    monkeypatch.setattr(extra("smollm2"), "make", lambda: None)  # whose package the tests do without
    assert f"{name}: valid" in call(capsys, "validate", name)[0]


def test_a_file_and_its_overrides_in_any_order(capsys, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [rlvr_math, _self_]\nmax_steps: 7\n")
    file = ["config", "print", str(tmp_path / "mine.yaml"), "seed=5", "train=megatron", "infer=vllm"]
    named = ["config", "print", "mine", "seed=5", "--config-path", str(tmp_path), "train=megatron", "infer=vllm"]
    printed, again = (call(capsys, *words)[0] for words in (file, named))
    values = yaml.safe_load(printed)
    assert printed == again
    assert (values["seed"], values["max_steps"], values["exp_name"]) == (5, 7, "rlvr_math")
    assert values["actor_train"]["strategy_args"] == {"strategy_name": "megatron_train", "strategy_config": {}}


@pytest.mark.parametrize("asked", PROGRAMS)
@pytest.mark.parametrize("meant", PROGRAMS)
def test_another_pipelines_configuration_is_told_which_script_runs_it(capsys, monkeypatch, tmp_path, asked, meant):
    monkeypatch.chdir(tmp_path)
    code = cli.main(["--config_name", PROGRAMS[meant].default, "--validate-only"], PROGRAMS[asked])
    assert code == (0 if asked == meant else 2)
    if asked != meant:
        told = capsys.readouterr().err
        assert "1 problem" in told and f"examples/{PROGRAMS[meant].script}" in told


def test_aliases_that_stand_for_millions_of_values_are_refused_at_once(capsys, tmp_path):
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 9)}]\n" for number in range(1, 12)
    )
    (tmp_path / "bomb.yaml").write_text(bomb)
    for text in ("defaults: [bomb, agentic_sokoban, _self_]\n", f"defaults: [agentic_sokoban, _self_]\n{bomb}"):
        (tmp_path / "mine.yaml").write_text(text)
        told = refused(capsys, "validate", tmp_path / "mine.yaml")
        assert "e+11 keys and values, with aliases (*name) written out" in told
    (tmp_path / "mine.yaml").write_text("defaults: [agentic_sokoban, _self_]\nsystem_envs: &e {A: '1'}\n")
    call(capsys, "validate", tmp_path / "mine.yaml")


@pytest.mark.parametrize("words", [["--max_steps=3"], ["--max_steps", "3"]])
def test_a_key_given_as_an_option_is_told_its_spelling(capsys, words):
    for command, given in ((main, ["train", "rlvr_math", *words]), (cli.main, words)):
        with pytest.raises(SystemExit) as ended:
            command(given)
        assert ended.value.code == 2
        assert "a key of the configuration is given as max_steps=" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["max_steps", "=", "3"], ["max_steps=", "3"], ["max_steps", "=3"]])
def test_spaces_around_an_equals_sign_are_one_problem(capsys, words):
    told = refused(capsys, "validate", "rlvr_math", *words, "seed=1")
    assert "1 problem" in told and "max_steps=3" in told and "no spaces around =" in told


def test_a_shell_is_offered_completions(tmp_path):
    out = tmp_path / "offered"
    line = "roll train agentic_sok"
    environment = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(out), "PYTHONPATH": str(SHIPPED.parents[1])}
    environment |= {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    code = "import sys; sys.argv[0] = 'roll'; from roll.__main__ import main; main()"
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False)
    assert set(out.read_text().split("\013")) == {"agentic_sokoban", "agentic_sokoban_qwen2.5_0.5b"}


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("roll train rlvr_math max_st", "max_steps="),
        ("roll train rlvr_math tra", "train=megatron"),
        ("roll train rlvr_math async_save=t", "async_save=true"),
        ("roll train rlvr_math pg_variant=dp", "pg_variant=dppo_kl"),
        ("roll train rlvr_math actor_train.strategy_args.strategy_config.fs", ".fsdp_size="),
        ("roll train rlvr_math train=megatron actor_train.strategy_args.strategy_config.recompute_m", "_modules="),
        ("roll train rlvr_math rewards.arithmetic.timeout_", "rewards.arithmetic.timeout_score="),
        ("roll train rlvr_math rewards.arithmetic.verifiers.0.name=gs", "verifiers.0.name=gsm8k"),
        ("roll train agentic_sokoban custom_envs.SimpleSokoban.env_type=sok", ".env_type=sokoban"),
        ("roll train ./mine.yaml rewards.own.retr", "rewards.own.retries="),
        ("roll eval run/checkpoints/checkpoint-3 rewards.saved.retr", "rewards.saved.retries="),
        ("roll eval --config rlvr_mcp run rewards.prod", "rewards.products.timeout="),
        ("roll chat model generating_args.ignore", "generating_args.ignore_eos="),
        ("roll generate model x.jsonl --engine hf", "hf_infer"),
        ("roll score x.jsonl --verifier gs", "gsm8k"),
        ("roll plan rlvr_math --devices H10", "H100"),
        ("roll env check sok", "sokoban"),
        ("roll explain max_st", "max_steps"),
    ],
)
def test_completion_offers_names_keys_and_values(line, some, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    domain = "actor_train: {}\nrewards: {%s: {tag_included: [a], verifiers: [{name: math}]}}\n"
    Path("mine.yaml").write_text(domain % "own")
    Path("run/checkpoints/checkpoint-3").mkdir(parents=True)
    Path("run/config.yaml").write_text(domain % "saved")
    *words, prefix = line.split(" ")
    found = argcomplete.CompletionFinder(command_line())._get_completions(words, prefix, "", None)
    assert any(each.strip().endswith(some) for each in found), found
    assert all(each.startswith(prefix) for each in found)


def test_a_chat_template_is_checked(capsys, tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    check = ("template", "check")
    page, _ = call(capsys, *check, tmp_path)
    assert "append-only:       answers yes" in page and "tool dialect:      hermes" in page
    forgetful = "{% for m in messages[-1:] %}{{ m.content }}<|im_end|>{% endfor %}"
    assert "problem  rewrites-history: " in call(capsys, *check, tmp_path, "--template", forgetful, code=1)[0]
    assert "'qwen9' is neither 'native'" in refused(capsys, *check, tmp_path, "--template", "qwen9")
    assert "cannot render" in refused(capsys, *check, tmp_path, "--template", "{% x")
    assert "missing" in refused(capsys, *check, tmp_path / "missing")
