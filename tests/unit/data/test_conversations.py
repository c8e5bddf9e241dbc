"""Datasets of conversations: columns, lengths, what is wrong with a row, and what is reported."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from roll.configs.data import DataArguments
from roll.configs.preference import MarginColumns, RewardColumns
from roll.data.conversations import Conversations, Scoring, check_conversations, encode_talk, load_conversations
from roll.data.files import DataError
from roll.data.preferences import best_and_worst, load_preferences, load_scored
from roll.data.reading import Reading
from roll.data.renderer import ChatRenderer
from roll.data.template_check import LeftOut
from roll.models.tiny import make_tokenizer
from tests.support.chat_families import FAMILIES, MARKS, family_tokenizer
from tests.support.lines import write_lines as write
from tests.support.talks import says, system, user

RENDERER = ChatRenderer(make_tokenizer())
TALK = [user("a"), says("Up"), user("b"), says("Down")]
ANSWERED = {"prompt": "q", "response": "r"}


def load(path: Path, columns: dict[str, Any], **options: Any) -> Conversations:
    args = DataArguments(file_name=str(path), **columns)
    return load_conversations(args, renderer=RENDERER, **{"max_tokens": 64, **options})


def said(data: Conversations) -> list[str]:
    """What each row's mask is 1 on, as text."""
    lengths = data.batch.lengths_B.tolist()
    rows = zip(data.batch.tokens_T.split(lengths), data.batch.loss_mask_T.split(lengths), strict=True)
    return [RENDERER.tokenizer.decode(tokens[mask]) for tokens, mask in rows]


def test_questions_with_answers_and_conversations_are_read_from_every_format(tmp_path):
    pairs = load(write(tmp_path / "pairs.jsonl", [{"q": "a", "r": "Up"}]), ANSWERED)
    assert said(pairs) == ["Up<|im_end|>"]
    rows = [{"talk": TALK}, {"talk": TALK[:2]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "talks.parquet")
    for path in (write(tmp_path / "talks.jsonl", rows), tmp_path / "talks.parquet"):
        talks = load(path, {"messages": "talk", "system_prompt": "S"})
        assert said(talks) == ["Up<|im_end|>Down<|im_end|>", "Up<|im_end|>"]
        assert said(load(path, {"messages": "talk"}, last_only=True))[0] == "Down<|im_end|>"
        assert [question.messages[-1]["content"] for question in talks.questions] == ["b", "a"]
        assert talks.questions[0].messages[0]["role"] == "system"
    assert pairs.batch.tokens_T.tolist() == [
        *RENDERER.prompt(TALK[:1]).tolist(),
        *RENDERER.tokenizer.encode("Up<|im_end|>"),
    ]


PADS_WITH_ITS_END = [name for name, family in FAMILIES.items() if family.pad == MARKS[name]]


@pytest.mark.parametrize("family", PADS_WITH_ITS_END)
def test_an_end_that_pads_too_is_learned_behind_every_answer(family, tmp_path):
    renderer = ChatRenderer(family_tokenizer(family))
    args = DataArguments(file_name=str(write(tmp_path / "talks.jsonl", [{"talk": TALK}])), messages="talk")
    batch = load_conversations(args, renderer=renderer, max_tokens=4096).batch
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


HEAD = "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n"


def load_scores(path: Path, rows: list[dict[str, Any]], *, in_steps: bool) -> Conversations:
    data = DataArguments(file_name=str(write(path / "data.jsonl", rows)), prompt="ask", response="answer")
    return load_scored(data, RewardColumns(), in_steps=in_steps, renderer=RENDERER, max_tokens=60)


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


def load_pairs(path: Path, rows: list[dict[str, Any]], *, label: str | None = None, **options: Any) -> Conversations:
    file = write(path / "data.jsonl", rows)
    keys = {key: options.pop(key) for key in ("prompt", "messages", "response") if key in options} or {"prompt": "ask"}
    return load_preferences(
        DataArguments(file_name=str(file), **keys),
        MarginColumns(margin=options.pop("margin", None)),
        label=label,
        encode=encode_talk(RENDERER),
        left_out=LeftOut(RENDERER),
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
