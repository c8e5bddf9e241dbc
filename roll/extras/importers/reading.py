"""Files of other systems into plain values: YAML with its defaults lists, launch scripts, ``key=value`` words."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roll.configs import SHIPPED
from roll.configs.compose import apply_override
from roll.configs.overrides import MAX_VALUES, Override, no_override, parse_overrides, values_of
from roll.configs.problems import ConfigProblem
from roll.extras.importers.bash import Bash, Word

ENTRIES = {
    "verl": (re.compile(r"(?:^|[./])(?:main_\w+|fully_async_main)(?:\.py)?$"), "verl.trainer.main_ppo"),
    "verl_sft": (re.compile(r"(?:^|[./])(?:\w+_)?sft_trainer(?:_\w+)?(?:\.py)?$"), "verl.trainer.sft_trainer"),
    "chatlearn": (re.compile(r"(?:^|/)entrypoint\.py$"), "entrypoint.py"),
    "mindspeed": (re.compile(r"(?:^|/)train_(?:grpo|ppo|dapo|orm)\.py$"), "train_grpo.py"),
    "roll": (re.compile(r"(?:^|/)start_\w+_pipeline\.py$"), "start_rlvr_pipeline.py"),
}
"""The programs that each system's scripts start, and one of them by name, for a message."""

_CLOCK = re.compile(r"[-_.]?\$\(date\b[^()]*\)")
"""The time of day, which a run's name need not have."""
_SETTING = re.compile(r"\+{0,2}[\w./@-]+")
_FOLDERS = ("--config-path", "--config_path", "-cp", "--config-dir")
_NAMES = ("--config-name", "--config_name", "--config-file", "-cn")


class ScriptError(ValueError):
    """A script in which no known program is started."""


@dataclass(frozen=True)
class Unread:
    """A value that only a shell could compute."""

    text: str
    """What the script has in its place, or the possible values."""
    by: tuple[str, ...] = ()
    """Variables that decide about it, which nothing sets."""


@dataclass
class Script:
    """Contents of a launch script."""

    overrides: list[str] = field(default_factory=list)
    """``key=value`` words of the command."""
    program: str = ""
    """Program that it starts, as it is written there."""
    config: str | None = None
    """Configuration that it names, with its folder where that is said."""
    notes: list[str] = field(default_factory=list)
    """Facts that a reader should know."""
    unread: dict[str, Unread] = field(default_factory=dict)
    """By key."""


def read_script(
    text: str,
    system: str,
    script: str = "run.sh",
    variables: Mapping[str, str] | None = None,
    find: Callable[[str], Path | None] = lambda path: None,
) -> Script:
    """Finds the command that starts a system's training, and the words after it.

    The script is followed as ``Bash`` does: variables that it does not set stay as ``${oc.env:A}``; what only a shell
    can tell, as ``$(nproc)`` or a value that depends on a branch, is ``unread``.

    Args:
        text: of the script.
        system: whose program it starts, a key of ``ENTRIES``.
        script: its path, which ``$0`` stands for.
        variables: of its environment.
        find: the file that a path in the script means, for ``source``.

    Raises:
        ScriptError: the script starts no program of that system.
    """
    entry = ENTRIES[system][0]
    bash = Bash(lambda words: any(entry.search(word) for word in words), script, variables, find)
    bash.follow(text)
    if not bash.commands:
        bash.follow_functions()
    found = [_read_command(words, entry, system) for words in bash.commands]
    if not found:
        raise ScriptError(f"no command that starts a program of {system}, such as {ENTRIES[system][1]}")
    first = next((each for each in found if each.overrides), found[0])
    if any(each.overrides not in ([], first.overrides) for each in found):
        bash.notes.append("the script starts several runs: the first is read")
    first.notes = [*bash.notes, *first.notes]
    return first


def _read_command(words: Sequence[Word], entry: re.Pattern[str], system: str) -> Script:
    """Sorts the words of a command: settings, the configuration's name and folder, and what cannot be read."""
    start = next(i for i, word in enumerate(words) if entry.search(word.text))
    script, folder, name = Script(program=words[start].text), None, None
    rest = list(words[start + 1 :])
    while rest:
        word = rest.pop(0)
        option, equals, value = word.text.partition("=")
        if option in _FOLDERS or option in _NAMES:
            value = value if equals else (rest.pop(0).text if rest else "")
            folder = value if option in _FOLDERS else folder
            name = value if option in _NAMES else name
        elif option.startswith("~"):
            script.notes.append(f"{word.text}: deleting keys is not supported here")
        elif equals and _SETTING.fullmatch(option) and not option.startswith("-"):
            _take(script, option, _CLOCK.sub("", value) if option.endswith("experiment_name") else value, word)
    script.config = f"{folder}/{name}" if folder and name else name
    if system == "verl_sft":
        before = [word.text for word in words[:start]]
        script.overrides = [*_groups(script.overrides), *_processes(before, script.unread)]
    return script


def _take(script: Script, option: str, value: str, word: Word) -> None:
    """Notes a setting; of several for one key the last counts."""
    key = option.lstrip("+")
    if word.undecided or "$(" in value:
        before = script.unread.get(key)
        earlier = f"{before.text} or " if before is not None and word.undecided else ""
        script.unread[key] = Unread(earlier + value, word.by)
        script.overrides = [each for each in script.overrides if each.partition("=")[0].lstrip("+") != key]
        return
    script.unread.pop(key, None)
    script.overrides.append(f"{option}={value}")


def _groups(overrides: Sequence[str]) -> Iterator[str]:
    """Settings, those that choose a file of Hydra's (``engine=megatron optim=megatron``) as the engine's name."""
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        if key not in ("engine", "optim", "model"):
            yield word
        elif key == "engine":
            yield f"engine.strategy={value}"


def _processes(words: Sequence[str], unread: dict[str, Unread]) -> Iterator[str]:
    """Numbers of processes that the words before a program ask ``torchrun`` for, as settings."""
    pairs = [word.partition("=") for word in words]
    for (option, equals, value), (after, _, _) in zip(pairs, [*pairs[1:], ("", "", "")], strict=True):
        for name, key in (("nnodes", "nnodes"), ("nproc_per_node", "n_gpus_per_node")):
            number = value if equals else after
            if option.lstrip("-").replace("-", "_") != name:
                continue
            if number.isdigit() or number.startswith("${oc.env:"):
                yield f"trainer.{key}={number}"
            elif "$(" in number:
                unread.setdefault(f"trainer.{key}", Unread(number))


class UnreadableError(ValueError):
    """A file that cannot be read as what it should be. The message names it."""


@dataclass
class Given:
    """Contents of the files."""

    values: dict[str, Any]
    """Links resolved; those that cannot be stay as text."""
    links: dict[str, Any]
    """The same before links were resolved."""
    read_by_links: frozenset[str]
    """Keys and sections that links read, dotted."""
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Configurations that the files build on and that are not there."""
    folders: list[Path] = field(default_factory=list)
    """Folders in which files that they name by relative paths may lie."""
    unread: dict[str, Unread] = field(default_factory=dict)
    """By key: a value that only a shell can tell."""
    program: str = ""
    """Program that a launch script starts."""

    def is_read_by_a_link(self, key: str) -> bool:
        """Tells whether a link reads exactly this key, or a section around it as a whole."""
        return any(f"{key}.".startswith(f"{read}.") for read in self.read_by_links)


def read(
    system: str, files: Sequence[Path], overrides: Sequence[str], variables: Mapping[str, str] | None = None
) -> Given:
    """Reads files in their order, each over those before it, and then the overrides.

    Args:
        variables: of a launch script's environment.

    Raises:
        UnreadableError: a file that is missing, no YAML, or a script without the system's command.
    """
    tree, notes, words, missing = OmegaConf.create({}), list[str](), list[str](), list[str]()
    unread: dict[str, Unread] = {}
    program = ""
    for file in files:
        if not file.is_file():
            raise UnreadableError(f"{file}: no such file")
        if file.suffix in (".yaml", ".yml"):
            tree.merge_with(_tree(file, notes, missing))
            continue
        try:
            text, around = file.read_text(encoding="utf-8"), _around(file)
            script = read_script(text, system, str(file), variables, partial(find_file, folders=around))
        except (ScriptError, OSError, UnicodeDecodeError) as error:
            raise UnreadableError(f"{file}: {error}") from error
        notes += script.notes
        program = script.program
        if script.config is not None:
            path = script.config if script.config.endswith((".yaml", ".yml")) else f"{script.config}.yaml"
            if (named := find_file(path, _around(file))) is None:
                notes.append(
                    f"{script.config} was not found next to the script; using the defaults of {system} stand for it"
                )
                missing.append(script.config)
            else:
                tree.merge_with(_tree(named, notes, missing))
        words += script.overrides
        unread = {key: value for key, value in unread.items() if key not in _keys(script.overrides)} | script.unread
    unread = {key: value for key, value in unread.items() if key not in _keys(overrides)}
    scripted, strange = _hydra_words(words)
    parsed, problems = parse_overrides(overrides)
    problems += strange
    for item in (*scripted, *parsed):
        problems += apply_override(tree, item)
    if problems:
        raise UnreadableError("; ".join(map(str, problems)))
    for key in unread:  # what stood there before is not what the script sets
        _delete(tree, key)
    links = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(links, dict)
    read_by_links = frozenset(_read_by_links(links, links, ()))
    folders = list(dict.fromkeys(folder for file in files for folder in _around(file)))
    unresolved = {str(key): value for key, value in links.items()}
    values = _plain(tree, unresolved, notes)
    unread |= _links_to(unread, values, ())
    return Given(values, unresolved, read_by_links, notes, missing, folders, unread, program)


def _links_to(unread: Mapping[str, Unread], values: dict[str, Any], path: tuple[str, ...]) -> dict[str, Unread]:
    """Takes out the values that are links to keys which only a shell can tell: they are no more known than those."""
    found: dict[str, Unread] = {}
    for name, value in list(values.items()):
        here = (*path, name)
        if isinstance(value, dict):
            found |= _links_to(unread, value, here)
        elif isinstance(value, str) and (link := _LINK.fullmatch(value)) and link[1] in unread:
            found[".".join(here)] = Unread(value, unread[link[1]].by)
            del values[name]
    return found


_LINK = re.compile(r"\$\{([^${}]*)\}")
_MOST_LINKS = 100
"""Of one value."""


def _read_by_links(node: Any, tree: dict[Any, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Dotted keys that the links below a node read; a link inside of a link is followed first."""
    if isinstance(node, dict):
        for name, each in node.items():
            yield from _read_by_links(each, tree, (*path, str(name)))
    elif isinstance(node, list):
        for each in node:
            yield from _read_by_links(each, tree, path)
    for _ in range(_MOST_LINKS if isinstance(node, str) else 0):  # links may go in circles
        if (link := _LINK.search(node)) is None:
            return
        value: Any = ""
        resolver, colon, rest = link[1].strip().partition(":")
        if not colon or resolver == "oc.select":
            key = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", (rest if colon else resolver).split(",")[0].strip())
            dots = len(key) - len(key.lstrip("."))  # one is the section that the link stands in, two the one above
            parts = (*path[: len(path) - dots], *key.lstrip(".").split(".")) if dots else tuple(key.split("."))
            yield ".".join(parts)
            value = tree
            for part in parts:
                value = value.get(part) if isinstance(value, dict) else None
        node = node[: link.start()] + (str(value) if isinstance(value, str | int | float) else "") + node[link.end() :]


def _hydra_words(words: Sequence[str]) -> tuple[list[Override], list[ConfigProblem]]:
    """The words of a launch script as Hydra, which the system reads them with, understands them; else they are text."""
    parser, parsed, problems = OverridesParser.create(), list[Override](), list[ConfigProblem]()
    for word in words:
        key, equals, value = word.partition("=")
        try:
            found = parser.parse_override(word)
            if found.is_sweep_override() or not found.key_or_group:
                raise HydraException("sweep, or no key")
            path = tuple(found.key_or_group.lstrip("+").split("."))
            parsed.append(Override(path, found.value(), found.is_delete()))
        except HydraException:
            if equals and re.fullmatch(r"\+{0,2}\w+(\.\w+)*", key, re.ASCII):
                parsed.append(Override(tuple(key.lstrip("+").split(".")), _listed(value)))
            else:
                problems.append(no_override(word))
    return parsed, problems


def _listed(text: str) -> Any:
    """A list or mapping outside of Hydra's grammar, as ``[größe]``, as YAML; anything else is text."""
    try:
        return yaml.safe_load(text) if text.startswith(("[", "{")) and values_of(text) <= MAX_VALUES else text
    except yaml.YAMLError:
        return text


def _keys(words: Sequence[str]) -> set[str]:
    """Keys of ``key=value`` words."""
    return {word.partition("=")[0].lstrip("+") for word in words}


def _delete(tree: DictConfig, key: str) -> None:
    section, _, name = key.rpartition(".")
    node = OmegaConf.select(tree, section, throw_on_resolution_failure=False) if section else tree
    if isinstance(node, DictConfig) and name in node:
        del node[name]


def find_file(path: str, folders: Sequence[Path]) -> Path | None:
    """The file that a script names by a path of its own, in the first of the folders that has it."""
    relative = Path(re.sub(r"^\$\{oc\.env:\w+\}/|^\$\(pwd\)/", "", path)).expanduser()
    return next((folder / relative for folder in folders if (folder / relative).is_file()), None)


def _around(file: Path) -> list[Path]:
    """The working folder, that of a file, and those above it."""
    return [Path.cwd(), *file.resolve().parents[:4]]


def _tree(file: Path, notes: list[str], absent: list[str]) -> DictConfig:
    """One file with what its defaults list includes; what is not there is left out with a note."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError, OSError, RecursionError) as error:
        raise UnreadableError(f"{file}: no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UnreadableError(f"{file}: expected a mapping, not {type(content).__name__}")
    content.pop("hydra", None)
    entries = content.pop("defaults", None) or []
    if not isinstance(entries, list):
        raise UnreadableError(f"{file}: defaults: expected a list, not {type(entries).__name__}")
    while True:
        try:
            return _composed(file, content, entries)
        except MissingConfigException as error:
            missing = error.missing_cfg_file or ""
            kept = [entry for entry in entries if not _is_about(entry, missing)]
            if len(kept) == len(entries):
                raise UnreadableError(f"{file}: {' '.join(str(error).split())}") from error
            absent.append(missing)
            notes.append(f"{missing} was not found; using the system's defaults")
            entries = kept
        except (HydraException, OmegaConfBaseException, OSError, ValueError) as error:
            raise UnreadableError(f"{file}: {' '.join(str(error).split())}") from error


def _is_about(entry: Any, missing: str) -> bool:
    """Tells whether an entry of a defaults list asks for a file."""
    names = [str(entry)]
    if isinstance(entry, dict):
        named = [(key, value if isinstance(value, list) else [value]) for key, value in entry.items()]
        names = [f"{key}/{value}" for key, values in named for value in values]
    tail = Path(missing).with_suffix("").name
    return any(re.sub(r"@[\w.]+", "", name).rstrip("/").rpartition("/")[2] == tail for name in names)


def _composed(file: Path, content: dict[str, Any], entries: list[Any]) -> DictConfig:
    """The file as Hydra composes it; read from a copy, so that its defaults list may be another."""
    folder = file.resolve().parent
    searched = [folder, folder.parent, SHIPPED, SHIPPED.parent]
    path = ",".join(f"'file://{each}'" for each in searched)
    content = {"defaults": [*entries, *([] if "_self_" in entries else ["_self_"])], **content}
    with tempfile.TemporaryDirectory() as copy:
        Path(copy, "imported.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        with initialize_config_dir(config_dir=copy, version_base="1.3"):
            tree = compose("imported", overrides=[f"hydra.searchpath=[{path}]"])
    OmegaConf.set_struct(tree, False)
    return tree


def _plain(node: DictConfig, tree: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Plain values; a link that leads nowhere stays as text, and so does one to a variable, unless it is a number now.

    Args:
        tree: all files, with their links.
    """
    values: dict[str, Any] = {}
    raw = OmegaConf.to_container(node, resolve=False)
    assert isinstance(raw, dict)
    for key, link in raw.items():
        try:
            value = node[key]
            if isinstance(value, DictConfig):
                values[str(key)] = _plain(value, tree, notes)
            else:
                values[str(key)] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_list(value) else value
        except (OmegaConfBaseException, RecursionError):
            values[str(key)] = _followed(link, tree)
        if not isinstance(link, dict) and "${oc.env:" in str(link):
            number = values[str(key)]
            if isinstance(number, int | float):
                notes.append(f"{key!s} is {number} now: a variable says it in each run there")
            else:
                values[str(key)] = link
    return values


def _followed(link: Any, tree: Mapping[str, Any]) -> Any:
    """The text that a link to another key stands for, where that cannot be resolved either."""
    if not isinstance(link, str) or (found := _LINK.fullmatch(link)) is None:
        return link
    value: Any = tree
    for part in found[1].strip().split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value if isinstance(value, str) else link
