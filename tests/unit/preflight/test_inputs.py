"""Data, models and chat templates that a configuration names: what a run says of them before it starts."""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from roll.__main__ import main
from roll.agentic.tools.dialects import dialect_for
from roll.configs import SHIPPED
from roll.configs.agentic import AgenticConfig
from roll.configs.loader import load_config
from roll.configs.offline import SFTConfig
from roll.configs.pipeline import PipelineConfig
from roll.configs.preference import DPOConfig, RewardTrainingConfig
from roll.configs.rlvr import RLVRConfig
from roll.data.files import DataError
from roll.data.renderer import ChatRenderer
from roll.data.template_check import date_in_prompts
from roll.data.templates import ChatTemplate
from roll.pipeline.offline.dpo import _load as load_pairs
from roll.pipeline.offline.pipeline import load_datasets, load_sft_data
from roll.preflight import inputs
from roll.preflight.inputs import HEAD, check_data, check_hub, check_inputs
from roll.preflight.machine import check_machine
from roll.preflight.models import pictures_refused
from roll.preflight.templates import check_dialect, describe_template, policy_renderer
from tests.support.chat_families import FAMILIES, family_tokenizer
from tests.support.configs import problems_of
from tests.support.picture_models import make_processor
from tests.support.web import Reply, serving

LOADERS = {"sft_math": load_sft_data, "dpo_math": load_pairs}
TRAIN, VAL = "actor_train.data_args", "validation.data_args"
TRAINER = "actor_train.strategy_args.strategy_name"
MEGATRON = "actor_train.strategy_args={strategy_name: megatron_train, strategy_config: {context_parallel_size: 2}}"
FILTER = "rewards.arithmetic.query_filter_config"


def files_in(folder: Path) -> list[str]:
    return [f"{TRAIN}.file_name={folder}/train.jsonl", f"{VAL}.file_name={folder}/val.jsonl", "data_generator=null"]


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., RLVRConfig]:
    """``rlvr_math`` on files of one's own."""

    def _load(*overrides: str) -> RLVRConfig:
        words = (*files_in(tmp_path), "warm_start.file_name=d.jsonl", *overrides)
        return load_config(RLVRConfig, "rlvr_math", SHIPPED, words)

    return _load


def write(path: Path, *rows: Any) -> None:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def draw(folder: Path, *names: str) -> None:
    for name in names:
        Image.new("RGB", (28, 28)).save(folder / f"{name}.png")


def row(**changes: Any) -> dict[str, Any]:
    return {"prompt": "1+1=", "solution": "2", "tag": "arithmetic"} | changes


def test_rows_are_counted_and_absent_files_are_no_problem(load, tmp_path):
    write(tmp_path / "train.jsonl", row(), row(prompt="2+2="))
    there = f"data: {tmp_path}/train.jsonl: 2 rows (arithmetic 2)"
    assert check_data(load()) == ([there, f"data: {tmp_path}/val.jsonl: not there yet"], [])


def test_rows_that_the_run_would_refuse_are_problems(load, tmp_path):
    write(tmp_path / "val.jsonl", row())
    unnamed, untagged = {"question": "1+1=", "solution": "2", "tag": "arithmetic"}, {"prompt": "1+1=", "solution": "2"}
    for rows in ([row(), unnamed], [row(), "{broken"], [row(), untagged], []):
        write(tmp_path / "train.jsonl", *rows)
        _, (problem,) = check_data(load())
        assert problem.path == f"{TRAIN}.file_name"
        assert ("train.jsonl:2: " if rows else "no rows") in problem.hint


def test_prompts_that_are_longer_than_the_run_takes_are_told(load, tmp_path):
    write(tmp_path / "train.jsonl", row(), row(prompt="1+" * 30 + "1="))
    write(tmp_path / "val.jsonl", row(prompt="1+" * 40 + "1="))
    dropped = "prompts of more than prompt_length = 32 tokens are dropped: 1 row, the first"
    refused = ["train.jsonl:2: ", "expected at most prompt_length = 32"]
    for overflow, count, told in (("error", 2, refused), ("drop", 1, [f"{dropped} {tmp_path}/train.jsonl:2"])):
        lines, problems = check_data(load(f"{TRAIN}.prompt_overflow={overflow}", f"{VAL}.prompt_overflow=drop"))
        said = " ".join([*lines, *map(str, problems)])
        empty = "no prompts: all 1 have more than prompt_length = 32 tokens, the longest"
        assert len(problems) == count and all(words in said for words in (*told, empty))


def test_only_the_head_of_each_file_is_read_and_equal_problems_are_counted(load, tmp_path):
    write(tmp_path / "train.jsonl", *[row(tag="geometry")] * 300)
    _, (problem,) = check_data(load())
    assert problem.hint.endswith("and 295 more")
    lines = [row(prompt=f"{number}+1=") for number in range(HEAD)]
    write(tmp_path / "train.jsonl", *lines, "{broken")
    lines_said, problems = check_data(load())
    assert not problems
    assert lines_said[0].endswith(f"{HEAD:,} rows checked, the first {HEAD:,} of each file (arithmetic {HEAD:,})")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("seed=7", "the model has no processor for them"),
        (MEGATRON, "actor_train's megatron_train takes no pictures with context_parallel_size 2"),
        ("agent={command: [x]}", "agent is set"),
    ],
)
def test_pictures_where_nobody_takes_them_are_problems_of_their_rows(load, tmp_path, override, reason):
    write(tmp_path / "train.jsonl", row(), row(prompt="<image>?", images=["a.png"]))
    draw(tmp_path, "a")
    _, (problem,) = check_data(load(override))
    assert f"train.jsonl:2: 1 pictures, but {reason}" in problem.hint
    assert not check_data(load(override, f"{TRAIN}.image=null"))[1]


def test_families_that_were_not_compared_on_pictures_are_refused_by_name(load, tmp_path):
    write(tmp_path / "train.jsonl", row(prompt="<image>?", images=["a.png"]))
    draw(tmp_path, "a")
    config = make_processor(tmp_path / "model") / "config.json"
    assert not check_data(load(f"pretrain={tmp_path}/model"))[1]
    config.write_text(config.read_text().replace('"qwen3_vl"', '"qwen2_vl"'))
    _, (problem,) = check_data(load(f"pretrain={tmp_path}/model"))
    assert "train.jsonl:1: 1 pictures, but pretrain is of the family qwen2_vl" in problem.hint
    gemma = make_processor(tmp_path / "gemma", "gemma3")
    _, (problem,) = check_data(load(f"pretrain={gemma}", "actor_train.model_args.ulysses_size=2"))
    assert "actor_train's fsdp2_train was not compared on gemma3 with ulysses_size 2, but on" in problem.hint


ALONE = "has not been compared with plain Transformers on videos"
JUDGE = "{judge_model_type: api, judge_model_name: x, pictures: true}"
SEEING = f"rewards.arithmetic.verifiers=[{{name: judge, args: {JUDGE}}}]"


@pytest.mark.parametrize(
    ("family", "override", "reason"),
    [
        ("qwen3_vl", "seed=7", ""),
        (
            "qwen2_5_vl",
            "seed=7",
            "pretrain is of the family qwen2_5_vl, expected one that was compared on videos: qwen3",
        ),
        ("qwen3_vl", f"{TRAINER}=deepspeed_train", f"actor_train's deepspeed_train {ALONE}"),
        ("qwen3_vl", "actor_infer.strategy_args.strategy_name=sglang", f"actor_infer's sglang {ALONE}"),
        ("qwen3_vl", "agent={command: [x], pictures: true}", "agent is set: programs get text and pictures"),
        (
            "qwen3_vl",
            SEEING,
            "rewards.arithmetic has a verifier that sees pictures, which has not been compared on vid",
        ),
    ],
)
def test_videos_where_nobody_takes_them_are_problems_of_their_rows(load, tmp_path, family, override, reason):
    write(tmp_path / "train.jsonl", row(), row(prompt="<video>?", videos=[["a.png", "b.png"]]))
    draw(tmp_path, "a", "b")
    lengths = ("prompt_length=64", "sequence_length=112")
    keys = (f"pretrain={make_processor(tmp_path / 'model', family)}", override, *lengths)
    problems = check_data(load(*keys))[1]
    assert ["train.jsonl:2: 1 videos, but " + reason in each.hint for each in problems] == [True] * bool(reason)
    assert not check_data(load(*keys, f"{TRAIN}.video=null"))[1]


def test_reward_models_that_see_are_trained_as_they_were_compared(tmp_path):
    """Not by Megatron, and with an adapter of one family alone."""

    def refused(model: Path, **section: Any) -> str:
        worker = {"strategy_args": {"strategy_name": "fsdp2_train"}} | section
        return pictures_refused(RewardTrainingConfig.model_validate({"pretrain": str(model), "actor_train": worker}))

    adapter = {"model_args": {"lora_target": "q_proj"}}
    gemma, qwen = make_processor(tmp_path / "gemma", "gemma3"), make_processor(tmp_path / "qwen")
    assert not refused(qwen) and not refused(gemma) and not refused(qwen, **adapter)
    assert "were compared on qwen3_vl, not on gemma3" in refused(gemma, **adapter)
    assert "megatron_train" in refused(qwen, strategy_args={"strategy_name": "megatron_train"})


def test_conversations_are_read_too(tmp_path, capsys):
    """``roll validate`` of a supervised run: a missing column, a broken row, an empty answer, a tag nobody scores."""
    good, words = row(response="2"), ["validate", "sft_math", *files_in(tmp_path)]
    write(tmp_path / "val.jsonl", good, good)
    write(tmp_path / "train.jsonl", good, {"prompt": "1+1="}, "{broken", {"prompt": "1+1=", "response": " "})
    assert main(words) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "1 problem in the configuration" in told and f"{TRAIN}.file_name" in told
    for line, reason in ((2, "no column 'response'"), (3, "invalid JSON"), (4, "column 'response'")):
        assert f"train.jsonl:{line}: {reason}" in told, told
    write(tmp_path / "train.jsonl", good)
    write(tmp_path / "val.jsonl", good | {"tag": "geometry"})
    assert main(words) == 2
    assert "geometry" in capsys.readouterr().err
    write(tmp_path / "val.jsonl", good)
    assert main(words) == 0
    assert "1 rows (conversation 1)" in capsys.readouterr().out


def test_what_the_chat_template_leaves_out_or_refuses_is_told(tmp_path, capsys):
    asked, thinks = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2", "reasoning": "one"}
    write(tmp_path / "train.jsonl", {"m": [asked, thinks], "when": "now"}, {"m": [thinks, asked, thinks]})
    write(tmp_path / "val.jsonl", row(response="2"))
    words = ["validate", "sft_math", *files_in(tmp_path), f"{TRAIN}.prompt=null", f"{TRAIN}.messages=m"]
    assert main(words) == 0
    told = capsys.readouterr().out
    left_out = "the chat template drops reasoning_content of answers that are trained on: 2 rows, the first"
    assert f"warning: {tmp_path}/train.jsonl: {left_out} {tmp_path}/train.jsonl:1" in told
    assert f"data: {tmp_path}/train.jsonl: unused columns: when" in told
    template = tmp_path / "asks_first.jinja"
    template.write_text(
        "{{ raise_exception('the user speaks first') if messages[0].role != 'user' else '' }}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert main([*words, f"{TRAIN}.template={template}"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "train.jsonl:2: the chat template cannot render the messages: the user speaks first" in told


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub on this machine that has one model; the list collects what it is asked."""

    def answer(path: str, _: Any) -> Reply:
        return Reply(200 if path.endswith("/org/there") else 401, delay=5 if "slow" in path else 0)

    with serving(answer) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield server.paths


def test_a_hub_is_asked_for_a_models_name(load, hub, monkeypatch):
    assert check_hub(load("pretrain=org/there")) == (["pretrain: org/there: a name on the Hugging Face hub, there"], [])
    lines, (problem,) = check_hub(load("pretrain=org/nowhere"))
    assert (lines, problem.path) == ([], "pretrain") and "401" in problem.hint
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (line,), problems = check_hub(load("pretrain=org/nowhere"))
    assert line.endswith("not checked: HF_HUB_OFFLINE is set") and not problems
    assert hub == ["/api/models/org/there", "/api/models/org/nowhere"], "offline nothing is asked"


def test_a_hub_that_does_not_answer_does_not_hold_anything_up(load, hub, monkeypatch):
    monkeypatch.setattr(inputs, "HUB_SECONDS", 0.5)
    started = time.monotonic()
    said = (["pretrain: org/slow: a name on the Hugging Face hub, not checked: no answer"], [])
    assert check_hub(load("pretrain=org/slow")) == said
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert "not checked: no answer" in check_hub(load("pretrain=org/there"))[0][0]
    assert time.monotonic() - started < 4


def test_an_output_folder_that_cannot_be_made_is_told_before_the_run(load, tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("")
    monkeypatch.chdir(tmp_path)

    def hints(folder: str) -> list[str]:
        return [each.hint for each in check_machine(load(f"output_dir={folder}")) if each.path == "output_dir"]

    for folder in ("taken", "taken/below"):
        assert "taken is not a folder" in hints(folder)[0]
    assert "/proc is not writable" in hints("/proc/x")[0], "where even root cannot write"
    assert not hints("new/er")


def test_rollouts_that_cannot_be_kept_or_are_not_there_are_told_before_the_run(load, tmp_path):
    def told(*words: str) -> set[str]:
        return {each.path for each in check_machine(load(*words))} - {"actor_train.device_mapping"}

    wrong = {"rollout_dump_dir": "/proc/x", "checkpoint_config.output_dir": "/proc/y", "rollout_replay_dir": "/nope"}
    assert told(*(f"{key}={folder}" for key, folder in wrong.items())) == wrong.keys()
    (tmp_path / "step-00001").mkdir()
    assert not told(f"rollout_replay_dir={tmp_path}", f"rollout_dump_dir={tmp_path}/new")


def test_what_a_run_reads_of_an_earlier_one_that_it_would_move_aside_is_told_before_the_run(load, tmp_path):
    model, schedule = tmp_path / "mine" / "checkpoints" / "checkpoint-2" / "actor_train", tmp_path / "mine" / "s.jsonl"
    ahead = ("async_generation_ratio=1", "train_infer_correction.is_weight.enabled=true", "exp_name=mine")
    words = (f"output_dir={tmp_path}", f"pretrain={model}", f"replay_schedule={schedule}", *ahead)

    def told(*more: str) -> set[str]:
        return {each.path for each in check_machine(load(*words, *more)) if "moves aside" in each.expected}

    assert not told(), "there is no earlier run"
    model.mkdir(parents=True)
    schedule.write_text("")
    (tmp_path / "mine" / "summary.json").write_text("{}")
    assert told() == {"pretrain", "replay_schedule"}
    assert not told("exp_name=again") and not told("resume_from_checkpoint=true")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("adv_estimator=os:system", "too many positional arguments"),
        ("adv_estimator=os:sep", "it is str"),
        ("adv_estimator=os:nothing", "has no 'nothing'"),
        ("pg_variant=os:getcwd", "too many positional arguments"),
        (f"{FILTER}={{path: 'os:getcwd'}}", "too many positional arguments"),
    ],
)
def test_a_function_of_the_step_is_compared_with_its_call(load, override, words):
    config = load(override)
    for problems in (check_inputs(config)[1], list(check_machine(config))):
        (problem,) = (each for each in problems if each.path in (override.partition("=")[0], f"{FILTER}.path"))
        assert words in problem.hint
    ours = {"adv_estimator": "advantages:grpo", "pg_variant": "losses:ppo"}
    right = load(*(f"{key}=roll.algorithms.{path}" for key, path in ours.items()))
    assert not [each for each in check_inputs(right)[1] if each.path in ours]


def test_references_that_no_answer_can_equal_are_problems_of_their_rows(load, tmp_path):
    wrong = (row(prompt="2+2=", solution=float("nan")), row(prompt="3+3=", solution="six"))
    write(tmp_path / "train.jsonl", row(), *wrong)
    config = load("rewards.arithmetic.verifiers=[{name: gsm8k}]", "rewards.arithmetic.tag_included=[arithmetic]")
    _, [problem] = check_data(config)
    assert f"{tmp_path}/train.jsonl:2: rewards." in str(problem) and f"{tmp_path}/train.jsonl:3: " in str(problem)
    assert "got nan, expected a number" in str(problem) and "got 'six', expected a number" in str(problem)


@pytest.mark.parametrize("name", ["sft_math", "dpo_math"])
def test_references_of_held_out_questions_are_tried_where_answers_to_them_are_scored(name, tmp_path):
    answers = {"response": "2"} if name == "sft_math" else {"chosen": "2", "rejected": "3"}
    file = tmp_path / "val.jsonl"
    write(file, row(**answers), row(prompt="2+2=", solution="four", **answers), row(prompt="3+3=", **answers))
    schema, warm = (SFTConfig, []) if name == "sft_math" else (DPOConfig, ["warm_start.file_name=d.jsonl"])
    config = load_config(schema, name, SHIPPED, [*files_in(tmp_path), *warm])
    _, [problem] = check_data(config)
    assert f"{file}:2: rewards.arithmetic.verifiers.0 (gsm8k)" in str(problem) and "got 'four'" in str(problem)
    assert f"{file}:1" not in str(problem) and f"{file}:3" not in str(problem)
    with pytest.raises(DataError, match=r"val\.jsonl:2: rewards\.arithmetic"):
        load_datasets(config.model_copy(update={"eval_only": True}), policy_renderer(config), LOADERS[name])


# Chat templates of published models

MUTE = (  # tells of tools and calls them in a notation of its own
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def shipped(name: str, *overrides: str) -> PipelineConfig:
    kind = {"agentic": AgenticConfig, "sft": SFTConfig}.get(name.partition("_")[0], RLVRConfig)
    return load_config(kind, name, SHIPPED, overrides, () if kind is SFTConfig else (check_dialect,))


def save_family(folder: Path, family: str) -> None:
    family_tokenizer(family).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')


def with_tools(folder: Path, family: str, *overrides: str, template: str | None = None) -> PipelineConfig:
    """A run with tools of a model of that family."""
    save_family(folder, family)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return shipped("rlvr_tools", f"pretrain={folder}", "actor_train.data_args.template=native", *overrides)


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_is_the_dialect_that_the_template_speaks(family):
    assert dialect_for("auto", ChatRenderer(family_tokenizer(family))).name == (FAMILIES[family].dialect or "hermes")


def test_a_template_whose_dialect_nobody_knows_asks_for_one(tmp_path):
    (problem,) = problems_of(with_tools, tmp_path, "qwen2_5", "tools.dialect=auto", template=MUTE).values()
    assert problem.path == "tools.dialect" and "one of deepseek, glm, harmony" in problem.expected
    assert "no known dialect reads a call as the template writes it: '!look_up" in problem.hint
    renderer = ChatRenderer(family_tokenizer("qwen2_5"), MUTE)
    with pytest.raises(ValueError, match=r"tools.dialect: got auto, expected one of deepseek.* no known dialect reads"):
        dialect_for("auto", renderer)
    assert dialect_for("auto", renderer, default="hermes").name == "hermes"
    assert with_tools(tmp_path, "qwen2_5", "tools.dialect=glm", template=MUTE).pretrain == str(tmp_path)


MORE = "; roll template check shows more"


@pytest.mark.parametrize(
    ("family", "dialect", "lines"),
    [
        ("qwen2_5", "auto", ["append-only, speaks the tool dialect hermes"]),
        ("glm4_5", "auto", [f"append-only, drops-reasoning, speaks the tool dialect glm{MORE}"]),
        ("glm4_5", "hermes", [f"append-only, drops-reasoning, speaks the tool dialect glm{MORE}",
          "warning: tools.dialect: got hermes, expected glm, the dialect of the chat template"]),
        ("mistral_nemo", "mistral", ["rewrites the history of answers, tool calls, answers after tools, drops-system, "
          f"drops-words-before-calls, speaks the tool dialect mistral{MORE}"]),
        ("gemma3", "hermes", ["append-only, speaks the tool dialect hermes"]),
        ("gemma3", "glm", ["append-only, speaks the tool dialect hermes",
          "warning: tools.dialect: got glm, expected hermes, the dialect of the chat template"]),
    ],
)  # fmt: skip
def test_runs_with_tools_say_what_their_template_does(family, dialect, lines, tmp_path):
    told = describe_template(with_tools(tmp_path, family, f"tools.dialect={dialect}"))
    assert [line.removeprefix("chat template: ") for line in told] == lines


def test_runs_whose_conversations_grow_say_what_their_template_does_and_others_nothing():
    for name in ("rlvr_math", "sft_math", "agentic_sokoban"):
        assert describe_template(shipped(name)) == []
    traj = shipped("agentic_sokoban", "custom_envs.SimpleSokoban.env_manager_cls=traj")
    told = ["chat template: append-only, speaks the tool dialect hermes"]
    assert describe_template(traj) == describe_template(shipped("rlvr_tools")) == told


@pytest.mark.parametrize(
    ("family", "remedy"),
    [
        ("llama3_2", "prompts contain the date, .*expected data_args.chat_template_kwargs.date_string"),
        ("gpt_oss", "prompts contain the date, .*expected a copy of the template with a fixed date"),
        ("mistral_small_3_2", "prompts without a system message contain the date, .*expected a system message of your"),
        ("llama3_1", None),
    ],
)
def test_every_run_is_warned_of_a_date_in_its_prompts(family, remedy, tmp_path):
    save_family(tmp_path, family)
    words = (f"pretrain={tmp_path}", "actor_train.data_args.template=native")
    found = describe_template(shipped("rlvr_math", *words))
    assert not found if remedy is None else re.match(f"warning: actor_train.data_args.template: {remedy}", *found)
    assert describe_template(shipped("rlvr_math", *words[:1], "actor_train.data_args.template=chatml")) == []


def test_a_date_is_fixed_by_the_variable_of_the_template():
    fixed = ChatTemplate("native", {"date_string": "26 Jul 2024"})
    renderer = ChatRenderer(family_tokenizer("llama3_2"), fixed)
    assert date_in_prompts(renderer) == ""
    assert "Today Date: 26 Jul 2024" in renderer.text([{"role": "user", "content": "?"}], open_assistant=True)
