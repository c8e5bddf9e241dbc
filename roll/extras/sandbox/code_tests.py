"""The tests of a row of a dataset of programming tasks, in the forms of public datasets.

A form, a kind or a key that is not known is an error of the row: run as something else, the tests would fail right
programs. ``docs/rewards.md`` has the table of forms.
"""

from __future__ import annotations

import ast
import base64
import binascii
import json
import pickletools
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from roll.extras.sandbox.code_blocks import Asked
from roll.extras.sandbox.code_names import Names, resolve


@dataclass(frozen=True)
class ProgramTest:
    """Input of a program and the output that it should print."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class CallTest:
    """Arguments of a function and the value that it should return."""

    function: str
    args: list[Any]
    value: Any
    kwargs: dict[str, Any] = field(default_factory=dict)
    exact: bool = False
    """The value is written as it is returned (LiveCodeBench); elsewhere it may be the only item of a list."""


@dataclass(frozen=True)
class CodeTest:
    """Code that raises where the program is wrong."""

    code: str


@dataclass(frozen=True)
class TestSuite:
    """The tests of a row: programs, or calls and code."""

    __test__ = False  # for pytest

    tests: tuple[ProgramTest, ...] | tuple[CallTest | CodeTest, ...]
    names: Names | None = None
    """What the names of ``CodeTest``s mean."""

    @property
    def wrapped(self) -> bool:
        """Tells whether every returned value stands in a list of its own, as APPS and TACO write them; or is one."""
        calls = [test for test in self.tests if isinstance(test, CallTest)]
        return bool(calls) and all(
            not test.exact and isinstance(test.value, list) and len(test.value) == 1 for test in calls
        )

    @property
    def asked(self) -> Asked:
        """What the tests need of the program."""
        names = frozenset(test.function for test in self.tests if isinstance(test, CallTest))
        stdin = any(isinstance(test, ProgramTest) and test.stdin.strip() for test in self.tests)
        return Asked(names | (self.names.asked if self.names else frozenset()), stdin)


@dataclass(frozen=True)
class _Context:
    """What is known of tests from what stands around them."""

    place: str = "tests"
    name: str = ""
    """The function that is called."""
    kind: str = ""
    """``program``, ``call``, ``code``, or nothing."""
    exact: bool = False
    entry_point: str = ""


_KINDS = {
    "program": ("stdin", "stdinstdout", "stdio", "standardinput", "standardio", "input", "inputoutput", "io"),
    "call": ("functional", "function", "functioncall", "call", "callbased", "method"),
    "code": ("assert", "assertion", "asserts", "pytest", "unittest", "unittests", "code", "check"),
}
_KIND = ("type", "testtype", "test_type", "case_type", "testcase_type")
_NAME = ("fn_name", "func_name", "function_name", "method_name", "function", "method", "fn")
_INPUT = ("stdin", "input", "inputs", "args", "arguments")
_OUTPUT = (
    *("stdout", "output", "outputs", "expected_output", "expected_outputs", "expected_stdout", "expected", "result"),
)
_CODE = (
    *("test", "test_code", "functional", "pytest", "unittest", "assert", "asserts", "assertion", "assertions"),
    *("assert_code", "assert_case", "assert_cases", "test_list", "challenge_test_list", "test_script"),
)
_SETUP = ("setup", "setup_code", "test_setup_code", "test_setup", "import_prefix", "prefix", "test_imports", "imports")
_INSIDE = (
    *("verification_info", "verification", "input_output", "in_outs", "ground_truth", "test_cases", "tests"),
    *("unit_tests", "public_tests", "private_tests", "generated_tests", "public_test_cases", "private_test_cases"),
    "official_tests",
)
_DESCRIBES = (
    *("id", "test_id", "case_id", "idx", "index", "task_id", "question_id", "explanation", "description", "comment"),
    *("prompt", "question", "starter_code", "solution", "solutions", "canonical_solution", "difficulty", "source"),
    *("is_public", "is_example", "is_hidden", "time_limit", "memory_limit", "timeout"),
)
"""Keys that change nothing: how long a test may take is up to ``limits``."""
_KNOWN = frozenset(
    (*_KIND, *_NAME, *_INPUT, *_OUTPUT, *_CODE, *_SETUP, *_INSIDE, *_DESCRIBES, "kwargs", "metadata", "language")
) | {"entry_point"}
_MAX_BYTES = 256 << 20
"""Of compressed tests, unpacked."""


def parse_tests(tests: Any, *, setup: Any = None, entry_point: Any = None, metadata: Any = None) -> TestSuite:
    """Reads the tests of a row.

    Args:
        setup: code that runs before assertions.
        entry_point: the function that the tests are about, an expression; with it, inputs are arguments.
        metadata: LiveCodeBench's column, which may have ``func_name``.

    Raises:
        ValueError: they are of no known form, there is none, they are of two kinds, or their code does not parse or
            never uses the program of the program.
    """
    entry_point = _text(entry_point or "", "entry_point")
    reader = _Reader([*_setup_lines(setup, "setup")])
    reader.read(tests, _Context(name=_function_of(metadata, "metadata"), entry_point=entry_point))
    found = reader.tests
    if not found:
        raise ValueError(f"tests: got {_short(tests)}, expected a list of tests or an object with them")
    programs = [test for test in found if isinstance(test, ProgramTest)]
    if len(programs) == len(found):
        return TestSuite(tuple(programs))
    calls: list[CallTest | CodeTest] = [test for test in found if isinstance(test, CallTest)]
    if programs:
        kinds = f"{len(programs)} tests with input and output, {len(found) - len(programs)} that call"
        raise ValueError(f"tests: got {kinds}, expected tests of one kind")
    codes = [test.code for test in found if isinstance(test, CodeTest)]
    if not codes:
        return TestSuite(tuple(calls))
    names = _names("\n".join(reader.setup), codes, reader.entry_point)
    return TestSuite((*calls, *(CodeTest(code) for code in names.codes)), names)


def _names(setup: str, codes: Sequence[str], entry_point: str) -> Names:
    for code in (setup, *codes):
        try:
            ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"tests: got code that does not parse ({error}): {_short(code)}") from None
        if "{response}" in code:
            raise ValueError(f"tests: got {_short(code)}, code about the text of the response; expected assertions")
    try:
        return resolve(setup, codes, entry_point)
    except ValueError as error:
        if "never uses the program" not in str(error):
            raise ValueError(f"tests: {error}") from None
        raise ValueError(
            f"tests: got {_short(codes[0] if len(codes) == 1 else list(codes))}, which {error}; expected assertions "
            "that call it, or a function check(candidate) with its entry_point"
        ) from None


class _Reader:
    """Collects the tests of a row."""

    def __init__(self, setup: list[str]) -> None:
        self.setup = setup
        self.entry_point = ""
        self.tests: list[ProgramTest | CallTest | CodeTest] = []

    def read(self, value: Any, context: _Context) -> None:
        value = _unpacked(value, context.place)
        self.entry_point = self.entry_point or context.entry_point
        if isinstance(value, str):
            if context.kind not in ("", "code"):
                raise ValueError(f"{context.place}: got {_short(value)}, expected tests as JSON")
            self.tests.append(CodeTest(value))
        elif isinstance(value, Mapping):
            self._mapping(value, context)
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                place = f"{context.place}[{number}]"
                unpacked = _unpacked(item, place, whole=False)
                if not isinstance(unpacked, str | Mapping):
                    raise ValueError(f"{place}: got {_short(item)}, expected an object with input and output, or code")
                self.read(unpacked, replace(context, place=place))
        else:
            raise ValueError(f"{context.place}: got {_short(value)}, expected a list of tests or an object with them")

    def _mapping(self, value: Mapping[str, Any], context: _Context) -> None:
        """One test, or an object that holds several."""
        place = context.place
        tests = {str(key): item for key, item in value.items() if item is not None}
        if unknown := [key for key in tests if key not in _KNOWN]:
            expected = "input and output, fn_name, code (test, assert_code, …), type, or what holds such tests"
            raise ValueError(f"{place}: got the key {unknown[0]!r}, which is not understood; expected {expected}")
        context = _within(tests, context)
        self.entry_point = self.entry_point or context.entry_point
        for key in _SETUP:
            self.setup += _setup_lines(tests.get(key), f"{place}.{key}")
        inputs, outputs = (_one(tests, names, place) for names in (_INPUT, _OUTPUT))
        codes = [key for key in _CODE if key in tests]
        inside = [key for key in _INSIDE if key in tests]
        for key in codes:
            self.read(tests[key], replace(context, place=f"{place}.{key}", kind="code"))
        for key in inside:
            self.read(tests[key], replace(context, place=f"{place}.{key}"))
        if codes and not any(_has_content(item) for _, item in (inputs, outputs)):
            return
        if not inside and not codes and inputs[0] is None and outputs[0] is None and "kwargs" not in tests:
            raise ValueError(f"{place}: got {_short(dict(value))}, expected the keys input and output, or code")
        if codes or (inside and inputs[0] is not None):
            raise ValueError(f"{place}: got {sorted(tests)}, expected either code or input and output")
        if not inside:
            self._cases(inputs, outputs, tests, context)

    def _cases(self, inputs: Any, outputs: Any, tests: Mapping[str, Any], context: _Context) -> None:
        (input_key, given), (output_key, wanted) = inputs, outputs
        if output_key is None:
            raise ValueError(f"{context.place}: got the keys {sorted(tests)}, expected one of stdout and output")
        if input_key is None and "kwargs" not in tests:
            raise ValueError(f"{context.place}: got the keys {sorted(tests)}, expected one of stdin and input")
        several = "[" not in context.place.rpartition(".")[2]
        if several and input_key in ("inputs",) and isinstance(given, str) and isinstance(wanted, str):
            lists = [_literal(text) for text in (given, wanted)]
            if all(isinstance(part, list) for part in lists):
                given, wanted = lists
        plural = input_key == "inputs" or not (context.name or context.kind == "call")
        if several and plural and isinstance(given, list) and isinstance(wanted, list):
            if len(given) != len(wanted) or not (given or "." in context.place):  # a part may have none
                counts = f"{len(given)} {input_key} and {len(wanted)} {output_key}"
                raise ValueError(f"{context.place}: got {counts}, expected lists of one length, at least 1")
            for number, pair in enumerate(zip(given, wanted, strict=True)):
                self.tests.append(_case(*pair, {}, replace(context, place=f"{context.place}.{input_key}[{number}]")))
            return
        self.tests.append(_case(given, wanted, tests.get("kwargs") or {}, context))


def _within(tests: Mapping[str, Any], context: _Context) -> _Context:
    """What a test, or what holds several, says about how it is read."""
    place = context.place
    language = tests.get("language")
    if language is not None and not str(language).lower().startswith(("py", "cpython")):
        raise ValueError(f"{place}.language: got {_short(language)}, expected python")
    _, kind = _one(tests, _KIND, place)
    if kind:
        word = re.sub(r"[\W_]", "", str(kind).lower())
        found = next((name for name, words in _KINDS.items() if word in words), None)
        if found is None:
            known = "stdin, functional, function_call, assert, pytest"
            raise ValueError(f"{place}: got the type {_short(kind)}, expected one of {known}")
        context = replace(context, kind=found, exact=word == "functional")
    _, name = _one(tests, _NAME, place)
    name = name or _function_of(tests.get("metadata"), f"{place}.metadata") or context.name
    if not isinstance(name, str) or not re.fullmatch(r"(?:\w+(?:\(\))?\.)?[^\W\d]\w*|", name.strip()):
        raise ValueError(f"{place}.fn_name: got {_short(name)}, expected the name of a function")
    entry_point = _text(tests.get("entry_point") or context.entry_point, f"{place}.entry_point")
    return replace(context, name=name.strip(), entry_point=entry_point)


def _one(tests: Mapping[str, Any], keys: Sequence[str], place: str) -> tuple[str | None, Any]:
    """The one of several keys that a test has, and its value."""
    found = [key for key in keys if key in tests]
    if len(found) > 1:
        raise ValueError(f"{place}: got the keys {found}, expected one of {' and '.join(found)}")
    return (found[0], tests[found[0]]) if found else (None, None)


def _has_content(value: Any) -> bool:
    """Tells whether inputs or outputs beside code say anything: verl fills them with blanks."""
    return any(map(_has_content, value)) if isinstance(value, list | tuple) else value not in (None, "")


def _function_of(metadata: Any, place: str) -> str:
    """The function that LiveCodeBench's ``metadata`` names; other columns of that name are not its."""
    if isinstance(metadata, str):
        metadata = _literal(metadata)
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    return _text(name or "", f"{place}.func_name")


# --- one case


def _case(given: Any, wanted: Any, kwargs: Any, context: _Context) -> ProgramTest | CallTest:
    place = context.place
    name = context.name or context.entry_point
    if context.kind == "program" or (not context.kind and not name):
        return ProgramTest(_lines(given, f"{place}.input"), _lines(wanted, f"{place}.output"))
    if context.kind == "code":
        raise ValueError(f"{place}: got input and output in a test of code, expected code")
    if not name:
        raise ValueError(f"{place}: got a call without the name of its function, expected fn_name")
    function = re.sub(r"\(\)", "", name).rpartition(".")[2]
    args, named = _arguments(given, f"{place}.inputs")
    value = _value(wanted) if isinstance(given, str) and isinstance(wanted, str) else wanted
    return CallTest(function, [_with_numbers(arg) for arg in args], value, {**named, **kwargs}, context.exact)


def _lines(value: Any, place: str) -> str:
    """Text, also as a list of its lines."""
    lines = value if isinstance(value, list) else [value]
    hint = ", or fn_name with it" if not isinstance(value, str) else ""
    return "\n".join(_text(line, place, hint) for line in lines)


def _arguments(given: Any, place: str) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a call: a list, an object of named ones, a text with one JSON value a line, or ``a = 1, b = 2``."""
    if given is None:
        return [], {}
    if isinstance(given, Mapping):
        return [], {str(name): value for name, value in given.items()}
    if isinstance(given, list | tuple):
        return list(given), {}
    if not isinstance(given, str):
        raise ValueError(f"{place}: got {_short(given)}, expected the list of a call's arguments")
    lines = [line for line in given.split("\n") if line.strip()]
    try:
        return [_literal(line, strict=True) for line in lines], {}
    except ValueError:
        pass
    try:
        return [_literal(given, strict=True)], {}
    except ValueError:
        pass
    try:
        call = ast.parse(f"f({given})", mode="eval").body
        assert isinstance(call, ast.Call)
        named = {word.arg or "": _evaluated(word.value) for word in call.keywords}
        return [_evaluated(arg) for arg in call.args], named
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError):
        raise ValueError(f"{place}: got {_short(given)}, expected one JSON value a line, an argument each") from None


def _evaluated(node: ast.expr) -> Any:
    return _literal(ast.unparse(node), strict=True)


def _value(text: str) -> Any:
    """The value that a text writes in JSON or in Python; else the text itself."""
    return _literal(text)


def _with_numbers(value: Any) -> Any:
    """An argument whose keys JSON has made texts, as integers where all of them are such (as APPS reads them)."""
    if isinstance(value, dict) and value and all(re.fullmatch(r"-?(?:0|[1-9]\d*)", str(key)) for key in value):
        return {int(key): item for key, item in value.items()}
    return value


# --- texts


def _unpacked(value: Any, place: str, whole: bool = True) -> Any:
    """A value that may be a text with JSON, a Python literal, or LiveCodeBench's compressed tests.

    Args:
        whole: a text may write any value, not only an object.
    """
    for _ in range(3):
        if not isinstance(value, str):
            return value
        if value[:2] in ("eJ", "eN", "eA", "eF") and re.fullmatch(r"[A-Za-z0-9+/=\s]{16,}", value):
            value = _decompressed(value, place)
            continue
        read = _literal(value)
        if isinstance(read, str) and not whole:
            return value
        if not whole and not isinstance(read, Mapping):
            return value
        if read == value:
            return value
        value = read
    return value


def _literal(text: str, strict: bool = False) -> Any:
    """A text's value in JSON, else as a Python literal; else the text itself.

    Raises:
        ValueError: it is neither, and ``strict``.
    """
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text.strip())
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    if strict:
        raise ValueError("got neither JSON nor a Python literal")
    return text


def _decompressed(text: str, place: str) -> str:
    """LiveCodeBench's private tests: JSON, pickled as a text, in zlib's format, in base64. The pickle is not run."""
    try:
        reader = zlib.decompressobj()
        data = reader.decompress(base64.b64decode(text, validate=False), _MAX_BYTES)
        if not reader.eof:
            raise ValueError(f"more than {_MAX_BYTES >> 20} MiB, or cut off")
        return data.decode() if data[:1] in (b"[", b"{") else _pickled_text(data)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"{place}: got compressed tests that cannot be read: {error}") from None


_OPCODES = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"}


def _pickled_text(data: bytes) -> str:
    """The text that a pickle of one text holds, read off its opcodes."""
    texts = list(_texts(pickletools.genops(data)))
    if len(texts) != 1:
        raise ValueError(f"a pickle of {len(texts)} texts, expected one")
    return texts[0]


def _texts(codes: Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]]) -> Iterator[str]:
    for code, argument, _ in codes:
        if code.name in ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"):
            yield str(argument)
        elif code.name not in _OPCODES:
            raise ValueError(f"a pickle with {code.name}, expected one of a text alone")


def _setup_lines(value: Any, place: str) -> list[str]:
    """Code before the tests: a text, or a list of them."""
    if isinstance(value, str) and value.strip().startswith("["):
        value = _literal(value)
    lines = value if isinstance(value, list | tuple) else [value or ""]
    return [line for line in (_text(line, place) for line in lines) if line.strip()]


def _text(value: Any, key: str, hint: str = "") -> str:
    if not isinstance(value, str):
        raise ValueError(f"{key}: got {_short(value)}, expected text{hint}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
