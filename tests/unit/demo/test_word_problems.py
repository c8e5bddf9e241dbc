"""Word problems: what they ask is what they say, and no pair of numbers is in both files."""

import json
import re
from pathlib import Path

from roll.demo.word_problems import write_dataset


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_the_solution_follows_from_the_story_and_pairs_are_held_out(tmp_path):
    write_dataset(tmp_path, seed=3, num_train=300, num_val=100)
    pairs = {}
    for name, count in (("train", 300), ("val", 100)):
        found = rows(tmp_path, name)
        assert len({row["id"] for row in found}) == len(found) == count
        pairs[name] = set()
        for row in found:
            x, y = map(int, re.findall(r"\d+", row["prompt"]))
            adds = any(verb in row["prompt"] for verb in (" gets ", " finds ", " buys "))
            assert row["calculation"] == f"{x} {'+' if adds else '-'} {y}"
            assert int(row["solution"]) == (x + y if adds else x - y) >= 0
            pairs[name].add((min(x, y), max(x, y)))
        assert sum("+" in row["calculation"] for row in found) == count / 2
    assert not pairs["train"] & pairs["val"]
