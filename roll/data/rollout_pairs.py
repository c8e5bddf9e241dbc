"""Pairs from scored rollouts that an RL run has saved (``rollout_dump_dir``, or its evaluations)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roll.configs.data import DataArguments
from roll.data.files import DataError, Problems, Row, read_rows
from roll.data.prompt_rows import RowError, finite
from roll.data.questions import question_in


def best_and_worst(args: DataArguments, seed: int) -> Iterator[dict[str, Any]]:
    """The best and the worst answer of each group whose scores differ, as rows with ``chosen`` and ``rejected``.

    A ``dataset_cls``. Equal scores go by the order in the file. Rows also have ``messages`` (what was asked),
    ``prompt`` (the same where it is one text), ``margin`` (the difference of the scores), ``tag`` and ``solution``.

    Args:
        args: ``file_name`` names the files.
        seed: nothing is drawn.

    Raises:
        DataError: files that cannot be read, lines that are no episodes, episodes of several turns, or no pair.
    """
    problems = Problems()
    groups: dict[tuple[str, int], list[tuple[float, str, dict[str, Any]]]] = {}
    for row in read_rows(args.file_names, problems):
        try:
            group, episode = _episode(row)
        except RowError as error:
            problems.add(row.place, str(error))
        else:
            groups.setdefault(group, []).append(episode)
    problems.raise_any()
    found = False
    for episodes in groups.values():
        best, worst = max(episodes, key=lambda one: one[0]), min(episodes, key=lambda one: one[0])
        if best[0] > worst[0] and best[1] != worst[1]:
            found = True
            yield best[2] | {"chosen": best[1], "rejected": worst[1], "margin": best[0] - worst[0]}
    if not found:
        seen = f"{sum(map(len, groups.values())):,} episodes of {len(groups):,} groups, none with two different scores"
        raise DataError([f"{', '.join(args.file_names)}: {seen}; the steps of a run are in its rollout_dump_dir"])


def _episode(row: Row) -> tuple[tuple[str, int], tuple[float, str, dict[str, Any]]]:
    """Group, score, answer and question of an episode.

    Raises:
        RowError: it is no episode of one turn.
    """
    values = row.values
    turns, info, group = (values.get(name) for name in ("turns", "info", "group_id"))
    if not (isinstance(turns, list) and isinstance(info, dict) and isinstance(group, int) and "score" in values):
        raise RowError("no episode of a run: expected group_id, score, info and turns")
    if len(turns) != 1:
        raise RowError(f"an episode of {len(turns)} turns, expected one answer to one prompt")
    try:
        asked, answer = question_in(info, turns[0]["observation"]), turns[0]["text"]
    except (KeyError, TypeError) as error:
        raise RowError(f"not an episode as a run writes it ({error!r})") from error
    question = {"messages": asked, "tag": values.get("tag"), "solution": info.get("ground_truth")}
    if len(asked) == 1:
        question["prompt"] = asked[0]["content"]
    file = row.name.rpartition(":")[0]
    return (file, group), (finite(values["score"], "score"), answer, question)
