"""Launch scripts: the words of the command that starts a training, read and never run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
    """A value that only a shell can tell."""

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
            script.notes.append(f"{word.text}: of what is deleted there, nothing is read here")
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
