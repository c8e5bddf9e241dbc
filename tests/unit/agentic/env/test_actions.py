"""The action parser."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.agentic.env.game import MAX_PARSED_CHARS, ActionParser

ACTIONS = {"Up": 0, "Down": 1, "Turn left": 2}


@pytest.mark.parametrize(
    ("text", "action", "pattern"),
    [
        ("<answer>Up</answer>", "Up", ()),
        ("<answer> up\n</answer>", "Up", ()),
        ("I think so. <answer>TURN LEFT</answer> Done.", "Turn left", ()),
        ("<answer>Up</answer> no, <answer>Down</answer>", "Down", ()),
        ("<answer>Up</answer> no, <answer>Jump</answer>", None, ()),
        *((text, None, ()) for text in ("<answer>Up Down</answer>", "<answer></answer>", "<answer>Up", "Up", "")),
        ("<ANSWER>Up</ANSWER>", None, ()),
        ("x" * 10 * MAX_PARSED_CHARS + "<answer>Up</answer>", "Up", ()),
        ("<answer>Up</answer>" + "x" * MAX_PARSED_CHARS, None, ()),
        ("go", None, (r"go(?: (Up))?",)),
        ("MOVE: down", "Down", (r"(?i)move:\s*(\w+)",)),
        ("<answer>Up</answer>", None, (r"(?i)move:\s*(\w+)",)),
    ],
)
def test_the_last_answer_at_the_end_of_a_text_counts_whatever_its_case(text, action, pattern):
    assert ActionParser(ACTIONS, *pattern).parse(text) == action


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("<answer>(.*", 'action_pattern: seen "<answer>\\(.*", expected a regular expression'), ("up|down", "group")],
)
def test_a_bad_pattern_names_the_key(pattern, message):
    with pytest.raises(ValueError, match=message):
        ActionParser(ACTIONS, pattern)


def test_names_that_differ_only_in_case_are_refused():
    with pytest.raises(ValueError, match="differ in more than case"):
        ActionParser({"up": 0, "UP": 1})


def test_a_long_text_against_a_slow_pattern_takes_bounded_time():
    start = time.process_time()
    assert ActionParser(ACTIONS).parse("<answer>" * 100_000) is None
    think = ActionParser(ACTIONS, r"<think>.*?</think>\s*<answer>(.*?)</answer>")
    assert think.parse("<think></think><answer>" * 10_000) is None
    assert time.process_time() - start < 5.0


@given(st.text())
def test_any_text_is_parsed(text):
    assert ActionParser(ACTIONS).parse(text) in (*ACTIONS, None)
