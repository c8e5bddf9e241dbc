"""What holds for every generator of data: equal arguments write equal bytes, wrong ones are named and write nothing."""

import re

import pytest

from roll.demo import arithmetic, products, shapes, word_problems

SMALL = {"num_train": 60, "num_val": 20, "num_demonstrations": 60}
MAKERS = {
    arithmetic: {}, products: SMALL, shapes: SMALL, word_problems: {"num_train": 60, "num_val": 20},
}  # fmt: skip


@pytest.mark.parametrize("module", MAKERS, ids=lambda module: module.__name__)
def test_equal_arguments_write_equal_bytes(module, tmp_path):
    for name in ("a", "b"):
        module.write_dataset(tmp_path / name, seed=3, **MAKERS[module])
    written = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    assert written == {file.name: file.read_bytes() for file in (tmp_path / "b").iterdir()} and len(written) >= 2


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (arithmetic, {"min_operand": -1}, "min_operand, max_operand: got -1 and 999"),
        (arithmetic, {"min_operand": 9, "max_operand": 9}, "min_operand, max_operand: got 9 and 9"),
        *((arithmetic, {"operations": operations}, "operations: got") for operations in ([], ["*"], ["+", "+"])),
        *((arithmetic, {"wording": text}, "wording: got") for text in ("{x} plus {y}", "{x} {operation} {} {y}")),
        (arithmetic, {"max_second": 1000}, "max_second: got 1000"),
        *((arithmetic, {"held_out_share": x}, f"held_out_share: got {x}") for x in (0.0, 1.0, float("nan"))),
        (arithmetic, {"forget_rate": 1.5}, "forget_rate: got 1.5"),
        *((arithmetic, {key: n}, f"{key}: got {n}") for key, n in
          (("num_train", 0), ("num_val", -3), ("num_demonstrations", 0))),
        (arithmetic, {"max_operand": 10**30}, "max_operand: got 1000000"),
        (arithmetic, {"num_train": 10**9}, "num_train: got 1,000,000,000, expected at most 1,620,000"),
        (arithmetic, {"min_operand": 1, "max_operand": 30}, "num_train: got 8,192, expected at most 1,800"),
        (arithmetic, {"min_operand": 1, "max_operand": 30, "num_demonstrations": 9, "num_train": 9},
         "num_val: got 1024"),
        (products, {"min_operand": 9, "max_operand": 9}, "min_operand, max_operand"),
        (products, {"held_out_share": 1.0}, "held_out_share"),
        (products, {"min_operand": 1, "max_operand": 2, "held_out_share": 1e-9}, "with which no pair"),
        (products, {"min_operand": 1, "max_operand": 2, "held_out_share": 1 - 1e-9}, "with which every pair"),
        (products, {"call_rate": 0.9, "slip_rate": 0.2}, "call_rate, slip_rate"),
        (products, {"tool": "abacus"}, "tool: got 'abacus', expected one of calculator, python"),
        (shapes, {"cell": 4}, "cell: got 4"),
        (word_problems, {"min_operand": 5, "max_operand": 5}, "min_operand, max_operand: got 5 and 5"),
        (word_problems, {"max_operand": 3, "held_out_share": 0.001}, "held_out_share: got 0.001"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named_and_write_nothing(module, arguments, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        module.write_dataset(tmp_path / "data", **arguments)
    assert not (tmp_path / "data").exists() or not list((tmp_path / "data").iterdir())
