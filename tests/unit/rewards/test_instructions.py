"""Instructions whose observance can be verified."""

from __future__ import annotations

import json

import pytest

from roll.rewards import VERIFIERS, RewardError, Sample, Verdict
from roll.rewards.rules import CONSTRAINTS, InstructionConfig, InstructionVerifier


def sample(response: str, constraints: object = None, **extra: object) -> Sample:
    info = extra if constraints is None else {"constraints": constraints, **extra}
    return Sample(prompt="Say hello, please.", response=response, ground_truth=None, data_source="tag", extra_info=info)


def verify(response: str, *constraints: dict, **config: object) -> Verdict:
    return InstructionVerifier(InstructionConfig(**config)).check(sample(response, list(constraints)))


def test_the_name_leads_to_the_verifier():
    assert VERIFIERS.get("instruction") is InstructionVerifier


CASES = [
    (
        {"kind": "num_words", "min": 2, "max": 3},
        ["one two", "one, two – three!", "don't well-known"],
        ["one", "a b c d"],
    ),
    (
        {"kind": "num_sentences", "min": 2, "max": 2},
        ["A. B!", 'He said "no." So?', "你好。再见。", "A...\n\nB"],
        ["A.", "A. B. C."],
    ),
    ({"kind": "num_paragraphs", "max": 2}, ["a", "a\nb\n \n\nc"], ["a\n\nb\n\nc"]),
    ({"kind": "num_chars", "min": 3, "max": 3}, ["abc", " 日本語\n"], ["ab", "a b c"]),
    ({"kind": "num_bullets", "min": 2, "max": 2}, ["- a\n* b", "Text:\n  • a\n+ b"], ["- a", "-a\n-b", "a - b\nc - d"]),
    ({"kind": "placeholders", "min": 2}, ["[name], [street name]"], ["[name] []", "[a"]),
    ({"kind": "keywords_include", "keywords": ["car", "new York"]}, ["A Car in New York!"], ["cart, New York", "car"]),
    ({"kind": "keywords_include", "keywords": ["car"], "min_count": 2}, ["car, car"], ["car, cars"]),
    ({"kind": "keywords_include", "keywords": ["苹果"], "whole_words": False}, ["我喜欢苹果吗"], ["我喜欢"]),
    ({"kind": "keywords_include", "keywords": ["c++", "(a)"]}, ["C++ and (a)"], ["c", "C+++"[:3]]),
    ({"kind": "keywords_exclude", "keywords": ["car", "bus"]}, ["cart"], ["a bus", "car"]),
    ({"kind": "keywords_exclude", "keywords": ["car"], "min_count": 2}, ["car"], ["car car"]),
    (
        {"kind": "json"},
        ['{"a": 1}', "```json\n[1]\n```", " 3 "],
        ["{'a': 1}", '{"a": NaN}', 'x {"a": 1}', "[" * 100_000, "9" * 5000],
    ),
    ({"kind": "json", "required_keys": ["a", "b"]}, ['{"a": 1, "b": null}'], ['{"a": 1}', '["a", "b"]']),
    ({"kind": "starts_with", "text": "Dear "}, ["\nDear Ann", "Dear"], ["dear Ann", "My Dear"]),
    ({"kind": "ends_with", "text": "BYE.", "ignore_case": True}, ["so bye.\n"], ["bye"]),
    ({"kind": "lowercase"}, ["no big letters, 1!", "ß 日本"], ["No"]),
    ({"kind": "uppercase"}, ["LOUD 1!"], ["LOUd"]),
    ({"kind": "no_commas"}, ["a; b."], ["a, b", "你好，世界"]),
    ({"kind": "title"}, ["<<Spring>>\nIt is"], ["<< >>", "<Spring>", "<<Spring\n>>"]),
    ({"kind": "regex", "pattern": r"\d{3}"}, ["a 123"], ["12"]),
    ({"kind": "regex", "pattern": "a.*b", "mode": "fullmatch"}, ["a\nb"], ["a b."]),
    ({"kind": "repeat_prompt"}, ["say  hello, please. Hello!"], ["Hello! Say hello, please."]),
    ({"kind": "repeat_prompt", "text": "Ask"}, ["ask me"], ["me: ask"]),
    (
        {"kind": "sections", "min": 2},
        ["Section 1\na\n\nSECTION 2\nb", "**Section I**\n# Section II"],
        ["Section 1", "Section one\nSection two"],
    ),
    ({"kind": "sections", "splitter": "Tag", "min": 0, "max": 1}, ["Tag 1", "none"], ["Tag 1\nTag 2"]),
]


@pytest.mark.parametrize(("constraint", "good", "bad"), CASES)
def test_kinds(constraint, good, bad):
    for text in good:
        assert verify(text, constraint).correct, text
    for text in bad:
        assert not verify(text, constraint).correct, text


def test_every_kind_is_tested_and_a_blank_response_fulfils_none():
    assert {case[0]["kind"] for case in CASES} == set(CONSTRAINTS)
    for constraint, _, _ in CASES:
        assert verify(" \n", constraint).score == 0.0, constraint


def test_the_score_is_the_share_or_all_or_nothing():
    constraints = [
        {"kind": "lowercase"},
        {"kind": "keywords_include", "keywords": ["a"]},
        {"kind": "keywords_include", "keywords": ["z"]},
    ]
    parts = {"lowercase": 1.0, "keywords_include": 0.5}
    assert verify("a b", *constraints) == Verdict(pytest.approx(2 / 3), False, None, parts, seeks_answer=False)
    assert verify("a b", *constraints, strict=True) == Verdict(0.0, False, None, parts, seeks_answer=False)
    assert verify("a z", *constraints, strict=True).score == 1.0


def test_constraints_of_all_rows_add_to_those_of_the_row_also_of_columnar_files():
    verifier = InstructionVerifier(InstructionConfig(key="rules", constraints=[{"kind": "lowercase"}]))
    assert verifier.check(sample("a")).parts == {"lowercase": 1.0}
    assert verifier.check(sample("a", rules=[{"kind": "no_commas"}])).parts == {"lowercase": 1.0, "no_commas": 1.0}
    row = {"kind": "num_words", "min": 1.0, "max": None, "keywords": None}
    assert verify("a", row).correct
    verifier = InstructionVerifier(InstructionConfig())
    assert verifier.check(sample("a", json.dumps([row]))).correct


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        (None, "extra_info.constraints: got null, expected a list"),
        ([], r"got \[\], expected at least one constraint"),
        ("[", "got text that is no JSON"),
        ([{"kind": "num_word"}], r"constraints.0.kind: got \"num_word\", expected one of .*did you mean num_words\?"),
        ([{"min": 1}], "constraints.0: got .*, expected a mapping with kind"),
        (["num_words"], "constraints.0: got .*, expected a mapping"),
        ([{"kind": "num_words"}], "constraints.0.min: got 0, expected at least 1"),
        ([{"kind": "num_words", "min": 3, "max": 2}], "constraints.0.max: got 2, expected at least min = 3"),
        ([{"kind": "num_words", "minimum": 3}], "constraints.0.minimum: got 3, expected no such key"),
        ([{"kind": "json"}, {"kind": "regex", "pattern": "("}], "constraints.1.pattern: got .*regular expression"),
        ([{"kind": "keywords_include", "keywords": []}], "constraints.0.keywords: got .*at least 1 long"),
        ([{"kind": "keywords_include", "keywords": [" "]}], "constraints.0.keywords: got .*none blank"),
        ([{"kind": "ends_with", "text": " "}], "constraints.0.text: got .*not blank"),
        ([{"kind": "sections", "splitter": " "}], "constraints.0.splitter: got .*not blank"),
    ],
)
def test_rows_that_cannot_be_understood_are_errors_with_the_row(constraints, message):
    with pytest.raises(RewardError, match=message) as caught:
        InstructionVerifier(InstructionConfig()).check(sample("a", constraints, id="row-7"))
    assert "(row row-7)" in str(caught.value)


def test_args_are_checked_at_start():
    config = InstructionConfig(
        constraints=[{"kind": "json"}, {"kind": "jsn"}, {"kind": "sections", "min": 2, "max": 1}]
    )
    first, second = config.problems()
    assert (first.path, first.seen, first.hint) == ("constraints.1.kind", "jsn", "did you mean json?")
    assert str(second) == "constraints.2.max: got 1, expected at least min = 2"
    with pytest.raises(ValueError, match=r"constraints\.1\.kind"):
        InstructionVerifier(config)


def test_huge_and_strange_texts():
    huge = ("Word. " * 200_000) + "\ud800\x00"
    verdict = verify(huge, *(case[0] for case in CASES))
    assert 0 <= verdict.score <= 1
