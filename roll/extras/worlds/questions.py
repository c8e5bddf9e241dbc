"""Questions of a dataset with their answers, read once per process."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from roll.configs.base import Config
from roll.configs.data import DataArguments
from roll.configs.problems import ConfigProblem
from roll.data.prompt_rows import RowError, lookup
from roll.data.reading import Reading

_KEPT = 8
"""Datasets that a process keeps."""


class Item(BaseModel):
    """A prompt and its answer."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    prompt: str
    answer: str


class QuestionsConfig(Config):
    """Files of questions, and where a row has what."""

    file_name: str | list[str] = Field(
        min_length=1, description="json, jsonl, csv, parquet or arrow files, a folder of them, globs."
    )
    prompt: str = Field("prompt", min_length=1, description="Column of the question; dotted if nested.")
    answer: str = Field("answer", min_length=1, description="Column of the answer: a text or a number.")

    @property
    def file_names(self) -> tuple[str, ...]:
        return (self.file_name,) if isinstance(self.file_name, str) else tuple(self.file_name)

    def problems(self) -> Iterator[ConfigProblem]:
        if not all(self.file_names):
            yield self.problem("file_name", "a file or folder")


@dataclass(frozen=True)
class Questions:
    """Questions in the order of their files."""

    items: Sequence[Item]

    @cached_property
    def charset(self) -> frozenset[str]:
        """Every character that a question may hold, and those that print."""
        return frozenset(string.printable).union(*(item.prompt for item in self.items))


def read_questions(config: QuestionsConfig) -> Questions:
    """The questions of the files, the same object each time.

    Raises:
        DataError: all files and rows that cannot be read, or that there is no row.
    """
    return _read(config.file_names, config.prompt, config.answer)


@lru_cache(maxsize=_KEPT)
def _read(files: tuple[str, ...], prompt: str, answer: str) -> Questions:
    reading = Reading(DataArguments(file_name=list(files)), seed=0)  # which draws nothing here
    items = list(reading.each(lambda row: Item(prompt=_text(row.values, prompt), answer=_text(row.values, answer))))
    reading.require(items)
    return Questions(items)


def _text(values: Mapping[str, Any], column: str) -> str:
    value = lookup(values, column)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(f"{column}: seen {value!r:.60}, expected a text or a number")
    return str(value)
