"""The check of chat templates, on those of published models and on some that are broken in one way each."""

from __future__ import annotations

import pytest
from tokenizers import processors

from roll.agentic.tools.dialects import parsers
from roll.data.template_check import TemplateReport, check_template
from roll.models.tiny import make_tokenizer
from tests.support.chat_families import FAMILIES, family_tokenizer

APPEND_ONLY = {"answers": True, "tool calls": True, "answers after tools": True}
FOUND = {
    "qwen2_5": {"adds-system"},
    "qwen3": {"drops-reasoning", "adds-reasoning"},
    "qwen3_coder": set(),
    "llama3_1": {"drops-words-before-calls", "one-call-a-turn", "trims-words", "adds-system"},
    "mistral_nemo": {"rewrites-history", "drops-system", "drops-words-before-calls"},
    "gemma2": {"no-tools", "refuses-system", "trims-words", "turn-end-is-not-eos"},
    "gemma3": {"no-tools", "trims-words", "turn-end-is-not-eos"},
    "deepseek_v3": {
        "rewrites-history",
        "drops-reasoning",
        "drops-reasoning-before-calls",
        "no-tools",
        "opens-reasoning",
    },
    "deepseek_v3_1": {"drops-reasoning", "drops-reasoning-before-calls", "no-tools", "opens-reasoning"},
    "glm4_5": {"drops-reasoning", "turn-not-closed", "trims-words", "adds-reasoning"},
    "gpt_oss": {"drops-reasoning", "one-call-a-turn", "several-turn-ends", "adds-system", "writes-date"},
}
OPENINGS = {
    "qwen": "<|im_start|>assistant\n",
    "llama3_1": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral_nemo": "",
    "gemma": "<start_of_turn>model\n",
    "deepseek_v3": "<｜Assistant｜><think>\n",
    "deepseek_v3_1": "<｜Assistant｜><think></think>",
    "glm4_5": "<|assistant|>",
    "gpt_oss": "<|start|>assistant",
}


def check(family: str) -> TemplateReport:
    return check_template(family_tokenizer(family), parsers=parsers())


def names(report: TemplateReport) -> set[str]:
    return {finding.name for finding in report.findings}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_published_templates_do(family: str) -> None:
    report = check(family)
    assert names(report) == FOUND[family]
    rewrites = family in ("mistral_nemo", "deepseek_v3")
    assert report.append_only == dict.fromkeys(APPEND_ONLY, not rewrites)
    assert report.dialect == (FAMILIES[family].dialect or "hermes")
    assert report.native_tools == (FAMILIES[family].dialect is not None)
    assert (
        report.opening == max((item for item in OPENINGS.items() if family.startswith(item[0])), key=lambda i: i[0])[1]
    )
    others = {"gemma2": "<end_of_turn>", "gemma3": "<end_of_turn>", "glm4_5": "<|user|>"}
    assert report.ending == others.get(family, FAMILIES[family].eos)


def test_what_a_finding_says() -> None:
    texts = {
        family: {each.name: each.text for each in check(family).findings} for family in FAMILIES
    }  # the last of a name
    assert "><think>\\n' in the prompt becomes 'istant｜>left" in texts["deepseek_v3"]["rewrites-history"]
    assert texts["mistral_nemo"]["rewrites-history"].startswith("answers after tools: '<s>[AVAILABLE_TOOLS]")
    assert "written in the dialect deepseek" in texts["deepseek_v3"]["no-tools"]
    assert "single tool-calls at once" in texts["llama3_1"]["one-call-a-turn"]
    assert "You are Qwen, created by Alibaba Cloud" in texts["qwen2_5"]["adds-system"]
    assert "what comes next does: <|observation|>, <|user|>, " in texts["glm4_5"]["turn-not-closed"]
    assert "may also end with <|call|>, at which" in texts["gpt_oss"]["several-turn-ends"]
    assert "open: a sample begins with reasoning" in texts["deepseek_v3"]["opens-reasoning"]


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
)
BROKEN = {
    "counts messages": ("rewrites-history", "{{ messages | length }} messages\n" + CHATML + OPEN),
    "forgets all but the last": (
        "rewrites-history",
        "{% for m in messages[-1:] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + OPEN,
    ),
    "calls in a notation of its own": (
        "unknown-dialect",
        TOOLS + CALLS.replace("CALL", "!{{ c.function.name }}") + OPEN,
    ),
    "refuses calls": (
        "refuses-calls",
        TOOLS
        + CALLS.replace("CALL", "{{ raise_exception('no calls') if 'look' in c.function.name else c.function.name }}")
        + OPEN,
    ),
    "closes with another token": (
        "turn-end-is-not-eos",
        CHATML.replace("<|im_end|>", "<|endoftext|>") + OPEN,
    ),
    "has no assistant's words": (
        None,
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
    ),
    "raises": (None, "{{ raise_exception('never') }}"),
    "is no template": (None, "{% for %}"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_template_is_found_out(case: str) -> None:
    name, template = BROKEN[case]
    tokenizer = make_tokenizer()
    if case in ("raises", "is no template"):
        with pytest.raises(ValueError, match="cannot render a question and its answer: "):
            check_template(tokenizer, template, parsers())
        return
    report = check_template(tokenizer, template, parsers())
    assert (name or "no-turn-end") in names(report)
    assert report.problems or name == "turn-end-is-not-eos"


@pytest.mark.parametrize(
    ("bos", "template", "adds", "found"),
    [
        ("<|im_start|>", CHATML + OPEN, False, set()),  # it opens every turn, as SmolLM2's does
        ("<s>", "{{ bos_token }}" + CHATML + OPEN, True, set()),
        ("<s>", "{{ bos_token }}" + CHATML + OPEN, False, set()),
        ("<s>", CHATML.replace("<|im_start|>", "<s><|im_start|>") + OPEN.replace("<|im", "<s><|im"), True, set()),
        ("<s>", "{{ bos_token }}{{ bos_token }}" + CHATML + OPEN, False, {"double-bos"}),
        ("<s>", "{{ bos_token }}<s>" + CHATML + OPEN, True, {"double-bos"}),
        ("<s>", CHATML + OPEN, True, {"no-bos"}),
        ("<s>", CHATML + OPEN, False, set()),
    ],
)
def test_the_first_token_is_missed_only_where_the_tokenizer_writes_it(
    bos: str, template: str, adds: bool, found: set[str]
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": bos})
    if adds:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
    report = check_template(tokenizer, template, parsers())
    assert names(report) - {"no-tools"} == found
    assert {finding.name for finding in report.problems} == found - {"no-bos"}


def test_plain_chatml_has_no_problem() -> None:
    report = check_template(make_tokenizer(), "chatml", parsers())
    assert report.append_only == APPEND_ONLY and not report.problems and names(report) == {"no-tools"}
    assert report.page() == (
        "append-only:       answers yes, tool calls yes, answers after tools yes\n"
        "tool dialect:      hermes; tools are described in the Hermes form, as the template has none\n"
        "opens a turn with: '<|im_start|>assistant\\n'\n"
        "ends a turn with:  '<|im_end|>'\n"
        "\n"
        "note     no-tools: the template has no tools: they are described and called in the Hermes form\n"
    )
