"""Datasets of conversations: columns, lengths, what is wrong with a row, and what is reported.

Rows are as people have them: each form is read as the same conversation in OpenAI's, or refused in words.
"""

import datetime
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from pyarrow import parquet
from torch import Tensor

from roll.configs.data import DataArguments
from roll.configs.preference import MarginColumns, RewardColumns
from roll.data.conversations import Conversations, Scoring, check_conversations, encode_talk, load_conversations
from roll.data.files import DataError
from roll.data.preferences import best_and_worst, load_preferences, load_scored
from roll.data.prompts import load_prompts
from roll.data.reading import Reading
from roll.data.renderer import ChatRenderer
from roll.data.template_check import LeftOut
from roll.models.tiny import make_tokenizer
from tests.support import talks
from tests.support.chat_families import FAMILIES, MARKS, family_tokenizer
from tests.support.lines import write_lines as write
from tests.support.talks import SYSTEM, system

RENDERER = ChatRenderer(make_tokenizer())
QWEN3 = ChatRenderer(family_tokenizer("qwen3"))
FORMS: dict[str, Any] = {"renderer": QWEN3, "max_tokens": 4000}
"""How rows of all forms are read."""
Row = Mapping[str, Any]


def user(content: Any = "1+1?", **more: Any) -> dict[str, Any]:
    return talks.user(content, **more)


def says(content: Any = "2", **more: Any) -> dict[str, Any]:
    return talks.says(content, **more)


TALK = [user("a"), says("Up"), user("b"), says("Down")]
ANSWERED = {"prompt": "q", "response": "r"}


def load(path: Path, columns: Mapping[str, Any], **options: Any) -> Conversations:
    args = DataArguments(file_name=str(path), **columns)
    return load_conversations(args, **{"renderer": RENDERER, "max_tokens": 64, **options})


def rows_of(data: Conversations) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and mask of each row."""
    lengths = data.batch.lengths_B.tolist()
    return zip(data.batch.tokens_T.split(lengths), data.batch.loss_mask_T.split(lengths), strict=True)


def said(data: Conversations) -> list[str]:
    """What each row's mask is 1 on, as text."""
    return [RENDERER.tokenizer.decode(tokens[mask]) for tokens, mask in rows_of(data)]


def test_questions_with_answers_and_conversations_are_read_from_every_format(tmp_path):
    pairs = load(write(tmp_path / "pairs.jsonl", [{"q": "a", "r": "Up"}]), ANSWERED)
    assert said(pairs) == ["Up<|im_end|>"]
    rows = [{"talk": TALK}, {"talk": TALK[:2]}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "talks.parquet")
    for path in (write(tmp_path / "talks.jsonl", rows), tmp_path / "talks.parquet"):
        found = load(path, {"messages": "talk", "system_prompt": "S"})
        assert said(found) == ["Up<|im_end|>Down<|im_end|>", "Up<|im_end|>"]
        assert said(load(path, {"messages": "talk"}, last_only=True))[0] == "Down<|im_end|>"
        assert [question.messages[-1]["content"] for question in found.questions] == ["b", "a"]
        assert found.questions[0].messages[0]["role"] == "system"
    assert pairs.batch.tokens_T.tolist() == [
        *RENDERER.prompt(TALK[:1]).tolist(),
        *RENDERER.tokenizer.encode("Up<|im_end|>"),
    ]


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.pad == MARKS[name]])
def test_an_end_that_pads_too_is_learned_behind_every_answer(family, tmp_path):
    renderer = ChatRenderer(family_tokenizer(family))
    path = write(tmp_path / "talks.jsonl", [{"talk": TALK}])
    batch = load(path, {"messages": "talk"}, renderer=renderer, max_tokens=4096).batch
    learned, pad = batch.tokens_T[batch.loss_mask_T], renderer.tokenizer.pad_token_id
    assert int((learned == pad).sum()) == 2
    text = renderer.tokenizer.decode(learned)
    assert text.endswith(MARKS[family]) and "Up" in text and "Down" in text


def test_everything_wrong_with_the_rows_is_told_by_line(tmp_path):
    wrong = {
        "no column 'r'": {"q": "a"},
        "column 'r': 3, expected": {"q": "a", "r": 3},
        "88 tokens, expected at most sequence_length = 64 (see sample_overflow)": {"q": "x" * 80, "r": "Up"},
    }
    bad = write(tmp_path / "bad.jsonl", [{"q": "a", "r": "Up"}, *wrong.values()])
    with pytest.raises(DataError) as caught:
        load(bad, ANSWERED)
    for line, (words, problem) in enumerate(zip(wrong, caught.value.problems, strict=True), 2):
        assert problem.startswith(f"{bad}:{line}: {words}")


@pytest.mark.parametrize(("overflow", "kept"), [("drop", 1), ("truncate", 2)])
def test_what_is_too_long_is_left_out_or_cut_and_counted(tmp_path, overflow, kept):
    rows = [
        {"q": "a", "r": "Up"},
        {"q": "a", "r": "z" * 100},
        {"q": "y" * 100, "r": "Up"},  # a cut leaves nothing to imitate
    ]
    path = write(tmp_path / "long.jsonl", rows)
    data = load(path, ANSWERED, overflow=overflow)
    report = data.report
    assert (report.samples, report.overlong, report.silent) == (kept, 2, int(overflow == "truncate"))
    assert report.rows == 3 and report.longest == 108 and data.batch.lengths_B.max() <= 64
    assert "2 over 64 tokens " + {"drop": "dropped", "truncate": "cut"}[overflow] in str(report)
    with pytest.raises(DataError, match="no conversations: all 3 are longer than sequence_length = 4"):
        load(path, ANSWERED, overflow=overflow, max_tokens=4)


def test_rows_behind_the_checked_ones_may_pass_the_filter(tmp_path):
    rows = [{"prompt": "1+1=", "response": "2", "source": source} for source in ("a", "a", "b")]
    columns = {"prompt": "prompt", "response": "response", "dataset_filter": {"source": "b"}}
    args = DataArguments(file_name=str(write(tmp_path / "data.jsonl", rows)), **columns)
    assert check_conversations(Reading(args, seed=0, head=2), None) == (Counter(), False)
    with pytest.raises(DataError, match="removed all 2 rows"):
        args = args.model_copy(update={"file_name": str(write(tmp_path / "data.jsonl", rows[:2]))})
        check_conversations(Reading(args, seed=0, head=9), None)


def test_held_out_questions_bring_what_rewards_need(tmp_path):
    row = {"q": "a", "r": "Up", "solution": "7", "tag": "sums", "level": 3}
    path = write(tmp_path / "val.jsonl", [row])
    (question,) = load(path, ANSWERED, scoring=Scoring(["sums"], "solution")).questions
    assert (question.tag, question.ground_truth, question.extra_info["level"]) == ("sums", "7", 3)
    with pytest.raises(DataError, match="tag 'sums', expected one of chess"):
        load(path, ANSWERED, scoring=Scoring(["chess"], "solution"))


SCORED = {"prompt": "ask", "response": "answer"}
HEAD = "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n"


def load_scores(path: Path, rows: list[Row], *, in_steps: bool, keys: Row = SCORED, **options: Any) -> Conversations:
    data = DataArguments(file_name=str(write(path / "data.jsonl", rows)), **keys)
    return load_scored(data, RewardColumns(), in_steps=in_steps, **{"renderer": RENDERER, "max_tokens": 60, **options})


def before_scores(data: Conversations) -> list[str]:
    """Text of the first row up to each score."""
    tokens, mask = data.batch.tokens_T, data.batch.loss_mask_T
    return [RENDERER.tokenizer.decode(tokens[:index]) for index in mask[: data.batch.lengths_B[0]].nonzero()[:, 0]]


def test_a_score_stands_behind_the_whole_conversation_or_behind_each_step(tmp_path):
    data = load_scores(tmp_path, [{"ask": "a?", "answer": "b", "score": -1.5}], in_steps=False)
    assert before_scores(data) == [RENDERER.tokenizer.apply_chat_template([user("a?"), says("b")], tokenize=False)]
    assert data.batch.returns_T[data.batch.loss_mask_T].tolist() == [-1.5]
    data = load_scores(tmp_path, [{"ask": "a?", "steps": ["x ", "y"], "step_labels": [True, 0.25]}], in_steps=True)
    assert before_scores(data) == [HEAD + "x ", HEAD + "x y<|im_end|>\n"]
    assert data.batch.returns_T[data.batch.loss_mask_T].tolist() == [1.0, 0.25]


def test_a_step_that_spells_a_control_token_is_letters(tmp_path):
    row = {"ask": "a?", "steps": ["x <|im_end|>", "y"], "step_labels": [True, False]}
    data = load_scores(tmp_path, [row], in_steps=True)
    assert before_scores(data) == [HEAD + "x <|im_end|>", HEAD + "x <|im_end|>y<|im_end|>\n"]
    end = RENDERER.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert data.batch.tokens_T.tolist().count(end) == 2, "the ends of both turns"
    with pytest.raises(DataError, match=r"data.jsonl:1: .*a control token is cut in two"):
        load_scores(tmp_path, [row | {"steps": ["x <|im", "_end|>"]}], in_steps=True)


def test_rows_without_scores_are_told(tmp_path):
    for score, told in (("good", "'good', expected a number"), ("inf", "inf, expected a finite number")):
        with pytest.raises(DataError, match=rf"data.jsonl:1: column 'score': {told}"):
            load_scores(tmp_path, [{"ask": "a", "answer": "b", "score": score}], in_steps=False)
    with pytest.raises(DataError, match=r"data.jsonl:1: column 'steps': a lone surrogate at character 2"):
        load_scores(tmp_path, [{"ask": "a", "steps": ["x", "\ud800"], "step_labels": [1, 1]}], in_steps=True)
    rows = [{"ask": "a", "steps": ["x", "y"], "step_labels": [1]}, {"ask": "a", "steps": [], "step_labels": []}]
    told = r"expected a list of 2, one per step[\s\S]*data.jsonl:2.*expected a list of texts"
    with pytest.raises(DataError, match=told):
        load_scores(tmp_path, rows, in_steps=True)


def load_pairs(path: Path, rows: list[Row], *, label: str | None = None, **options: Any) -> Conversations:
    file, renderer = write(path / "data.jsonl", rows), options.pop("renderer", RENDERER)
    keys = {key: options.pop(key) for key in ("prompt", "messages", "response") if key in options} or {"prompt": "ask"}
    return load_preferences(
        DataArguments(file_name=str(file), **keys),
        MarginColumns(margin=options.pop("margin", None)),
        label=label,
        encode=encode_talk(renderer),
        left_out=LeftOut(renderer),
        **{"max_tokens": 40, **options},
    )


def test_with_one_side_of_a_pair_goes_the_other(tmp_path):
    rows = [
        {"ask": "a", "chosen": "yes", "rejected": "n" * 90},
        {"ask": "b", "chosen": "one", "rejected": "two"},
        {"ask": "c", "chosen": "y" * 90, "rejected": "z"},
        {"ask": "d", "chosen": "three", "rejected": "four"},
    ]
    data = load_pairs(tmp_path, rows, overflow="drop")
    assert said(data) == [f"{word}<|im_end|>" for word in ("one", "two", "three", "four")]
    assert str(data.report).startswith("2 pairs, 19 of ")
    assert data.batch.pair_B.tolist() == [0, 0, 1, 1]
    assert [question.messages[-1]["content"] for question in data.questions] == ["b", "d"]


def test_labelled_answers_need_no_pair(tmp_path):
    rows = [{"ask": "a", "response": text, "label": label} for text, label in (("x", True), ("y", 0), ("z", "true"))]
    data = load_pairs(tmp_path, rows, label="label", prompt="ask", response="response")
    assert data.batch.pair_B is None and data.batch.preferred_B.tolist() == [True, False, True]
    with pytest.raises(DataError, match=r"data.jsonl:1: column 'label': 'maybe', expected true or false"):
        load_pairs(tmp_path, [rows[0] | {"label": "maybe"}], label="label", prompt="ask", response="response")


def test_what_is_too_long_says_which_side(tmp_path):
    rows = [{"ask": "a", "chosen": "y", "rejected": "n" * 90}, {"ask": "a" * 90, "chosen": "y", "rejected": "n"}]
    with pytest.raises(DataError) as error:
        load_pairs(tmp_path, rows)
    places = [problem.rpartition("data.jsonl:")[2].rpartition(": ")[0] for problem in error.value.problems]
    assert places == ["1: column 'rejected'", "2: column 'chosen'", "2: column 'rejected'"]


@pytest.mark.parametrize(
    ("margin", "words"),
    [
        (-1, "-1, expected 0 or more"),
        (math.inf, "inf, expected a finite"),
        (1e300, "1e\\+300, expected a finite number"),
        (10**400, "inf, expected a finite number"),
        (None, "null, expected a number"),
    ],
)
def test_a_margin_is_a_number_that_a_loss_can_take(tmp_path, margin, words):
    row = {"ask": "a", "chosen": "x", "rejected": "y", "margin": margin}
    with pytest.raises(DataError, match=f"data.jsonl:1: column 'margin': {words}"):
        load_pairs(tmp_path, [row], margin="margin")
    assert load_pairs(tmp_path, [row | {"margin": 0.5}], margin="margin").batch.target_B.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("row", "keys", "words"),
    [
        ({"ask": "a", "chosen": "x"}, {}, "no column 'rejected'"),
        ({"ask": "a", "chosen": "x", "rejected": "x"}, {}, "the same answer, expected two"),
        ({"ask": "a", "chosen": None, "rejected": "x"}, {}, "column 'chosen': null, expected the text of an answer"),
        ({"ask": "a", "chosen": " ", "rejected": "x"}, {}, "column 'chosen': ' ', expected the text of an answer"),
        (
            {side: [user(side), says(side)] for side in ("chosen", "rejected")},
            {"messages": "chosen"},
            "differ before their last answers",
        ),
    ],
)
def test_rows_that_are_no_pair_are_told(tmp_path, row, keys, words):
    with pytest.raises(DataError, match=f"data.jsonl:1: .*{words}"):
        load_pairs(tmp_path, [row], **keys)


def episode(group: int, score: float, text: str, turns: int = 1) -> dict[str, Any]:
    turn = {"observation": f"{group}?", "text": text}
    return {"tag": "sums", "group_id": group, "score": score, "info": {"ground_truth": "7"}, "turns": [turn] * turns}


def pairs(path: Path, episodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    file = write(path / "eval-00000.jsonl", episodes)
    return list(best_and_worst(DataArguments(file_name=str(file), prompt="prompt"), seed=0))


def test_a_group_gives_its_best_and_its_worst(tmp_path):
    scored = [(0, 0.5, "b"), (0, 1.0, "a"), (0, 0.0, "c"), (1, 1.0, "x"), (1, 1.0, "y"), (2, 0.0, "z")]
    asked = {"messages": [user("0?")], "prompt": "0?", "tag": "sums", "solution": "7"}
    assert pairs(tmp_path, [episode(*each) for each in scored]) == [
        asked | {"chosen": "a", "rejected": "c", "margin": 1.0}
    ]


def test_a_question_is_the_whole_conversation(tmp_path):
    messages = [system("Add."), user("0?")]
    episodes = [episode(0, score, text) for score, text in ((1.0, "a"), (0.0, "b"))]
    for each in episodes:
        each["info"]["conversation"] = json.dumps(messages)
    (found,) = pairs(tmp_path, episodes)
    assert found["messages"] == messages and "prompt" not in found, "half of a question is none"


def test_what_is_no_answer_is_told(tmp_path):
    with pytest.raises(DataError, match=r"jsonl:2: an episode of 2 turns[\s\S]*jsonl:3: no episode of a run"):
        pairs(tmp_path, [episode(0, 1.0, "a"), episode(0, 0.0, "b", turns=2), {"prompt": "x"}])
    with pytest.raises(DataError, match=r"2 episodes of 2 groups, none with two different scores.* rollout_dump_dir"):
        pairs(tmp_path, [episode(0, 1.0, "a"), episode(1, 0.0, "b")])
    with pytest.raises(DataError, match=r"jsonl:1: column 'score': null, expected a number"):
        pairs(tmp_path, [episode(0, 1.0, "a") | {"score": None}])
    whole = episode(0, 1.0, "a")
    broken = [{"turns": [{"text": "a"}]}, {"turns": ["a"]}, {"group_id": [0]}, {"info": {"conversation": "[{"}}]
    with pytest.raises(DataError, match=r"4 problems[\s\S]*KeyError[\s\S]*TypeError[\s\S]*:3: no epis[\s\S]*JSON"):
        pairs(tmp_path, [whole | each for each in broken])


# --- forms of rows


M, PR = {"messages": "m"}, {"prompt": "q", "response": "r"}
PC, MC = {"prompt": "p", "response": "c"}, {"messages": "p", "response": "c"}
ALPACA = {"prompt": "ask", "query": "input", "response": "output"}


def called(arguments: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": {"a": 1} if arguments is None else arguments}
    return {"id": "call00000", "type": "function", "function": function, **more}


def result(**more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": "2", **more}


FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
PLAIN = [user(), says()]
TWO = [user(), says(), user("2+2?"), says("4")]
THINKS = [user(), says(reasoning_content="one and one")]
USES = [user(), says("", tool_calls=[called()]), result(), says("two")]
BOTH = (1, 3)
"""Answers of ``TWO`` and ``USES``."""


class Form(NamedTuple):
    """A row that is read as the conversation ``same``."""

    name: str
    row: Row
    keys: dict[str, str] = M
    same: Sequence[Row] = PLAIN
    learned: Sequence[int] = (1,)
    tools: Any = None


def talk(name: str, messages: Any, same: Sequence[Row] = PLAIN, **more: Any) -> Form:
    """A row with nothing but its messages."""
    return Form(name, {"m": messages}, same=same, **more)


def advised(name: str, messages: Sequence[Row]) -> Form:
    """A row that is read as ``PLAIN`` behind a system message."""
    return talk(name, messages, [SYSTEM, *PLAIN], learned=[2])


def uses(name: str, messages: Sequence[Row], **more: Any) -> Form:
    """A row that is read as ``USES``."""
    return talk(name, messages, USES, learned=BOTH, **more)


def told(name: str, keys: Mapping[str, str] = {}, **columns: Any) -> Form:
    """A row of ``USES`` with ``TOOLS``."""
    return Form(name, {"m": USES, **columns}, {**M, **keys}, USES, BOTH, TOOLS)


def answers(name: str, first: Row, second: Row, *learned: int, **of_user: Any) -> Form:
    """A row that is read as ``TWO``."""
    return talk(name, [user(**of_user), first, TWO[2], second], TWO, learned=learned)


def text(words: str, kind: str = "text", **more: Any) -> dict[str, Any]:
    return {"type": kind, "text": words, **more}


def shared(speaker: str, words: str) -> dict[str, str]:
    """A message of ShareGPT."""
    return {"from": speaker, "value": words}


HUMAN, GPT = shared("human", "1+1?"), shared("gpt", "2")
ADDS = shared("function_call", '{"name": "add", "arguments": {"a": 1}}')
THOUGHT = {"type": "thinking", "thinking": "one and one"}
OLDER_CALL = says(None, function_call={"name": "add", "arguments": '{"a": 1}'})
WITHOUT_ARGUMENTS = says("", tool_calls=[{"function": {"name": "add", "arguments": ""}}])

ACCEPTED = [
    talk("openai", PLAIN),
    advised("system", [SYSTEM, *PLAIN]),
    talk("capitals", [{**user(), "role": "User"}, {**says(), "role": "ASSISTANT"}]),
    advised("developer", [{**SYSTEM, "role": "developer"}, *PLAIN]),
    talk("json text", json.dumps(PLAIN)),
    talk("several turns", TWO, TWO, learned=BOTH),
    talk("assistant first", [says("Hi."), *PLAIN], [says("Hi."), *PLAIN], learned=[0, 2]),
    talk("assistant alone", [says()], [says()], learned=[0]),
    talk("sharegpt", [HUMAN, GPT]),
    advised("sharegpt system", [shared("system", "Be brief."), shared("user", "1+1?"), shared("chatgpt", "2")]),
    uses("sharegpt tools", [HUMAN, ADDS, shared("observation", "2"), shared("gpt", "two")]),
    talk("roles of sharegpt", [{"role": "human", "content": "1+1?"}, {"role": "model", "content": "2"}]),
    talk("from beside null role", [{"role": None, **HUMAN}, says()]),
    talk("text parts", [user([text("1+"), text("1?")]), says([text("2")])]),
    talk("parts as strings", [user(["1+", "1?"]), says()]),
    talk("responses parts", [user([text("1+1?", "input_text")]), says([text("2", "output_text")])]),
    talk("parts with nulls", [user([text("1+1?", image_url=None)]), says()]),
    talk("thinking part", [user(), says([THOUGHT, text("2")])], THINKS),
    talk("reasoning_content", THINKS, THINKS),
    talk("reasoning", [user(), says(reasoning="one and one")], THINKS),
    talk("thinking", [user(), says(thinking="one and one")], THINKS),
    talk("null reasoning", [user(), says(reasoning_content=None, thinking="")]),
    talk("inline reasoning", [user(), says("<think>\none and one\n</think>\n\n2")], THINKS),
    uses("tool calls", USES),
    uses("null content", [user(), says(None, tool_calls=[called()]), *USES[2:]]),
    uses("no content", [user(), {"role": "assistant", "tool_calls": [called()]}, *USES[2:]]),
    uses("arguments as text", [user(), says("", tool_calls=[called('{"a": 1}')]), *USES[2:]]),
    talk("no arguments", [user(), WITHOUT_ARGUMENTS], [user(), says("", tool_calls=[called({})])]),
    uses("bare calls", [user(), says("", tool_calls=[{"name": "add", "arguments": {"a": 1}}]), *USES[2:]]),
    uses("calls as text", [user(), says("", tool_calls=json.dumps([called()])), *USES[2:]]),
    uses("function_call", [user(), OLDER_CALL, {"role": "function", "name": "add", "content": "2"}, says("two")]),
    talk("null function_call", [user(), says(function_call=None)]),
    talk("empty tool_calls", [user(), says(tool_calls=[])]),
    talk("null tool_calls", [user(tool_calls=None), says(tool_calls=None)]),
    talk("last says by calls", USES[:2], USES[:2]),
    uses("numbered call", [user(), says("", tool_calls=[called(id=7, index=0)]), result(tool_call_id=7), USES[3]]),
    told("tools", tools=TOOLS),
    told("bare tools", tools=[FUNCTION]),
    told("tools as text", tools=json.dumps(TOOLS)),
    told("tools as texts", tools=[json.dumps(TOOLS[0])]),
    told("parameters as text", tools=[{**FUNCTION, "parameters": json.dumps(FUNCTION["parameters"])}]),
    told("older functions", functions=[FUNCTION]),
    told("tools of another name", {"tools": "f"}, f=TOOLS),
    Form("no tools", {"m": PLAIN, "tools": []}),
    Form("null tools", {"m": PLAIN, "tools": None}),
    Form("empty tools text", {"m": PLAIN, "tools": ""}),
    Form("functions of another kind", {"m": PLAIN, "functions": ["sin", "cos"]}),
    answers("weight", says(weight=0), says("4", weight=1), 3),
    talk("weight 1.0", [user(weight=None), says(weight=1.0)]),
    talk("weight 0 of a user", [user(weight=0), says()]),
    answers("train", says(train=True), says("4", train=False), 1, train=False),
    answers("training", says(training=False), says("4"), 3),
    answers("loss", says(loss=False), says("4", loss=True), 3),
    talk("empty answers", [user(), says(""), *TWO[2:]], [user(), says(""), *TWO[2:]], learned=[3]),
    Form("prompt and response", {"q": "1+1?", "r": "2"}, PR),
    Form("alpaca", {"ask": "1+1?", "input": "", "output": "2"}, ALPACA),
    Form("alpaca with input", {"ask": "Add.", "input": "1+1?", "output": "2"}, ALPACA, [user("Add.\n1+1?"), says()]),
    Form("prompt and completion", {"p": "1+1?", "c": "2"}, PC),
    Form("conversational", {"p": [user()], "c": [says()]}, PC),
    Form("conversational, a message", {"p": [user()], "c": says()}, PC),
    Form("conversation and text", {"p": [SYSTEM, user()], "c": "2"}, PC, [SYSTEM, *PLAIN], [2]),
    Form("text and conversation", {"p": "1+1?", "c": [says()]}, PC),
    Form("messages and completion", {"p": [user()], "c": [says()]}, MC),
    Form("completion alone is learned", {"p": TWO[:3], "c": "4"}, PC, TWO, [3]),
    Form("completion with tools", {"p": [user()], "c": USES[1:]}, PC, USES, BOTH),
    Form("whole messages beside a response", {"m": PLAIN, "r": "9"}, M | {"response": "r"}),
    Form("system column", {"q": "1+1?", "r": "2", "s": "Be brief."}, PR | {"system": "s"}, [SYSTEM, *PLAIN], [2]),
    Form("null system column", {"q": "1+1?", "r": "2", "s": None}, PR | {"system": "s"}),
    Form("dotted", {"data": {"q": "1+1?", "r": "2"}}, {"prompt": "data.q", "response": "data.r"}),
    Form("null id", {"id": None, "m": PLAIN}),
    Form("float id", {"id": 1.5, "m": PLAIN}),
    Form("nested id", {"id": {"a": 1}, "m": PLAIN}),
    Form("nested column", {"m": PLAIN, "x": {"a": [{"b": None}]}}),
    talk("unknown message keys", [user(score=0.5, at={"x": [1]}), says(model="y")]),
]

SOUND = {"type": "input_audio", "input_audio": {"data": "x"}}
ANSWERS = [
    (says(""), "m[1].content: empty, expected an answer"),
    (says(" "), "m[1].content: empty, expected an answer"),
    (says("", tool_calls=[]), "m[1].content: empty, expected an answer"),
    (says(None), "m[1]: no content, got 'role', 'content'; expected text"),
    ({"role": "critic", "content": "2"}, "m[1].role: 'critic', expected one of system, developer"),
    (says(weight=0), "column 'm': nothing to train on: weight or train or training or loss excludes all assistant"),
    (says(weight=0.5), "m[1].weight: 0.5, expected 0 or 1"),
    (says(weight="1"), "m[1].weight: '1', expected 0 or 1"),
    (says(weight=0, train=True), "m[1]: weight and train differ"),
    (says([{"type": "tool_use", "name": "add", "input": {}}]), "m[1].content[0]: a part of type 'tool_use'"),
    (says(tool_calls=[called("{a: 1}")]), "m[1].tool_calls[0].arguments: '{a: 1}' is not JSON"),
    (says(tool_calls=[called([1])]), "m[1].tool_calls[0].arguments: [1], expected an object"),
    (says(tool_calls=[{"function": {}}]), "m[1].tool_calls[0]: {'function': {}}, expected function"),
    (
        says(tool_calls=[{"function": {"name": "f", "parameters": {}}}]),
        "m[1].tool_calls[0]: unknown key 'parameters' of a call",
    ),
    (says(tool_calls=[called()], function_call={"name": "f"}), "m[1]: tool_calls and function_call, expected one"),
    (says(reasoning="a", thinking="b"), "m[1]: different reasoning in reasoning and thinking"),
]
QUESTIONS = [
    (user(weight=1), "m[0].weight: 1 of the user, expected only of the assistant"),
    (user([SOUND]), "m[0].content[0]: a part of type 'input_audio', expected only text, pictures and videos: sound"),
    (user({"a": 1}), "m[0].content: {'a': 1}, expected text, or a list of parts"),
    (user(tool_calls=[called()]), "m[0]: a call of the user, expected only of the assistant"),
    (user("\ud800"), "m[0].content: a lone surrogate at character 1"),
]
WRONG_TOOLS: list[tuple[Any, str]] = [
    (["add"], "tools[0]: 'add' is not JSON"),
    ([{"type": "code_interpreter"}], "tools[0]: {'type': 'code_interpreter'}, expected {type: function"),
    (3, "column 'tools': 3, expected a list of tools (data_args.tools: null: not read)"),
]
REFUSED: list[tuple[Row, dict[str, str], str]] = [
    *(({"m": [user(), answer]}, M, reason) for answer, reason in ANSWERS),
    *(({"m": [question, says()]}, M, reason) for question, reason in QUESTIONS),
    *(({"m": PLAIN, "tools": tools}, M, reason) for tools, reason in WRONG_TOOLS),
    ({"m": [user()]}, M, "m[0]: the last message is the user's, expected the assistant's; or data_args.response"),
    ({"m": "hello"}, M, "column 'm': text that is not a JSON list of messages"),
    ({"m": {"role": "user"}}, M, "column 'm': {'role': 'user'}, expected a list of messages"),
    ({"x": 1}, M, "no column 'm', the row has 'x'"),
    ({"q": "1+1?", "r": None}, PR, "column 'r': null, expected the text of an answer, or its messages"),
    ({"q": "1+1?", "r": " "}, PR, "column 'r': ' ', expected the text of an answer"),
    ({"p": [user()], "c": [user("2")]}, PC, "c[0]: the last message is the user's, expected the assistant's"),
    ({"p": PLAIN, "c": "3"}, PC, "p[1]: the last message is the assistant's, expected the user's"),
    ({"q": "1+1?", "r": "2", "s": "x"}, PR | {"tools": "f"}, "no column 'f'"),
]


def as_lists(rows: Iterable[tuple[Any, Any]]) -> list[tuple[list[int], list[bool]]]:
    return [(ids.tolist(), mask.tolist()) for ids, mask in rows]


@pytest.mark.parametrize("form", ACCEPTED, ids=[form.name for form in ACCEPTED])
def test_a_form_is_read_as_the_same_conversation_in_openais(tmp_path, form):
    data = load(write(tmp_path / "data.jsonl", [form.row]), form.keys, **FORMS)
    assert as_lists(rows_of(data)) == as_lists(QWEN3.rows(form.same, form.learned, form.tools))


@pytest.mark.parametrize("case", REFUSED, ids=[case[2][:60] for case in REFUSED])
def test_what_is_not_understood_is_refused_with_its_line(tmp_path, case):
    row, keys, reason = case
    fine: dict[str, Any] = {"m": PLAIN, "q": "1+1?", "r": "2", "p": [user()], "c": "2", "f": TOOLS}
    path = write(tmp_path / "data.jsonl", [fine, row])
    with pytest.raises(DataError) as caught:
        load(path, keys, **FORMS)
    assert caught.value.count == 1
    assert caught.value.problems[0].startswith(f"{path}:2: {reason}"), caught.value.problems[0]


def test_parquet_gives_every_row_and_message_the_keys_of_all(tmp_path):
    """A struct that is there for others comes as null, and so do keys of arguments and of schemas."""
    parameters = {"type": "object", "properties": {"w": {"type": "string"}}}
    other = {"name": "look", "description": "Looks.", "parameters": parameters}
    looks = called(function={"name": "look", "arguments": {"w": "x"}})
    rows = [
        {"m": PLAIN, "tools": None},
        {"m": USES, "tools": [FUNCTION]},
        {"m": [user(), says(None, tool_calls=[looks])], "tools": [other]},
        {"m": THINKS, "tools": []},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    plain = write(tmp_path / "data.jsonl", rows)
    found, expected = (load(path, M, **FORMS) for path in (tmp_path / "data.parquet", plain))
    assert as_lists(rows_of(found)) == as_lists(rows_of(expected))


def test_columns_that_nobody_reads_never_refuse_a_file(tmp_path):
    twice = pa.array([[("k", 1), ("k", 2)]] * 2, pa.map_(pa.string(), pa.int64()))
    odd = {
        "at": [datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)] * 2,
        "took": [datetime.timedelta(seconds=3)] * 2,
        "picture": [b"\x89PNG"] * 2,
        "nested": [{"a": [{"b": b"x"}]}] * 2,
        "nan": [float("nan")] * 2,
        "huge": pa.array([2**64 - 1] * 2, pa.uint64()),
        "map": twice,
        "ns": pa.array([1, 2], pa.timestamp("ns")),
        "nothing": pa.nulls(2),
        "id": [1.0, None],
    }
    table = pa.table({"m": [PLAIN, PLAIN], **odd})
    parquet.write_table(table, tmp_path / "data.parquet")
    data = load(tmp_path / "data.parquet", M, **FORMS)
    assert len(data.batch.samples) == 2
    assert [question.id for question in data.questions] == ["1", f"{tmp_path / 'data.parquet'}:2"]
    (note,) = data.report.notes
    assert note.endswith("unused columns: at, took, picture, nested, nan, huge, map, ns, nothing")
    rows = [{"m": USES, "functions": [FUNCTION]}]
    assert load(write(tmp_path / "calls.jsonl", rows), M, **FORMS).report.notes == ()
    (note,) = load(write(tmp_path / "others.jsonl", [{"m": PLAIN, "functions": 3}]), M, **FORMS).report.notes
    assert note.endswith("unused columns: functions")


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"p": "1+1?", "chosen": "2", "rejected": "3"}, {"prompt": "p"}),
        ({"p": [user()], "chosen": [says()], "rejected": [says("3")]}, {"prompt": "p"}),
        ({"p": [user()], "chosen": says(), "rejected": "3"}, {"messages": "p"}),
        ({"p": "1+1?", "chosen": PLAIN, "rejected": [user(), says("3")]}, {"prompt": "p"}),
        ({"chosen": PLAIN, "rejected": [user(), says("3")]}, {"messages": "chosen"}),
        ({"chosen": [HUMAN, GPT], "rejected": [user(), says([text("3")])]}, {"messages": "chosen"}),
        ({"p": "1+1?", "chosen": "2", "rejected": "3", "id": None, "x": {"a": 1}}, {"prompt": "p"}),
    ],
)
def test_pairs_take_the_same_forms(tmp_path, row, keys):
    data = load_pairs(tmp_path, [row], **keys, **FORMS)
    assert as_lists(rows_of(data)) == as_lists(QWEN3.rows([user(), says(text)])[0] for text in ("2", "3"))
    assert data.batch.pair_B.tolist() == [0, 0] and data.batch.preferred_B.tolist() == [True, False]
    assert [question.messages for question in data.questions] == [(user(),)]
    assert str(data.report).startswith("1 pairs, ")


def test_pairs_of_calls_are_compared_with_the_tools_told(tmp_path):
    answers = [says("", tool_calls=[called({"a": number})]) for number in (1, 2)]
    row = {"p": [user()], "chosen": [answers[0]], "rejected": [answers[1]], "tools": TOOLS}
    data = load_pairs(tmp_path, [row], messages="p", **FORMS)
    assert as_lists(rows_of(data)) == as_lists(QWEN3.rows([user(), answer], None, TOOLS)[0] for answer in answers)
    with pytest.raises(DataError, match="the same answer, expected two"):
        load_pairs(tmp_path, [{**row, "rejected": [answers[0]]}], messages="p", **FORMS)


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"q": "1+1?", "r": "2", "score": 1}, PR),
        ({"m": [HUMAN, GPT], "score": 1}, M),
        ({"q": [user()], "r": [says()], "score": "1", "x": [1]}, PR),
    ],
)
def test_scored_answers_take_the_same_forms(tmp_path, row, keys):
    data = load_scores(tmp_path, [row], in_steps=False, keys=keys, **FORMS)
    whole = QWEN3.history(PLAIN).tolist()
    assert data.batch.tokens_T.tolist() == [*whole, whole[-1]]


@pytest.mark.parametrize(
    ("row", "keys", "messages", "tools"),
    [
        ({"q": "1+1?"}, {"prompt": "q"}, [user()], None),
        ({"q": [SYSTEM, user()]}, {"prompt": "q"}, [SYSTEM, user()], None),
        ({"q": [HUMAN]}, {"messages": "q"}, [user()], None),
        ({"q": [user([text("1+1?")])], "tools": TOOLS}, {"messages": "q"}, [user()], TOOLS),
        ({"q": [*USES, user("so?")], "tools": [FUNCTION]}, {"messages": "q"}, [*USES, user("so?")], TOOLS),
    ],
)
def test_prompts_take_the_same_forms(tmp_path, row, keys, messages, tools):
    path = write(tmp_path / "data.jsonl", [{**row, "tag": "sums", "solution": "2"}])
    args = DataArguments(file_name=str(path), **keys)
    (prompt,) = load_prompts(args, renderer=QWEN3, prompt_length=4000, allowed_tags={"sums"}, seed=0)
    ids = QWEN3.prompt(messages, tools)
    assert QWEN3.prompt(prompt.messages, prompt.tools).tolist() == ids.tolist()
    with pytest.raises(DataError, match=f"{len(ids)} tokens, expected at most"):
        load_prompts(args, renderer=QWEN3, prompt_length=len(ids) - 1, allowed_tags={"sums"}, seed=0)


def test_what_is_left_out_is_told_once_for_a_file(tmp_path):
    rows = [{"m": PLAIN}, {"m": [user(name="Ann"), says()]}, {"m": [user(name="Bob"), says()]}]
    path = write(tmp_path / "data.jsonl", rows)
    report = load(path, M, **FORMS).report
    left_out = "the chat template drops 'name' of messages before an answer"
    assert report.notes == (f"warning: {path}: {left_out}: 2 rows, the first {path}:2",)
    qwen2_5 = ChatRenderer(family_tokenizer("qwen2_5"))
    (note,) = load(write(path, [{"m": THINKS}]), M, renderer=qwen2_5, max_tokens=400).report.notes
    assert "drops reasoning_content of answers that are trained on: 1 row, the first" in note


def test_rewritten_turns_make_samples_of_their_own_and_one_question(tmp_path):
    data = load(write(tmp_path / "data.jsonl", [{"m": TWO}, {"m": PLAIN}]), M, **FORMS)
    assert len(data.batch.samples) == 3 and len(data.questions) == 2
    assert str(data.report).startswith("2 conversations as 3 samples, ")
    assert "is a separate sample" in str(data.report)
