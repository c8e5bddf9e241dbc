"""``device_mapping``: what the grammar takes, and what it refuses without running it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.configs.worker import parse_device_mapping


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("list(range(0,16))", list(range(16))),
        ("range(4)", [0, 1, 2, 3]),
        ("[0, 1]", [0, 1]),
        ("[3]", [3]),
        ("list(range(0,8)) + list(range(16,24))", [*range(8), *range(16, 24)]),
        ("list(range(0, 8, 2)) + [1] + (list(range(9,11)))", [0, 2, 4, 6, 1, 9, 10]),
        ("list([5, 6])", [5, 6]),
        ("list(range(3, -1, -1))", [3, 2, 1, 0]),
        ("  [7]  ", [7]),
        ([4, 2], [4, 2]),
        (None, None),
    ],
)
def test_expressions_and_lists_give_device_ids(text, devices):
    assert parse_device_mapping(text) == devices


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch /tmp/owned')",
        "list(range(0, 10**9))",
        "list(range(0, 1000000000000))",
        "[i for i in range(4)]",
        "[0] * 1000000000",
        "list(map(int, '01'))",
        "list(range(*[0, 4]))",
        "list(range(stop=4))",
        "(lambda: [0])()",
        "open('/etc/passwd')",
        "[True]",
        "['0']",
        "[0.0]",
        "[0, 0]",
        "[-1]",
        "[]",
        "list()",
        "range()",
        "range(0)",
        "list(range(0, 4, 0))",
        "list(range(0,",
        "",
        "0",
        "0; 1",
        "(" * 400 + "[0]" + ")" * 400,
        "[0]" + " + [0]" * 100_000,
        "\x00",
        [True],
        [0, "1"],
        {"0": 1},
        3,
        4.0,
    ],
)
def test_anything_else_is_refused_without_being_run(text):
    with pytest.raises(ValueError, match=r"devic|expression|range"):
        parse_device_mapping(text)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=4))
def test_a_sum_of_ranges_agrees_with_python(ranges):
    text = " + ".join(f"list(range({start}, {start + length}, {step}))" for start, length, step in ranges)
    expected = [device for start, length, step in ranges for device in range(start, start + length, step)]
    if len(set(expected)) == len(expected):
        assert parse_device_mapping(text) == expected
    else:
        with pytest.raises(ValueError, match="once"):
            parse_device_mapping(text)


@given(st.text(max_size=60))
def test_no_text_does_anything_but_parse_or_raise_a_value_error(text):
    try:
        devices = parse_device_mapping(text)
    except ValueError:
        return
    assert devices and all(type(device) is int and device >= 0 for device in devices)
