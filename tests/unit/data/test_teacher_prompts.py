"""What a teacher reads in place of a prompt: columns filled in, and what is wrong with rows."""

from __future__ import annotations

import pytest

from roll.data.files.rows import DataError
from roll.data.prompt_rows import RowError
from roll.data.prompts import Prompt
from roll.data.renderer import ChatRenderer
from roll.data.teacher_prompts import TeacherPrompts
from roll.models.tiny import make_tokenizer

RENDERER = ChatRenderer(make_tokenizer())
MESSAGES = ({"role": "system", "content": "S"}, {"role": "user", "content": "3+4="})


def row(name: str = "a", **columns: object) -> Prompt:
    return Prompt(name, "sums", MESSAGES, ground_truth="7", extra_info=columns)


def test_placeholders_are_columns_of_the_row() -> None:
    writer = TeacherPrompts("{prompt} is {answer}: {worked.steps} {n} \\boxed{x} {{n}}", RENDERER, "answer")
    prompt = row(worked={"steps": "{prompt} up"}, n=2)
    *before, last = writer.messages(prompt)
    assert before == [MESSAGES[0]] and last["role"] == "user"
    assert last["content"] == "3+4= is 7: {prompt} up 2 \\boxed{x} {{n}}", "what is filled in is not filled again"
    assert writer.ids(prompt).tolist() == RENDERER.prompt([*before, last]).tolist()
    assert prompt.messages == MESSAGES
    with pytest.raises(RowError, match=r"no column 'worked\.steps'"):
        writer.messages(row())


def test_long_columns_lose_their_end() -> None:
    tokenizer, text = RENDERER.tokenizer, "3+4=7, 30+40=70"
    for most in range(1, 20):
        said = TeacherPrompts("{prompt}{answer}|{solution}", RENDERER, "answer", most).messages(row(solution=text))
        kept = said[-1]["content"].removeprefix("3+4=7|")
        count = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert text.startswith(kept) and len(tokenizer(kept)["input_ids"]) == min(most, count)
    cut = TeacherPrompts("{solution}", RENDERER, column_length=3).messages(
        row(solution="ab\N{GREEK SMALL LETTER ALPHA}")
    )
    assert cut[-1]["content"] in ("ab", "ab\N{GREEK SMALL LETTER ALPHA}"), "no part of a character"


def test_everything_wrong_with_the_rows_is_told() -> None:
    writer = TeacherPrompts("{prompt} {solution}", RENDERER)
    rows = [row("a", solution="7"), row("b"), row("c", solution=None), row("d", solution="9" * 80)]
    writer.check(rows[:1], 60)
    with pytest.raises(DataError) as caught:
        writer.check(rows, 60)
    assert caught.value.count == 3
    told = "\n".join(caught.value.problems)
    for words in (
        "b: teacher_prompt: no column 'solution'",
        "c: teacher_prompt: column 'solution': None, expected text or a number",
        "d: teacher_prompt: ",
        "tokens, expected at most 60: sequence_length less the longest answer",
    ):
        assert words in told, told
