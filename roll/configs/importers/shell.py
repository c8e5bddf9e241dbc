"""Launch scripts: the words of the command that starts a training, read and never run."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from roll.configs.importers.branches import Branches

ENTRIES = {
    "verl": re.compile(r"(?:^|[./])main_(?:ppo|dapo|\w+)(?:\.py)?$"),
    "verl_sft": re.compile(r"(?:^|[./])(?:\w+_)?sft_trainer(?:_\w+)?(?:\.py)?$"),
    "chatlearn": re.compile(r"(?:^|/)entrypoint\.py$"),
    "mindspeed": re.compile(r"(?:^|/)train_(?:grpo|ppo|dapo|orm)\.py$"),
    "roll": re.compile(r"(?:^|/)start_\w+_pipeline\.py$"),
}
"""The program that each system's scripts start."""

_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(
    r"\$\(\((?P<sum>[^()]*(?:\([^()]*\)[^()]*)*)\)\)"
    r"|\$\{(?P<braced>\w+|@)(?:\[[@*]\])?(?::?-(?P<fallback>(?:[^{}]|\{[^{}]*\})*))?"
    r"(?:(?P<slashes>//?)(?P<old>[^/{}]+)/?(?P<new>[^{}]*))?\}"
    r"|\$(?P<plain>[A-Za-z_]\w*|[@*\d])"
)
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_LITERAL_DOLLAR = "\ue000"
"""Stands for a dollar sign between single quotes, in which a shell replaces nothing."""
_SPACE = "\ue001"
"""Stands for a space that does not end a word."""
_QUOTED = "\ue002"
"""Stands before a dollar sign between double quotes, whose value stays one word."""
_MAX_POWER = 64


class ScriptError(ValueError):
    """A script in which no known program is started."""


@dataclass
class Script:
    """What a launch script says."""

    overrides: list[str] = field(default_factory=list)
    """``key=value`` words of the command."""
    config: str | None = None
    """Configuration that it names, with its folder where that is said."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know: words that only a shell can tell."""


def read_script(text: str, system: str) -> Script:
    """Finds the command that starts a system's training, and the words after it.

    Assignments (``A=b``, ``A=(b c)``, ``export A=b``), ``$A``, ``${A}``, ``${A:-b}``, ``${A//b/c}``, ``${A[@]}`` and
    ``$((A * 2))`` are followed in the order of the lines, and branches as far as these tell which one runs. Variables
    that the script does not set stay as ``${oc.env:A}``. What only a shell can tell, as ``$(…)``, makes its word
    unreadable: it is left out with a note.

    Raises:
        ScriptError: the script starts no program of that system.
    """
    variables: dict[str, list[str]] = {}
    script: Script | None = None
    notes: list[str] = []
    branches = Branches(lambda word: _expanded(word, variables))
    for line in _commands(text, notes):
        for command in branches.commands(line):
            words = list(_assign(command, variables))
            start = next((i for i, word in enumerate(words) if ENTRIES[system].search(word)), None)
            if start is not None:
                script = _arguments(words[start + 1 :], variables, script or Script())
                if system == "verl_sft":
                    script.overrides = [*_groups(script.overrides), *_processes(words[:start])]
    if script is None:
        raise ScriptError(f"no command that starts a program of {system}, such as {ENTRIES[system].pattern}")
    if branches.guessed:
        guessed = "the script has branches that only a shell can choose, or loops"
        notes.append(f"{guessed}: of assignments to one name, the last line counts")
    script.notes = [*notes, *script.notes]
    return script


def _groups(overrides: Sequence[str]) -> Iterator[str]:
    """Settings, those that choose a file of Hydra's (``engine=megatron optim=megatron``) as the engine's name."""
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        if key not in ("engine", "optim", "model"):
            yield word
        elif key == "engine":
            yield f"engine.strategy={value}"


def _processes(words: Sequence[str]) -> Iterator[str]:
    """How many processes the words before a program ask ``torchrun`` for, as settings."""
    pairs = [word.partition("=") for word in words]
    for (option, equals, value), (after, _, _) in zip(pairs, [*pairs[1:], ("", "", "")], strict=True):
        for name, key in (("nnodes", "nnodes"), ("nproc_per_node", "n_gpus_per_node")):
            number = value if equals else after
            if option.lstrip("-").replace("-", "_") == name and number.isdigit():
                yield f"trainer.{key}={number}"


def _commands(text: str, notes: list[str]) -> Iterator[list[str]]:
    """The words of each command, quotes removed, lines that end in a backslash joined, arrays as one word each."""
    text = re.sub(r"\$\(pwd\)|`pwd`", ".", text)  # the folder that the script is started in
    lines = re.sub(r"[ \t]*\\[ \t]*\r?\n(?:[ \t]*#[^\n]*\n)*", " ", text).splitlines()
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
    """Stand-ins for dollar signs between quotes, and for spaces inside ``$(…)``."""
    found, quote, depth = [], "", 0
    for i, character in enumerate(text):
        if character in "'\"" and quote in ("", character) and not depth:
            quote = "" if quote else character
        if quote != "'" and (depth or text.startswith("$(", i - 1)):
            depth += {"(": 1, ")": -1}.get(character, 0)
        inside = depth and character.isspace()
        if character == "$" and quote:
            found.append(_LITERAL_DOLLAR if quote == "'" else f"{_QUOTED}$")
        else:
            found.append(_SPACE if inside else character)
    return "".join(found)


def _opens_array(words: list[str]) -> bool:
    """An array whose closing bracket stands on a later line."""
    return (
        bool(words)
        and bool(re.match(r"[A-Za-z_]\w*\+?=\($", words[0].split("(")[0] + "("))
        and ("(" in words[0] and "$(" not in words[0] and not words[-1].endswith(")"))
    )


def _assign(words: list[str], variables: dict[str, list[str]]) -> Iterator[str]:
    """Takes the assignments out of a command; what is left are its words."""
    rest = [word for word in words if word not in ("export", "local", "readonly")]
    while rest and (found := _ASSIGNMENT.fullmatch(rest[0])):
        name, appended, value = found.groups()
        if value.startswith("(") and not value.startswith("$("):
            inside = [value[1:], *rest[1:]]
            inside[-1] = inside[-1].removesuffix(")")
            values = [each for word in inside if word for each in _expanded(word, variables)]
            variables[name] = [*(variables.get(name, []) if appended else []), *values]
            return
        old = "".join(variables.get(name, [])) if appended else ""
        variables[name] = [old + " ".join(_expanded(value.removesuffix(";"), variables))]
        rest = rest[1:]
    for word in rest:
        yield from _expanded(word, variables)


def _expanded(word: str, variables: Mapping[str, list[str]]) -> list[str]:
    """A word with its variables replaced; an array alone becomes its words, a value without quotes its parts."""
    quoted, word = _QUOTED in word, word.replace(_QUOTED, "")
    whole = _VARIABLE.fullmatch(word)
    if whole and whole["old"] is None and (name := whole["braced"] or whole["plain"]):
        if name in variables and len(variables[name]) != 1:
            return variables[name]
        if name in variables and not quoted:
            return variables[name][0].split() or [""]
        if name in "@*":  # the script's own arguments
            return []

    def value(found: re.Match[str]) -> str:
        if found["sum"] is not None:
            return _sum(_VARIABLE.sub(value, found["sum"]), variables)
        name = found["braced"] or found["plain"]
        if name in variables:
            text = " ".join(variables[name])
            count = -1 if found["slashes"] == "//" else 1
            return text if found["old"] is None else text.replace(found["old"], found["new"], count)
        if found["fallback"] is not None:
            return _VARIABLE.sub(value, found["fallback"])
        return "" if name in "@*" or name.isdigit() else f"${{oc.env:{name}}}"

    return [_VARIABLE.sub(value, word).replace(_LITERAL_DOLLAR, "$").replace(_SPACE, " ")]


def _sum(text: str, variables: Mapping[str, list[str]]) -> str:
    """Whole-number arithmetic; text that is none stays as it is."""
    try:
        return str(_number(ast.parse(text.replace(_SPACE, " ").strip(), mode="eval").body, variables))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return f"$(({text}))"


def _number(node: ast.expr, variables: Mapping[str, list[str]]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name) and node.id in variables:
        return int("".join(variables[node.id]))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand, variables)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _number(node.left, variables), _number(node.right, variables)
        if isinstance(node.op, ast.Pow) and not 0 <= right <= _MAX_POWER:
            raise ValueError("a power that is too high")
        return int(_OPERATORS[type(node.op)](left, right))
    raise ValueError("no whole number")


def _arguments(words: list[str], variables: Mapping[str, list[str]], script: Script) -> Script:
    """Sorts the words behind a program: settings, the configuration's name and folder, and what cannot be read."""
    folder = name = None
    words = list(words)
    while words:
        word = words.pop(0)
        if word in ("&&", "||", "|", ";", "&") or re.match(r"^\d?>", word):
            break
        option, equals, value = word.partition("=")
        if option in (
            "--config-path",
            "--config_path",
            "--config-name",
            "--config_name",
            "--config-file",
            "-cn",
            "-cp",
        ):
            value = value if equals else (words.pop(0) if words else "")
            folder = value if option in ("--config-path", "--config_path", "-cp") else folder
            name = value if option not in ("--config-path", "--config_path", "-cp") else name
        elif equals and re.fullmatch(r"[+~]{0,2}[\w./@-]+", option) and not option.startswith("-"):
            if "$(" in value or "`" in value:
                script.notes.append(f"{option}: a shell computes its value, {value}; give it as {option}=…")
            else:
                script.overrides.append(word)
    if name is not None:
        script.config = f"{folder}/{name}" if folder else name
    return script
