"""Pairs made from scored rollouts: what an RL run has written of its episodes (``trajectories/*.jsonl``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roll.configs.data import DataArguments
from roll.data.files.read import read_rows
from roll.data.files.rows import DataError, Problems, Row


def best_and_worst(args: DataArguments, seed: int) -> Iterator[dict[str, Any]]:
    """The best and the worst answer of each group whose scores differ, as rows with ``chosen`` and ``rejected``.

    A ``dataset_cls``. Equal scores go by the order in the file. Rows also have ``prompt``, ``margin`` (the difference
    of the scores), ``tag`` and ``solution``.

    Args:
        args: ``file_name`` names the files.
        seed: nothing is drawn.

    Raises:
        DataError: files that cannot be read, lines that are no episodes, episodes of several turns.
    """
    problems = Problems()
    groups: dict[tuple[str, int], list[tuple[float, str, dict[str, Any]]]] = {}
    for row in read_rows(args.file_names, problems):
        try:
            group, episode = _episode(row)
        except ValueError as error:
            problems.add(row.place, str(error))
        else:
            groups.setdefault(group, []).append(episode)
    problems.raise_any()
    if not groups:
        raise DataError([f"{', '.join(args.file_names)}: no episodes"])
    for episodes in groups.values():
        best, worst = max(episodes, key=lambda one: one[0]), min(episodes, key=lambda one: one[0])
        if best[0] > worst[0] and best[1] != worst[1]:
            yield best[2] | {"chosen": best[1], "rejected": worst[1], "margin": best[0] - worst[0]}


def _episode(row: Row) -> tuple[tuple[str, int], tuple[float, str, dict[str, Any]]]:
    """Group, score, answer and question of an episode.

    Raises:
        ValueError: it is no episode of one turn.
    """
    values = row.values
    turns, info = values.get("turns"), values.get("info")
    if not isinstance(turns, list) or not isinstance(info, dict) or not {"group_id", "score"} <= values.keys():
        raise ValueError("no episode of a run: expected group_id, score, info and turns")
    if len(turns) != 1:
        raise ValueError(f"an episode of {len(turns)} turns, expected one answer to one prompt")
    question = {"prompt": turns[0]["observation"], "tag": values.get("tag"), "solution": info.get("ground_truth")}
    file = row.name.rpartition(":")[0]
    return (file, values["group_id"]), (float(values["score"]), turns[0]["text"], question)
