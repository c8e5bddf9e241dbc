"""Words of the command line: each means what it would mean in a file, or is refused with its key and a hint."""

from __future__ import annotations

import logging
import math
import shlex
import subprocess
from typing import Any

import pytest
from omegaconf import OmegaConf

from roll.configs.overrides import parse_overrides


def read(*words: str) -> dict[str, Any]:
    overrides, problems = parse_overrides(words)
    assert not problems
    return {override.key: override.value for override in overrides}


SAME = [
    r'["\n"]',
    r'"a\tb\u00e9"',
    r"'\n'",
    r"\n",
    r"[\n]",
    "'it''s'",
    "null",
    "~",
    "Null",
    '"null"',
    "true",
    "True",
    "yes",
    "off",
    "1e-4",
    "1E3",
    "-3",
    "+3",
    ".5",
    "5.",
    "0x1f",
    "1_000",
    ".inf",
    "größe",
    "😀",
    "[größe, '</s>']",
    "a=b=c",
    "<|im_end|>",
    "[<|im_end|>]",
    "x:y",
    "a,b",
    "list(range(0,2))",
    "{a: 1, b: [x, {c: null}]}",
    '{"x.y": 1}',
    "[]",
    "{}",
    "[1,]",
    "  padded  ",
    "https://h:8/v1",
    "C:/x",
    "5%",
    "int(3.7)",
]


@pytest.mark.parametrize("value", SAME)
def test_a_value_means_what_it_means_in_a_file(value: str) -> None:
    expected = OmegaConf.to_container(OmegaConf.create(f"key: {value}"))
    assert read(f"key={value}") == expected
    assert type(read(f"key={value}")["key"]) is type(expected["key"])  # type: ignore[index,call-overload]


def test_links_need_no_quotes_in_collections_and_colons_no_space() -> None:
    assert read("a=[${b},{c:${d.e},f:${oc.env:X,${y}}}]") == {"a": ["${b}", {"c": "${d.e}", "f": "${oc.env:X,${y}}"}]}
    assert read("a={b:1,c:[x,y],d:{e:true},f:tests.x:Y,g:'u v',h:null}") == {
        "a": {"b": 1, "c": ["x", "y"], "d": {"e": True}, "f": "tests.x:Y", "g": "u v", "h": None}
    }
    assert math.isnan(read("a=.nan")["a"])


@pytest.mark.parametrize(
    "value",
    [
        "[a, None]",
        "{b: None}",
        "",
        " ",
        "a #b",
        "#b",
        "b: c",
        '"x',
        "[a",
        "{a: b: c}",
        "@x",
        "%x",
        "`x`",
        "*x",
        "!x y",
        "&x",
        "=",
        "{{ x }}",
        "{% if x %}",
        "one\ntwo",
        '"one\ntwo"',
        "|",
        ">-",
        "- x",
        "a: ",
        "[" * 3000,
        "\udcff",
        "1" * 5000,
    ],
)
def test_a_value_that_yaml_would_read_otherwise_or_not_at_all_is_refused_with_a_way_to_write_it(value: str) -> None:
    overrides, (problem,) = parse_overrides([f"some.key={value}"])
    assert not overrides and problem.path == "some.key" and problem.seen == value and "some.key=" in problem.hint
    if value.strip() and value.isprintable():  # the hint, through a shell, is the text
        command = problem.hint.removeprefix("for this very text: ")
        word = subprocess.run(["sh", "-c", f"printf %s {command}"], capture_output=True, text=True, check=True).stdout
        assert shlex.split(command) == [word] and read(word) == {"some.key": value}


def test_pythons_none_is_answered_with_null() -> None:
    overrides, (problem,) = parse_overrides(["some.key=None"])
    assert not overrides and problem.hint == "write some.key=null"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("a@b=1", "a.b=1"),
        ("a.b[0]=1", "a.b=[…]"),
        ("~a=1", "has no value"),
        ("a..b=1", "is no key"),
        (".a=1", "is no key"),
        ("=1", "is no key"),
        ("a b=1", "is no key"),
        ('a."x.y"=1', "the mapping"),
        ("a", "key=value"),
        ("a/b=1", "is no key"),
        ("@a=1", "is no key"),
        ("a:b=1", "is no key"),
    ],
)
def test_what_is_no_key_is_refused(word: str, hint: str) -> None:
    overrides, (problem,) = parse_overrides([word])
    assert not overrides and problem.path == word and hint in problem.hint


def test_signs_before_a_key_and_keys_that_come_twice(caplog: pytest.LogCaptureFixture) -> None:
    assert read("+a=1", "++b.c=2", "d-e=3") == {"a": 1, "b.c": 2, "d-e": 3}
    ((deleted,), _) = parse_overrides(["~a.b"])
    assert deleted.deletes and deleted.path == ("a", "b")
    with caplog.at_level(logging.WARNING):
        assert read("a=1", "b=2", "a=3", "b=2") == {"a": 3, "b": 2}
    assert [record.getMessage() for record in caplog.records] == ["a is given twice: the last counts, not 1"]
