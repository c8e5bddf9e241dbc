"""Launch scripts: the words of the command that starts a training, read and never run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from roll.configs.importers.branches import Branches
from roll.configs.importers.expansion import HASH, LITERAL_DOLLAR, QUOTED, SPACE, Scope

ENTRIES = {
    "verl": (re.compile(r"(?:^|[./])(?:main_\w+|fully_async_main)(?:\.py)?$"), "verl.trainer.main_ppo"),
    "verl_sft": (re.compile(r"(?:^|[./])(?:\w+_)?sft_trainer(?:_\w+)?(?:\.py)?$"), "verl.trainer.sft_trainer"),
    "chatlearn": (re.compile(r"(?:^|/)entrypoint\.py$"), "entrypoint.py"),
    "mindspeed": (re.compile(r"(?:^|/)train_(?:grpo|ppo|dapo|orm)\.py$"), "train_grpo.py"),
    "roll": (re.compile(r"(?:^|/)start_\w+_pipeline\.py$"), "start_rlvr_pipeline.py"),
}
"""The programs that each system's scripts start, and one of them by name, for a message."""

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_DECLARES = ("export", "local", "readonly", "declare", "typeset")
_SAYS = ("echo", "printf", "grep", "pgrep", "pkill", "ps")
"""Commands that only name a program."""
_SHELL = re.compile(r"(?:^|/)(?:ba|z|da)?sh$")
_HERE = re.compile(r"(?<!<)<<-?\s*(['\"]?)(\w+)\1")
_FUNCTION = re.compile(r"([\w.:-]+)\(\)(\{|\()?")
_CLOCK = re.compile(r"[-_.]?\$\(date\b[^()]*\)")
"""The time of day, which a run's name need not have."""
_DEEPEST = 8
"""Functions that call functions, and commands in the texts of commands."""


class ScriptError(ValueError):
    """A script in which no known program is started."""


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
    unread: dict[str, str] = field(default_factory=dict)
    """By key: a value that only a shell can tell."""


def read_script(text: str, system: str, script: str = "run.sh") -> Script:
    """Finds the command that starts a system's training, and the words after it.

    Followed in the order of the lines: assignments, arrays, ``$A`` and the forms of ``${A…}``, ``$((A * 2))``, texts of
    paths such as ``$(dirname "$0")``, functions where they are called, commands in variables (``eval $CMD``,
    ``bash -c "$CMD"``), and branches as far as variables tell which one runs. Variables that the script does not set
    stay as ``${oc.env:A}``. What only a shell can tell, as ``$(nproc)``, is ``unread``.

    Args:
        text: of the script.
        system: whose program it starts, a key of ``ENTRIES``.
        script: its path, which ``$0`` stands for.

    Raises:
        ScriptError: the script starts no program of that system.
    """
    reader = _Reader(system, Scope(script))
    reader.read(text)
    if not reader.found:
        reader.read_functions()
    if not reader.found:
        raise ScriptError(f"no command that starts a program of {system}, such as {ENTRIES[system][1]}")
    first = next((each for each in reader.found if each.overrides), reader.found[0])
    if reader.branches.guessed:
        guessed = "the script has branches that only a shell can choose, or loops"
        reader.notes.append(f"{guessed}: of assignments to one name, the last line counts, of loops the first round")
    if any(each.overrides not in ([], first.overrides) for each in reader.found):
        reader.notes.append("the script starts several runs: the first is read")
    first.notes = [*reader.notes, *first.notes]
    return first


class _Reader:
    """Goes through a script's commands.

    Args:
        system: whose program is looked for.
        scope: what is set at the beginning.
    """

    def __init__(self, system: str, scope: Scope) -> None:
        self.scope, self.branches = scope, Branches(scope)
        self.found: list[Script] = []
        self.notes: list[str] = []
        self._system, self._entry, self._depth = system, ENTRIES[system][0], 0
        self._functions: dict[str, list[list[str]]] = {}
        self._body: list[list[str]] | None = None  # of the function whose end has not come
        self._open_brackets = 0

    def read(self, text: str) -> None:
        """Reads commands, those of functions when these are called."""
        for words in _commands(_without_documents(text, self._entry), self.notes):
            if words := self._outside_functions(words):
                self._take(words)

    def read_functions(self) -> None:
        """Reads functions that the script itself does not call."""
        for name in list(self._functions):
            self._call(name, [])

    def _outside_functions(self, words: list[str]) -> list[str]:
        """Keeps the lines of a function for its calls; other lines are given back."""
        if self._body is None:
            rest = words[1:] if (named := words[0] == "function") else words
            rest = [rest[0] + rest[1], *rest[2:]] if rest[1:2] == ["()"] else rest
            found = _FUNCTION.fullmatch(f"{rest[0]}()" if named and "(" not in rest[0] else rest[0]) if rest else None
            if found is None:
                return words
            self._body = self._functions[found[1]] = []
            words = [*([found[2]] if found[2] else []), *rest[1:]]
            self._open_brackets = 0
            if not words:
                return []
        opened = sum(word in ("{", "(") for word in words)
        closed = sum(word.rstrip(";") in ("}", ")") for word in words)
        first = self._open_brackets == 0
        self._open_brackets += opened - closed
        inside = words[1:] if first and words[0] in ("{", "(") else words
        if self._open_brackets <= 0 and inside and inside[-1].rstrip(";") in ("}", ")"):
            inside = inside[:-1]
        if inside and self._body is not None:
            self._body.append(inside)
        if self._open_brackets <= 0:
            self._body = None
        return []

    def _call(self, name: str, arguments: list[str]) -> None:
        if self._depth >= _DEEPEST:
            return
        self._depth += 1
        before, self.scope.arguments = self.scope.arguments, arguments
        for line in self._functions[name]:
            self._take(line)
        self.scope.arguments = before
        self._depth -= 1

    def _take(self, line: list[str]) -> None:
        for command in self.branches.commands(line):
            words = [word for each in self._assign(command) for word in self.scope.words(each)]
            if not words or words[0] in _SAYS:
                continue
            if words[0] == "shift":
                count = int(words[1]) if words[1:2] and words[1].isdigit() else 1
                self.scope.arguments = self.scope.arguments[count:]
            elif words[0] in self._functions:
                self._call(words[0], words[1:])
            elif (text := _text_of(words)) is not None and self._depth < _DEEPEST:
                self._depth += 1
                self.read(text)
                self._depth -= 1
            else:
                self._start(words)

    def _start(self, words: list[str]) -> None:
        """Notes a command that starts the program."""
        start = next((i for i, word in enumerate(words) if self._entry.search(word)), None)
        if start is None:
            return
        script = _arguments(words[start + 1 :])
        script.program = words[start]
        if self._system == "verl_sft":
            script.overrides = [*_groups(script.overrides), *_processes(words[:start], script.unread)]
        self.found.append(script)

    def _assign(self, words: list[str]) -> list[str]:
        """Takes the assignments out of a command; what is left are its words, not yet expanded."""
        variables, rest = self.scope.variables, list(words)
        if rest[0] in _DECLARES:
            rest = [word for word in rest[1:] if not re.fullmatch(r"-\w+", word)]
        while rest and (found := _ASSIGNMENT.fullmatch(rest[0])):
            name, appended, value = found.groups()
            if value.startswith("("):
                inside = [value[1:], *rest[1:]]
                inside[-1] = inside[-1].removesuffix(")")
                values = [each for word in inside if word for each in self.scope.words(word)]
                variables[name] = [*(variables.get(name, []) if appended else []), *values]
                return []
            old = "".join(variables.get(name, [])) if appended else ""
            variables[name] = [old + " ".join(self.scope.words(value.removesuffix(";")))]
            rest = rest[1:]
        return rest


def _text_of(words: Sequence[str]) -> str | None:
    """The text that a command gives to a shell: ``eval $CMD``, ``srun bash -c "…"``."""
    if words[0] == "eval":
        return " ".join(words[1:])
    for word, option, *rest in (words[i : i + 3] for i in range(len(words) - 2)):
        if _SHELL.search(word) and re.fullmatch(r"-\w*c", option):
            return rest[0]
    return None


def _without_documents(text: str, entry: re.Pattern[str]) -> str:
    """The text without its here-documents, but those that hold the command for another shell."""
    lines, kept, until = text.splitlines(), list[str](), ""
    document: list[str] = []
    opener = ""
    for line in lines:
        if until:
            if line.strip() != until:
                document.append(line)
                continue
            named = any(entry.search(word) for each in document for word in each.split())
            kept += document if named and "python" not in opener else []
            until = ""
            continue
        found = None if line.lstrip().startswith("#") else _HERE.search(line)
        if found and "((" not in line:
            until, opener, document = found[2], line, []
            line = line[: found.start()] + line[found.end() :]
        kept.append(line)
    return "\n".join(kept + document * bool(until))


def _groups(overrides: Sequence[str]) -> Iterator[str]:
    """Settings, those that choose a file of Hydra's (``engine=megatron optim=megatron``) as the engine's name."""
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        if key not in ("engine", "optim", "model"):
            yield word
        elif key == "engine":
            yield f"engine.strategy={value}"


def _processes(words: Sequence[str], unread: dict[str, str]) -> Iterator[str]:
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
                unread.setdefault(f"trainer.{key}", number)


def _commands(text: str, notes: list[str]) -> Iterator[list[str]]:
    """The words of each command, quotes removed, lines that end in a backslash joined, arrays as one word each."""
    lines = re.sub(r"[ \t]*\\[ \t]*(?:\r?\n|\Z)(?:[ \t]*#[^\n]*\n)*", " ", text).splitlines()
    pending = ""
    for line in lines:
        pending = f"{pending}\n{line}" if pending else line
        if not pending.strip() or pending.lstrip().startswith("#"):
            pending = ""
            continue
        try:
            words = shlex.split(_guard(pending), comments=True)
        except ValueError:  # a quote that a later line closes
            continue
        if _opens_array(words):
            continue
        pending = ""
        yield words
    if pending.strip():
        notes.append(f"unreadable from here on: {pending.strip().splitlines()[0][:80]}")


def _guard(text: str) -> str:
    """Stand-ins for dollar signs between quotes, for spaces inside ``$(…)``, and for number signs in words."""
    found, quote, depth, ticked = list[str](), "", 0, False
    for i, character in enumerate(text):
        before = text[i - 1] if i else " "
        if character in "'\"" and quote in ("", character) and not depth:
            quote = "" if quote else character
        if character == "`" and quote != "'":
            ticked = not ticked
            depth += 1 if ticked else -1
            found.append((f"{QUOTED}$(" if quote else "$(") if ticked else ")")
            continue
        if quote != "'" and not ticked and (depth or text.startswith("$(", i - 1)):
            depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "$" and (quote == "'" or before == "\\"):
            if before == "\\" and quote == '"':
                found.pop()
            found.append(LITERAL_DOLLAR)
        elif character == "$" and quote:
            found.append(f"{QUOTED}$")
        elif character == "#" and not quote and not before.isspace() and before != ";":
            found.append(HASH)
        else:
            found.append(SPACE if depth and character.isspace() else character)
    return "".join(found)


def _opens_array(words: list[str]) -> bool:
    """An array whose closing bracket stands on a later line."""
    return (
        bool(words)
        and bool(re.match(r"[A-Za-z_]\w*\+?=\($", words[0].split("(")[0] + "("))
        and ("(" in words[0] and "$(" not in words[0] and not words[-1].endswith(")"))
    )


def _arguments(words: list[str]) -> Script:
    """Sorts the words behind a program: settings, the configuration's name and folder, and what cannot be read."""
    folder = name = None
    script, words = Script(), list(words)
    while words:
        word = words.pop(0)
        if word in ("&&", "||", "|", ";", "&") or re.match(r"^\d?>", word):
            break
        if word.endswith(";"):
            word, words = word.rstrip(";"), []
        option, equals, value = word.partition("=")
        if option in _FOLDERS or option in _NAMES:
            value = value if equals else (words.pop(0) if words else "")
            folder = value if option in _FOLDERS else folder
            name = value if option in _NAMES else name
        elif word.startswith("~"):
            script.notes.append(f"{word}: of what is deleted there, nothing is read here")
        elif equals and re.fullmatch(r"\+{0,2}[\w./@-]+", option) and not option.startswith("-"):
            if option.endswith("experiment_name"):
                value = _CLOCK.sub("", value)
            if "$(" in value:
                script.unread[option.lstrip("+")] = value
            else:
                script.overrides.append(f"{option}={value}")
    if name is not None:
        script.config = f"{folder}/{name}" if folder else name
    return script


_FOLDERS = ("--config-path", "--config_path", "-cp", "--config-dir")
_NAMES = ("--config-name", "--config_name", "--config-file", "-cn")
