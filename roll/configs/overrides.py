"""Command-line words ``key=value``, with values read as in a YAML file; limits of such files."""

from __future__ import annotations

import json
import logging
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

from roll.configs.problems import NOTHING, ConfigErrors, ConfigProblem, Words, show

logger = logging.getLogger(__name__)

MAX_VALUES = 200_000
"""Keys and values of a file with its aliases written out. The largest configuration here has some hundreds."""
_ALIAS = re.compile(r"(?:^|[\s\[{,:-])\*\S", re.MULTILINE)
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def check_expansion(name: str, folders: list[Path]) -> None:
    """Counts the values of a file, and of those in its defaults list.

    Args:
        folders: where files are looked for.

    Raises:
        ConfigErrors: too many values. A file that is not there or no YAML is told by whoever composes it.
    """
    waiting, seen = [name], set[Path]()
    while waiting:
        each = waiting.pop().partition("@")[0].strip().removesuffix(".yaml")
        file = next((path for folder in folders if (path := folder / f"{each}.yaml").is_file()), None)
        if file is None or file in seen:
            continue
        seen.add(file)
        try:
            text = file.read_text(encoding="utf-8")
            count = values_of(text)
            waiting += _included(text)
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            continue
        if math.isinf(count):
            raise ConfigErrors([ConfigProblem(file.name, NOTHING, "no value that refers to itself")])
        if count > MAX_VALUES:
            shown = f"{count:.3g}" if count > 1e9 else f"{count:,.0f}"
            written = Words(f"{shown} keys and values, with aliases (*name) written out")
            raise ConfigErrors([ConfigProblem(file.name, written, f"at most {MAX_VALUES:,}")])


def values_of(text: str) -> float:
    """Keys and values of a YAML text with its aliases written out; 0 where it has no aliases and is no bomb."""
    if not _ALIAS.search(text):
        return 0
    counts: dict[int, float] = {}

    def count(node: yaml.Node) -> float:
        if id(node) not in counts:
            counts[id(node)] = math.inf  # while it is counted: a node within itself
            parts = node.value if isinstance(node, yaml.CollectionNode) else ()
            pairs = [part for item in parts for part in (item if isinstance(item, tuple) else (item,))]
            counts[id(node)] = 1 + sum(count(part) for part in pairs)
        return counts[id(node)]

    root = yaml.compose(text, Loader=_LOADER)
    return count(root) if root is not None else 0


def _included(text: str) -> list[str]:
    """Names in the defaults list; ``group: choice`` is ``group/choice``."""
    block = re.search(r"^defaults:.*(?:\n(?:[ \t-].*)?)*", text, re.MULTILINE)
    if block is None:
        return []
    entries = yaml.safe_load(block[0])["defaults"]
    names = []
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, str):
            names.append(entry)
        elif isinstance(entry, dict):
            names += [f"{str(key).split()[-1]}/{value}" for key, value in entry.items()]
    return names


_KEY = re.compile(r"(?P<sign>\+{1,2}|~)?(?P<path>[\w-]+(?:\.[\w-]+)*)", re.ASCII)
_SPACED = re.compile(r"(?:^|(?<=\0))([^\0=]+)(?:\0=\0?|=\0)([^\0=]+)(?=\0|$)")
_LINK = re.compile(r"\$\{[^${}]*\}")
_HELD = re.compile("\ue000(\\d+)\ue001")
"""A link that YAML need not read, by its number."""
_PLAIN_STYLES = (None, "")


@dataclass(frozen=True)
class Override:
    """One change of a configuration."""

    path: tuple[str, ...]
    value: Any
    deletes: bool = False
    """The key is taken back to its default: ``~key``."""

    @property
    def key(self) -> str:
        return ".".join(self.path)


def parse_overrides(words: Sequence[str]) -> tuple[list[Override], list[ConfigProblem]]:
    """``key=value``, also ``+key=value`` and ``++key=value``, which are the same; and ``~key``.

    A key may come twice: the last counts, as the log says. Beyond YAML, a link ``${key}`` needs no quotes inside lists
    and mappings, and a mapping no space behind its colons: ``{name:math,weight:2}``.
    """
    words, problems = _set_apart_spaced(words)
    parsed: dict[str, Override] = {}
    for word in words:
        name, equals, text = word.partition("=")
        found = _KEY.fullmatch(name)
        if found is None or bool(equals) == (found["sign"] == "~"):
            problems.append(no_override(word))
            continue
        try:
            value = read_value(found["path"], text) if equals else None
        except ValueError as error:
            expected, _, hint = str(error).partition("\n")
            problems.append(ConfigProblem(found["path"], text, expected, hint))
            continue
        override = Override(tuple(found["path"].split(".")), value, found["sign"] == "~")
        if (earlier := parsed.pop(override.key, override)) != override:
            told = "deleted" if earlier.deletes else show(earlier.value)
            logger.warning("%s is given twice: the last value counts, not %s", override.key, told)
        parsed[override.key] = override
    return list(parsed.values()), problems


def read_value(key: str, text: str) -> Any:
    """What the value of a key means.

    Raises:
        ValueError: what was expected, and in a second line what to write.
    """
    if not text.strip():
        raise ValueError(f"a value\n{key}=null is nothing, {_quoted(key, '')} an empty text")
    if text.strip() in ("None", "none"):
        raise ValueError(f"null, as YAML spells it\nwrite {key}=null")
    quote = f"for this exact text: {_quoted(key, text)}"
    links: list[str] = []
    try:
        return _with_links(_construct(_hold_links(text, links), ""), links)
    except (yaml.YAMLError, RecursionError) as error:
        reason = getattr(error, "problem", None) or getattr(error, "reason", None) or "nested too deep"
        raise ValueError(f"valid YAML: {reason}\n{quote}") from error
    except _OtherThanMeantError as error:
        raise ValueError(f"{error}\n{quote}") from error
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"valid YAML: {str(error).splitlines()[0]}\n{quote}") from error


def _quoted(key: str, text: str) -> str:
    """The word that means a text, as a shell takes it."""
    return f"{key}={shlex.quote(json.dumps(text, ensure_ascii=False))}"


class _OtherThanMeantError(Exception):
    """YAML reads the text, but hardly as it was meant. The message says what was expected."""


def _construct(text: str, within: str) -> Any:
    """Reads a text as YAML; ``within``: sign of the collection that it is a part of."""
    before = "k: " if not within else ""
    if values_of(before + text) > MAX_VALUES:
        raise _OtherThanMeantError(f"at most {MAX_VALUES:,} keys and values, aliases written out")
    loader = get_yaml_loader()(before + text)
    try:
        root = loader.get_single_node()
        node = root.value[0][1] if not within else root
        _check_nodes(before + text, root)
        if isinstance(node, yaml.ScalarNode) and node.value == "" and node.style in _PLAIN_STYLES and text.strip():
            raise _OtherThanMeantError("a value: YAML reads the text as a sign without one")
        _set_apart_colons(node, loader)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_nodes(text: str, root: yaml.Node) -> None:
    """Refuses what a file may have, and a word of the command line has by mistake alone."""
    rest = list(text)
    for node in _scalars(root):
        start, end = node.start_mark.index, node.end_mark.index
        rest[start:end] = "_" * (end - start)
        if "\n" in text[start:end].strip() or node.style in ("|", ">"):
            raise _OtherThanMeantError("a value of one line, in which \\n between double quotes is a line break")
        if node.style in _PLAIN_STYLES and node.value in ("None", "none"):
            raise _OtherThanMeantError("null, as YAML spells it")
    if "#" in rest:
        raise _OtherThanMeantError("no #, which begins a comment")


def _scalars(node: yaml.Node) -> Iterator[yaml.ScalarNode]:
    if isinstance(node, yaml.ScalarNode):
        yield node
    for part in node.value if isinstance(node, yaml.CollectionNode) else ():
        for inside in part if isinstance(part, tuple) else (part,):
            yield from _scalars(inside)


def _set_apart_colons(node: yaml.Node, loader: Any) -> None:
    """Reads ``{a:1}``, which YAML takes for a key ``a:1`` without a value, as ``{a: 1}``."""
    if isinstance(node, yaml.SequenceNode):
        for part in node.value:
            _set_apart_colons(part, loader)
    if not isinstance(node, yaml.MappingNode):
        return
    for index, (key, value) in enumerate(node.value):
        _set_apart_colons(value, loader)
        empty = isinstance(value, yaml.ScalarNode) and value.style in _PLAIN_STYLES and value.value == ""
        if not (empty and isinstance(key, yaml.ScalarNode) and key.style in _PLAIN_STYLES and ":" in key.value):
            continue
        name, _, text = key.value.partition(":")
        inner = get_yaml_loader()(text)
        inside = inner.get_single_node()
        if inside is not None:
            _set_apart_colons(inside, loader)
            tag = loader.resolve(yaml.ScalarNode, name, (True, False))
            node.value[index] = (yaml.ScalarNode(tag, name, key.start_mark, key.end_mark), inside)


def _hold_links(text: str, links: list[str]) -> str:
    """Puts signs that YAML leaves alone in place of ``${…}``, innermost first."""

    def hold(found: re.Match[str]) -> str:
        links.append(found[0])
        return f"\ue000{len(links) - 1}\ue001"

    while (held := _LINK.sub(hold, text)) != text:
        text = held
    return text


def _with_links(value: Any, links: list[str]) -> Any:
    if isinstance(value, str):
        while (whole := _HELD.sub(lambda found: links[int(found[1])], value)) != value:
            value = whole
        return value
    if isinstance(value, list):
        return [_with_links(item, links) for item in value]
    if isinstance(value, dict):
        return {_with_links(key, links): _with_links(item, links) for key, item in value.items()}
    return value


def no_override(word: str) -> ConfigProblem:
    """A word that is no change of a configuration."""
    key, equals, value = word.partition("=")
    hint = "the command line takes key=value overrides"
    if equals:
        hint = f"{key!r} is not a key: names of a-z, digits and _, joined by single dots; a file may have any"
        if key.startswith("~"):
            hint = f"~ resets a key to its default and takes no value: {key}"
        elif "@" in key:
            hint += f"; @ has no meaning here: {key.replace('@', '.')}={value} is a key inside another"
        elif "[" in key:
            hint += f"; a list is given as a whole: {key.partition('[')[0]}=[…]"
        elif '"' in key or "'" in key:
            hint += "; or give the mapping that the name is in"
    return ConfigProblem(word, NOTHING, "key=value", hint)


def _set_apart_spaced(words: Sequence[str]) -> tuple[list[str], list[ConfigProblem]]:
    """Finds ``key = value``, which the shell passes as three words, ``key= value`` and ``key =value``."""
    text = "\0".join(words)
    problems = [
        ConfigProblem(found[0].replace("\0", " "), NOTHING, f"{found[1]}={found[2]}", "no spaces around =")
        for found in _SPACED.finditer(text)
    ]
    return [word for word in _SPACED.sub("", text).split("\0") if word], problems
