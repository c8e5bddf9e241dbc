"""What a run says of its chat template before it starts, under the templates of published models."""

import re
from pathlib import Path

import pytest

from roll.agentic.tools.dialects import dialect_for
from roll.configs.agentic import AgenticConfig
from roll.configs.compose import compose_config
from roll.configs.loader import load_composed
from roll.configs.offline import SFTConfig
from roll.configs.pipeline import PipelineConfig
from roll.configs.rlvr import RLVRConfig
from roll.data.renderer import ChatRenderer
from roll.data.template_check import date_in_prompts
from roll.data.templates import ChatTemplate
from roll.preflight.templates import check_dialect, describe_template
from tests.support.chat_families import FAMILIES, family_tokenizer
from tests.support.configs import problems_of

SHIPPED = Path(__file__).parents[3] / "examples" / "config"
MUTE = (  # tells of tools and calls them in a notation of its own
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def load(name: str, *overrides: str) -> PipelineConfig:
    kinds: dict[str, type[PipelineConfig]] = {"agentic": AgenticConfig, "sft": SFTConfig}
    kind = kinds.get(name.partition("_")[0], RLVRConfig)
    checks = () if kind is SFTConfig else (check_dialect,)
    return load_composed(kind, name, compose_config(name, SHIPPED, list(overrides)), checks)


def save_family(folder: Path, family: str) -> None:
    family_tokenizer(family).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')


def with_tools(folder: Path, family: str, *overrides: str, template: str | None = None) -> PipelineConfig:
    """A run with tools of a model of that family."""
    save_family(folder, family)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return load("rlvr_tools", f"pretrain={folder}", "actor_train.data_args.template=native", *overrides)


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
        assert describe_template(load(name)) == []
    traj = load("agentic_sokoban", "custom_envs.SimpleSokoban.env_manager_cls=traj")
    told = ["chat template: append-only, speaks the tool dialect hermes"]
    assert describe_template(traj) == describe_template(load("rlvr_tools")) == told


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
    found = describe_template(load("rlvr_math", *words))
    assert not found if remedy is None else re.match(f"warning: actor_train.data_args.template: {remedy}", *found)
    assert describe_template(load("rlvr_math", *words[:1], "actor_train.data_args.template=chatml")) == []


def test_a_date_is_fixed_by_the_variable_of_the_template():
    fixed = ChatTemplate("native", {"date_string": "26 Jul 2024"})
    renderer = ChatRenderer(family_tokenizer("llama3_2"), fixed)
    assert date_in_prompts(renderer) == ""
    assert "Today Date: 26 Jul 2024" in renderer.text([{"role": "user", "content": "?"}], open_assistant=True)
