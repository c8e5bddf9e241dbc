"""The command line: exit codes, reports, printing, how little a wrong configuration loads, and ``roll explain``."""

import resource
import shlex
import subprocess
import sys

import pytest
import yaml

from roll.__main__ import main as roll
from roll.configs import SHIPPED
from roll.configs.agentic import AgenticConfig
from roll.configs.explain import all_keys, engine_options, explain
from roll.configs.loader import load_config
from roll.configs.schema import leaf_paths
from roll.extras.importers import SYSTEMS
from roll.extras.importers.table import SECTION, meaning, rows
from roll.pipeline.cli import main
from roll.pipeline.programs import PROGRAMS, schemas


def test_a_wrong_configuration_ends_with_code_2_within_5_seconds_of_a_processor():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [
        sys.executable,
        str(SHIPPED.parent / "start_agentic_pipeline.py"),
        "--config_name",
        "agentic_sokoban",
        "max_stepz=3",
        "seed=x",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/", check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
    assert (result.returncode, result.stdout) == (2, "") and "Traceback" not in result.stderr
    assert "2 problems" in result.stderr and "did you mean max_steps?" in result.stderr


def test_validate_only_says_what_the_configuration_amounts_to(capsys):
    assert main(["--config_name", "agentic_sokoban_qwen2.5_0.5b", "--validate-only"]) == 0
    out = capsys.readouterr().out  # with the placement table
    assert all(words in out for words in ("1024 episodes", "8 data-parallel", "actor_infer, reference"))


def test_print_config_is_resolved_has_no_secrets_and_can_be_read_back(capsys, tmp_path):
    secret = "system_envs.WANDB_API_KEY=hunter2hunter2"
    accumulated = (f"{role}.training_args.gradient_accumulation_steps=8" for role in ("actor_train", "critic"))
    devices = ("actor_train.device_mapping=list(range(0,1))", "critic.device_mapping=[1]")
    assert main(["--print-config", "max_steps=5", secret, *devices, *accumulated]) == 0
    text = capsys.readouterr().out
    assert "hunter2" not in text and "${" not in text
    values = yaml.safe_load(text)
    assert (values["max_steps"], values["actor_train"]["device_mapping"]) == (5, [0])
    (tmp_path / "printed.yaml").write_text(text)
    assert load_config(AgenticConfig, "printed", tmp_path).model_dump(mode="json") == values


def test_options_and_overrides_may_come_in_any_order_and_help_gives_examples(capsys):
    options = ["--print-config", "--config_path", str(SHIPPED), "max_steps=2", "--config-name=agentic_sokoban"]
    assert main(["seed=3", *options]) == 0
    values = yaml.safe_load(capsys.readouterr().out)
    assert (values["seed"], values["max_steps"]) == (3, 2)
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "agentic_sokoban_qwen2.5_0.5b" in out
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


def told(capsys: pytest.CaptureFixture[str], word: str) -> str:
    assert roll(["explain", word]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_a_key_is_told_with_its_type_range_default_places_other_names_and_readers(capsys):
    out = told(capsys, "training_args.learning_rate")
    assert "key <role>.training_args.learning_rate" in out
    assert "type float range more than 0 default 1e-06 meaning Peak learning rate" in out
    assert "pipelines all" in out and "verl: actor_rollout_ref.actor.optim.lr (renamed)" in out
    assert "MindSpeed RL: actor_config.lr (renamed)" in out and "warm_start" not in out
    assert "one of: kl, k1, abs" in told(capsys, "kl_penalty")
    assert "tag_included, verifiers" in told(capsys, "rewards")
    out = told(capsys, "tensor_parallel_size")
    assert "read by vllm" in out and "read by fsdp2" in out
    assert "passed on to vLLM" in told(capsys, "enable_chunked_prefill")
    assert "read by math" in told(capsys, "strict_boxed")


def test_a_key_of_another_system_leads_to_ours_or_to_the_reason(capsys):
    assert "pg_clip key pg_clip" in told(capsys, "clip_ratio")
    out = told(capsys, "data.tokenizer")
    assert out.startswith("tokenizer_path key tokenizer_path") and "vLLM" not in out
    assert "(derived); args.kwargs of the verifier custom with batch" in told(capsys, "reward_model.reward_kwargs.x")
    assert "(dropped); pictures are prepared once" in told(capsys, "data.return_multi_modal_inputs")
    # The same name for something else.
    assert "MindSpeed RL: rl_config.init_kl_coef (derived: kl_loss_coef)" in told(capsys, "init_kl_coef")
    assert "env_groups" in told(capsys, "num_env_groups")


def test_keys_inside_lists_are_found_by_a_path_and_a_misspelt_one_is_told_the_nearest(capsys):
    key = "rewards.<domain>.verifiers.<number>.weight"
    for word in ("rewards.math.verifiers.0.weight", "verifiers.0.weight=2", key):
        assert f"key {key}" in told(capsys, word)
    for word, answer in (("max_stepss", "did you mean max_steps"), ("qqqqqqqq", "docs/configuration.md")):
        assert roll(["explain", word]) == 2 and answer in capsys.readouterr().err


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_everything_that_the_documents_list_is_explained(every):
    places = {place for key in all_keys(schemas(), engine_options()) for place in key.places}
    assert {path for schema in schemas().values() for path, _ in leaf_paths(schema)} <= places
    others = sorted({row.key for system in SYSTEMS for row in rows(system) if row.how != SECTION})
    assert [key for key in others[::every] if not explain(key, schemas(), engine_options())] == []
    lost = {row.here for row in rows("verl") if row.verdict == "renamed" and not row.here.endswith("**")} - {
        each.row.here for key in all_keys(schemas(), engine_options()) for each in meaning(key.name, key.places)
    }
    assert all(name.startswith(("tracker_kwargs.", "pf_ppo.")) or "strategy_config." in name for name in lost), lost
