"""The check of chat templates, on those of published models and on some that are broken in one way each."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from tokenizers import processors

from roll.agentic.tools.dialects import dialect, parsers
from roll.agentic.tools.tool import AssistantTurn, call_id
from roll.configs.data import DataArguments
from roll.configs.loader import load_config
from roll.configs.problems import ConfigErrors
from roll.configs.rlvr import RLVRConfig
from roll.data.columns import IntArray
from roll.data.prompts import DataError
from roll.data.renderer import ChatRenderer, Message, Tool
from roll.data.template_check import TemplateReport, check_template
from roll.data.templates import TEMPLATES, ChatTemplate
from roll.distributed.strategy.generation.model_outline import stop_token_ids
from roll.extras.importers.convert import convert
from roll.extras.importers.draft import Kind
from roll.models.tiny import make_tokenizer
from roll.pipeline.prompts import load_datasets
from roll.preflight.choices import CHECKS
from roll.rollout.tokenization_audit import compare_tokens, first_difference
from tests.support.chat_families import ADD_TOOL as ADD
from tests.support.chat_families import FAMILIES, family_tokenizer
from tests.support.lines import write_lines
from tests.support.talks import says, user
from tests.unit.configs.test_rlvr_config import MINIMAL
from tests.unit.extras.importers.imported import FILES

ROOT = Path(__file__).parents[3]
APPEND_ONLY = {"answers": True, "tool calls": True, "answers after tools": True}
REWRITES = {"rewrites-history", "drops-reasoning", "opens-reasoning"}
FOUND = {
    "llama3": {"no-tools", "trims-words"},
    "llama3_1": {"drops-words-before-calls", "one-call-a-turn", "trims-words", "adds-system"},
    "llama3_2": {"drops-words-before-calls", "one-call-a-turn", "trims-words", "adds-system", "writes-date"},
    "mistral_v0_3": {"rewrites-history", "drops-system", "drops-words-before-calls", "trims-words"},
    "mistral_nemo": {"rewrites-history", "drops-system", "drops-words-before-calls"},
    "mistral_small_3_2": {"rewrites-history", "drops-words-before-calls", "adds-system", "writes-date"},
    "mixtral": {"no-tools"},
    "phi3": {"no-tools", "turn-end-is-not-eos"},
    "phi4": {"no-tools"},
    "phi4_mini": {"no-tools", "turn-end-is-not-eos"},
    "gemma2": {"no-tools", "refuses-system", "trims-words", "turn-end-is-not-eos"},
    "gemma3": {"no-tools", "trims-words", "turn-end-is-not-eos"},
    "qwen2_5": {"adds-system"},
    "qwen3": {"drops-reasoning", "adds-reasoning"},
    "qwen3_2507": set(),
    "qwen3_thinking_2507": REWRITES,
    "qwen3_coder": set(),
    "qwen3_5": REWRITES | {"trims-words"},
    "deepseek_v3": {"no-tools"},
    "deepseek_v3_1": {"drops-reasoning", "drops-reasoning-before-calls", "no-tools", "opens-reasoning"},
    "deepseek_r1": REWRITES | {"drops-reasoning-before-calls", "no-tools"},
    "deepseek_r1_distill": REWRITES | {"drops-reasoning-before-calls", "no-tools"},
    "glm4_5": {"drops-reasoning", "turn-not-closed", "trims-words", "adds-reasoning"},
    "gpt_oss": {"drops-reasoning", "one-call-a-turn", "several-turn-ends", "adds-system", "writes-date"},
    "smollm2": {"no-tools", "adds-system"},
    "smollm3": {"no-calls", "adds-system", "writes-date"},
    "granite4": {"adds-system"},
    "falcon_h1": {"no-calls", "turn-end-is-not-eos"},
    "nemotron_nano_2": REWRITES | {"drops-reasoning-before-calls", "trims-words"},
    "nemotron_3_nano": REWRITES | {"trims-words"},
}
KEEPS = {"qwen3_5": {"tool calls"}, "mistral_small_3_2": {"answers", "tool calls"}}
"""Kinds of turns behind which a template that rewrites others leaves the history alone."""


def check(family: str) -> TemplateReport:
    return check_template(family_tokenizer(family), parsers=parsers())


def names(report: TemplateReport) -> set[str]:
    return {finding.name for finding in report.findings}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_published_templates_do(family):
    report = check(family)
    assert names(report) == FOUND[family]
    kept = KEEPS.get(family, set()) if "rewrites-history" in FOUND[family] else APPEND_ONLY
    assert {kind for kind, appends in report.append_only.items() if appends} == set(kept)
    assert report.dialect == (FAMILIES[family].dialect or "hermes")
    assert report.native_tools == (FAMILIES[family].dialect is not None)


def test_the_page_of_published_templates_is_up_to_date(monkeypatch):
    """It has what opens and what ends a turn of each."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    script = importlib.import_module("generate_template_docs")
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run `make docs`"


def test_a_call_behind_opened_reasoning_is_read_where_both_tags_are_plain_text():
    call = '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    opens = OPEN.replace("assistant\n", "assistant\n<think>\n")
    report = check_template(make_tokenizer(), calling(call, opens), parsers())
    assert report.dialect == "hermes" and "opens-reasoning" in names(report)


@pytest.mark.parametrize(
    ("family", "name", "words"),
    [
        ("deepseek_r1", "rewrites-history", "><think>\\n' in the prompt becomes 'istant｜>left"),
        ("mistral_nemo", "rewrites-history", "\nanswers after tools: '<s>[AVAILABLE_TOOLS]"),
        ("deepseek_r1", "no-tools", "written in the dialect deepseek"),
        ("llama3_1", "one-call-a-turn", "single tool-calls at once"),
        ("qwen2_5", "adds-system", "You are Qwen, created by Alibaba Cloud"),
        ("glm4_5", "turn-not-closed", "only the next turn ends a turn: <|observation|>, <|user|>, "),
        ("gpt_oss", "several-turn-ends", "may also end with <|call|>, at which"),
        ("deepseek_r1", "opens-reasoning", "open: a sample begins with reasoning"),
    ],
)
def test_what_a_finding_says(family, name, words):
    texts = {each.name: f"\n{each.text}" for each in check(family).findings}  # the last of a name
    assert words in texts[name]


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def calling(call: str, opens: str = OPEN) -> str:
    """A template that describes tools, and writes each call so."""
    calls = f"{{% for c in m.tool_calls or [] %}}{call}{{% endfor %}}<|im_end|>"
    return "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML.replace("<|im_end|>", calls) + opens


BROKEN = {
    "counts messages": ("rewrites-history", "{{ messages | length }} messages\n" + CHATML + OPEN),
    "forgets all but the last": ("rewrites-history", CHATML.replace("in messages", "in messages[-1:]") + OPEN),
    "calls in a notation of its own": ("unknown-dialect", calling("!{{ c.function.name }}")),
    "refuses calls": (
        "refuses-calls",
        calling("{{ raise_exception('no calls') if 'look' in c.function.name else c.function.name }}"),
    ),
    "closes with another token": ("turn-end-is-not-eos", CHATML.replace("<|im_end|>", "<|endoftext|>") + OPEN),
    "has no assistant's words": (None, "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"),
    "raises": (None, "{{ raise_exception('never') }}"),
    "is no template": (None, "{% for %}"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_template_is_found_out(case):
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
def test_the_first_token_is_missed_only_where_the_tokenizer_writes_it(bos, template, adds, found):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": bos})
    if adds:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
    report = check_template(tokenizer, template, parsers())
    assert names(report) - {"no-tools"} == found
    assert {finding.name for finding in report.problems} == found - {"no-bos"}


def test_plain_chatml_has_no_problem():
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


ASKED = [user("left or right?")]


def encode(renderer: ChatRenderer, text: str) -> IntArray:
    return np.asarray(renderer.tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)


def grow(renderer: ChatRenderer, samples: list[str], tools: list[Tool] | None = None) -> tuple[IntArray, list[Message]]:
    """A row of samples, with a result behind each call and a question behind other words, and its messages."""
    ids, messages = renderer.prompt(ASKED, tools), list(ASKED)
    for number, sample in enumerate(samples):
        sampled = encode(renderer, sample)
        ids = np.concatenate([ids, sampled])
        turn = dialect("hermes").parse(renderer.decode_raw(sampled))
        said = turn.as_openai() if turn.calls else AssistantTurn(sample.removesuffix("<|im_end|>")).as_openai()
        messages.append(said)
        if number == len(samples) - 1:
            break
        after = user("and then?")
        if turn.calls:
            after = {"role": "tool", "content": "3", "tool_call_id": turn.calls[0].id, "name": "add"}
        messages.append(after)
        ids = np.concatenate([ids, renderer.continuation([after], sampled, tools)])
    return ids, messages


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
THOUGHT = "<think>\nleft\n</think>\n\nright<|im_end|>"
CASES = [
    ("qwen2_5", ["left<|im_end|>", "right<|im_end|>"], None),
    ("qwen2_5", ["left<|im_end|>", "right"], None),  # cut off
    ("qwen2_5", [CALL + "<|im_end|>", "right<|im_end|>"], None),
    ("qwen2_5", [CALL.replace('{"a": 1}', '{"a":1}') + "<|im_end|>", "right<|im_end|>"], "white space"),
    ("qwen2_5", [CALL.replace('"a": 1', '"a": 1.0e0') + "<|im_end|>", "right<|im_end|>"], "rewritten"),
    ("qwen3", [THOUGHT, THOUGHT], "reasoning"),
    ("qwen3", [THOUGHT], None),
    ("qwen3", ["right<|im_end|>"], "reasoning"),  # the template gives the answer an empty one
]


@pytest.mark.parametrize(("family", "samples", "reason"), CASES)
def test_a_difference_has_a_reason(family, samples, reason):
    renderer = ChatRenderer(family_tokenizer(family))
    tools = [ADD] if "<tool_call>" in samples[0] else None
    ids, messages = grow(renderer, samples, tools)
    assert compare_tokens(renderer, messages, ids, tools) == reason
    lenient = compare_tokens(renderer, messages, ids, tools, "ignore_strippable")
    assert lenient == (None if reason == "white space" else reason)
    assert compare_tokens(renderer, messages, ids, tools, "disable") is None


def test_reasoning_that_was_cut_off_is_lacking_as_any_other():
    renderer = ChatRenderer(family_tokenizer("qwen2_5"))
    after, messages, ids = user("and then?"), [*ASKED], renderer.prompt(ASKED)
    for sample, thought, words in (("<think>le", "le", ""), ("<think>up</think>right<|im_end|>", "up", "right")):
        sampled = encode(renderer, sample)
        ids = np.concatenate([ids, sampled, renderer.continuation([after], sampled)])
        messages += [says(words, reasoning_content=thought), after]
    last = says("", reasoning_content="do")
    ids = np.concatenate([ids, encode(renderer, "<think>do")])
    assert compare_tokens(renderer, [*messages, last], ids) == "reasoning"
    messages[1] = {**messages[1], "content": "left"}
    assert compare_tokens(renderer, [*messages, last], ids) == "rewritten"


def test_the_same_text_in_other_tokens():
    renderer = ChatRenderer(family_tokenizer("qwen2_5"))
    letters = np.concatenate([encode(renderer, letter) for letter in "another answer"])
    ids = np.concatenate([renderer.prompt(ASKED), letters])
    messages = [*ASKED, says("another answer")]
    assert compare_tokens(renderer, messages, ids) == "other tokens"


@pytest.mark.parametrize("family", ["llama3_1", "mistral_nemo", "gpt_oss"])
def test_a_conversation_that_the_template_refuses_is_a_reason_too(family):
    renderer = ChatRenderer(family_tokenizer(family))
    results = [{"role": "tool", "content": text, "name": "add"} for text in ("3", "4")]
    sampled = encode(renderer, "left")
    ids = np.concatenate([renderer.prompt(ASKED, [ADD]), sampled, renderer.continuation(results, sampled, [ADD])])
    calls = [{"id": call_id(index), "function": {"name": "add", "arguments": {}}} for index in range(2)]
    said = says("left", **({"tool_calls": calls} if family == "llama3_1" else {}))
    messages = [*ASKED, said, *results, says("right")]
    for check in ("strict", "ignore_strippable"):
        assert compare_tokens(renderer, messages, ids, [ADD], check) == "refused"
    trained, why = first_difference(renderer, messages, ids, [ADD])
    assert trained and why.startswith("(refused: ")


@pytest.mark.parametrize("family", FAMILIES)
def test_words_as_the_tokenizer_writes_them_differ_where_the_template_says_so(family):
    renderer = ChatRenderer(family_tokenizer(family))
    ids = np.concatenate([renderer.prompt(ASKED), encode(renderer, "left then right")])
    messages = [*ASKED, says("left then right")]
    reasons = {"qwen3": "reasoning", "glm4_5": "reasoning", "gpt_oss": "rewritten"}
    reasons |= dict.fromkeys(("mistral_v0_3", "mixtral"), "white space")  # they write a space before an answer
    opens = "opens-reasoning" in FOUND[family] and family != "deepseek_v3_1"  # whose tags are empty
    expected = "rewritten" if opens and family != "nemotron_nano_2" else reasons.get(family)  # it writes what it opens
    assert compare_tokens(renderer, messages, ids) == expected


TOKENIZER = make_tokenizer()
QUOTED = "{% for m in messages %}{{ m['content'] }}{{ '!' if loud }}{% endfor %}{{ '<eos>' if add_generation_prompt }}"
KEY = "actor_train.data_args.tag_templates"


def load(folder: Path, *overrides: str) -> RLVRConfig:
    (folder / "mine.yaml").write_text(MINIMAL)
    return load_config(RLVRConfig, "mine", folder, overrides, CHECKS[RLVRConfig])


def write(folder: Path) -> tuple[str, ...]:
    """Rows of three tags, two of which have templates, one of them in a file; held out as well."""
    tags = ["gsm8k", "aime", "mmlu", "gsm8k", "mmlu", "aime"]
    rows = [
        {"question": f"{i}+{i}=", "solution": "B" if tag == "mmlu" else "2", "tag": tag} for i, tag in enumerate(tags)
    ]
    for name in ("a.jsonl", "val.jsonl"):
        write_lines(folder / name, rows)
    (folder / "plain.jinja").write_text(TEMPLATES["plain"])
    (folder / "quoted.jinja").write_text(QUOTED)
    return (
        f"actor_train.data_args.file_name={folder / 'a.jsonl'}",
        f"validation.data_args.file_name={folder / 'val.jsonl'}",
        f"{KEY}.gsm8k={folder / 'quoted.jinja'}",
        f"{KEY}.aime=plain",
    )


def test_rows_of_a_tag_have_the_ids_of_transformers_with_its_template(tmp_path):
    config = load(tmp_path, *write(tmp_path), "actor_train.data_args.chat_template_kwargs={loud: true}")
    # The variable is read by one of the templates alone.
    general = ChatRenderer(TOKENIZER, "chatml")
    datasets = load_datasets(config, general)
    texts = {"gsm8k": QUOTED, "aime": TEMPLATES["plain"]}
    for dataset in (datasets.train, datasets.val):
        assert [prompt.tag for prompt in dataset[:3]] == ["gsm8k", "aime", "mmlu"]
        for prompt in dataset:
            assert (prompt.prompt_ids is None) == (prompt.tag == "mmlu")
            ids = general.prompt(prompt.messages) if prompt.prompt_ids is None else prompt.prompt_ids
            expected = TOKENIZER.apply_chat_template(
                list(prompt.messages),
                chat_template=texts.get(prompt.tag, TEMPLATES["chatml"]),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                loud=True,
            )
            assert np.array_equal(ids, expected), prompt.tag


def test_a_prompt_that_is_too_long_by_its_own_template_is_treated_as_any_other(tmp_path):
    words = write(tmp_path)
    with pytest.raises(DataError, match=r"a\.jsonl:1: 4\d tokens, expected at most prompt_length = 20"):
        (tmp_path / "quoted.jinja").write_text("1" * 40 + QUOTED)
        load_datasets(load(tmp_path, *words, "prompt_length=20"), ChatRenderer(TOKENIZER, "plain"))
    config = load(tmp_path, *words, "prompt_length=20", "actor_train.data_args.prompt_overflow=left")
    config.validation = None
    train = load_datasets(config, ChatRenderer(TOKENIZER, "plain")).train
    assert train.report.overlong == 2
    assert [len(prompt.prompt_ids) for prompt in train if prompt.tag == "gsm8k"] == [20, 20]


def test_turns_end_where_any_of_the_templates_ends_them():
    data = DataArguments(template="plain", tag_templates={"chat": "chatml"})
    alone, end = stop_token_ids(None, TOKENIZER, "plain"), TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    both = stop_token_ids(None, TOKENIZER, ChatTemplate.of(data))
    assert set(both) == {*alone, *stop_token_ids(None, TOKENIZER, "chatml")} and end in both


def test_what_is_wrong_is_told_at_once(tmp_path):
    tools = "tools={dialect: hermes, use: {calculator: {tool: calculator}}}"
    with pytest.raises(ConfigErrors) as caught:
        load(tmp_path, *write(tmp_path), f"{KEY}.gsmk=plain", f"{KEY}.mmlu=./absent", tools)
    found = {problem.path: str(problem) for problem in caught.value.problems}
    assert "did you mean gsm8k?" in found[f"{KEY}.gsmk"] and "absent" in found[f"{KEY}.mmlu"]
    assert "conversations of several turns have one template" in found["tools"]
    with pytest.raises(ConfigErrors, match=r"validation\.data_args\.tag_templates.*the same as"):
        load(tmp_path, "validation.data_args.tag_templates={gsm8k: plain}")


def test_tag_to_template_of_roll():
    words = ["+tag_to_template={sums: chatml, talk: their_own}"]
    imported = convert("roll", [FILES / "roll" / "run" / "rlvr.yaml"], words)
    told = {outcome.key: outcome for outcome in imported.outcomes if outcome.key.startswith("tag_to_template")}
    assert {outcome.kind for outcome in told.values()} == {Kind.DERIVED}
    assert imported.exit_code == 0 and told["tag_to_template.talk"].value == "native"
    assert "sums: chatml" in imported.text and "talk: native" in imported.text
