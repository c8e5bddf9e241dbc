"""Runs a program or its tests inside the sandbox: a text that ``inner.py`` is given, or a sandbox service.

It uses the standard library only. ``run_program`` runs the source as ``__main__``. With ``run_tests`` it lives in a
process (the candidate) that answers calls of another (the tester), in which alone the tests are known. Only plain
values cross: an object whose ``__eq__`` says yes to everything arrives as a reference that is equal to nothing. Every
request has a random token that its answer repeats, so what a program writes into the pipe before it is asked, or beside
an answer, ends its tests.
"""

from __future__ import annotations

import builtins
import marshal
import os
import sys

# Modules that take milliseconds (ast, json, signal, typing) are imported where they are needed, or not.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast
    from collections.abc import Callable, Iterator
    from types import ModuleType
    from typing import Any, NoReturn

_REFERENCE = "ref"


def encode(value: Any, refer: Callable[[Any], int] | None = None) -> Any:
    """A value as JSON: scalars and lists as they are, other built-in types as ``{type: …}``.

    Args:
        value: what to encode; a subclass of a container or of a number counts as its base.
        refer: gives anything else a number, under which it can be asked for.

    Raises:
        TypeError: it is of another type, and there is no ``refer``.
    """
    if value is None or isinstance(value, bool | str):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 53 else {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, list):
        return [encode(item, refer) for item in value]
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, refer) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, refer), encode(item, refer)] for key, item in value.items()]}
    if isinstance(value, Remote):
        return {_REFERENCE: value.reference}
    if refer is None:
        raise TypeError(f"seen a value of type {type(value).__name__}, expected a plain one")
    return {_REFERENCE: refer(value)}


def decode(data: Any, resolve: Callable[[int], Any] | None = None) -> Any:
    """The inverse of ``encode``; its result consists of built-in types and of what ``resolve`` returns.

    Raises:
        ValueError: it is not of that form.
    """
    if isinstance(data, list):
        return [decode(item, resolve) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError("seen an object with other than one key, expected {type: …}")
    ((kind, content),) = data.items()
    if kind == "int":
        return int(content, 16)
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "dict":
        return {decode(key, resolve): decode(item, resolve) for key, item in content}
    if kind in ("tuple", "set", "frozenset"):
        return getattr(builtins, kind)(decode(item, resolve) for item in content)
    if kind == _REFERENCE and resolve is not None:
        return resolve(int(content))
    raise ValueError(f"seen the type {kind!r}, expected a plain one")


def _load(source: str, name: str) -> ModuleType:
    module = type(sys)(name)
    sys.modules[name] = module
    sys.argv = ["main.py"]
    for word in ("exit", "quit"):  # as the module site, which is left out, defines them
        setattr(builtins, word, sys.exit)
    exec(compile(source, "main.py", "exec", dont_inherit=True), module.__dict__)
    return module


def run_program(source: str) -> None:
    """Runs the source as the main module; its descriptors 0, 1 and 2 are the caller's."""
    try:
        _load(source, "__main__")
    except (SyntaxError, ValueError) as error:  # ValueError: NUL bytes, lone surrogates
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:
            sys.exit(f"{type(error).__name__}: {error}")
        raise


# --- tests -----------------------------------------------------------------------------------------------------------


class CandidateError(Exception):
    """The candidate raised an exception of its own type."""


class CandidateGoneError(BaseException):
    """The candidate's process has ended; no ``except Exception`` of a test hides it."""


class Channel:
    """Messages between the two processes, one JSON line each.

    The program shares its process with the code that answers, so it can find the descriptors and write to them.
    ``ask`` takes an answer to this request only, and ``check`` shows that the answering code goes on after it.
    """

    def __init__(self, read: int, write: int, max_bytes: int) -> None:
        self._lines = os.fdopen(read, "rb")
        self._write = write
        self._max_bytes = max_bytes

    def send(self, message: Any) -> None:
        import json

        data = json.dumps(message).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._write, data) :]
        except OSError:
            raise CandidateGoneError("the program ended") from None

    def receive(self) -> Any:
        import json

        line = self._lines.readline(self._max_bytes)
        if not line.endswith(b"\n"):
            raise CandidateGoneError("the program ended" if len(line) < self._max_bytes else "the value is too large")
        return json.loads(line)

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            CandidateGoneError: there is none, or something else lay in the pipe.
        """
        token = os.urandom(16).hex()
        self.send({"token": token, **request})
        answer = self.receive()
        if not isinstance(answer, dict) or answer.get("token") != token:
            raise CandidateGoneError("the program wrote into the pipe of its answers")
        return answer

    def check(self) -> None:
        """Fails where the last answer was not the last that was written, or nobody is there to answer.

        Raises:
            CandidateGoneError: so it is.
        """
        self.ask(do="nothing")


class Candidate:
    """The process with the untrusted source: answers requests about its objects until the other side closes."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._objects: list[Any] = []

    def _refer(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "nothing":
            return {}
        target = self._objects[request["on"]]
        if request["do"] == "get":
            return {"value": encode(getattr(target, request["name"]), self._refer)}
        if request["do"] == "built-in":
            return {"value": encode(getattr(builtins, request["name"])(target), self._refer)}
        args = [decode(item, self._objects.__getitem__) for item in request["args"]]
        kwargs = {key: decode(item, self._objects.__getitem__) for key, item in request["kwargs"].items()}
        value = target(*args, **kwargs)
        changed = [encode(item, self._refer) if isinstance(item, list | dict | set) else None for item in args]
        return {"value": encode(value, self._refer), "args": changed}

    def serve(self, source: str) -> NoReturn:
        try:
            module = _load(source, "solution")
            loaded: dict[str, Any] = {"names": {name: self._refer(value) for name, value in vars(module).items()}}
        except Exception as error:  # whatever the candidate's module raises
            loaded = {"error": f"{type(error).__name__}: {error}"}
        self._channel.send({"token": self._channel.receive()["token"], **loaded})
        while "names" in loaded:
            request = self._channel.receive()
            try:
                answer = self._answer(request)
            except Exception as error:  # whatever a call of the candidate's raises
                answer = {"raised": type(error).__name__, "text": str(error)}
            self._channel.send({"token": request["token"], **answer})
        os._exit(1)


class Remote:
    """An object of the candidate, seen from the tests. It is equal to itself only, and always true."""

    def __init__(self, channel: Channel, reference: int) -> None:
        self._channel = channel
        self.reference = reference

    def _ask(self, **request: Any) -> dict[str, Any]:
        answer = self._channel.ask(on=self.reference, **request)
        if "raised" in answer:
            kind: Any = getattr(builtins, str(answer["raised"]), None)
            known = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError)
            raise (kind if known else CandidateError)(str(answer.get("text")))
        return answer

    def _value(self, data: Any) -> Any:
        return decode(data, lambda reference: Remote(self._channel, reference))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        words = {key: encode(item) for key, item in kwargs.items()}
        answer = self._ask(do="call", args=[encode(item) for item in args], kwargs=words)
        for mine, theirs in zip(args, answer.get("args", ()), strict=False):  # arguments that were changed in place
            self._update(mine, self._value(theirs))
        return self._value(answer["value"])

    @staticmethod
    def _update(mine: Any, theirs: Any) -> None:
        if isinstance(mine, list) and isinstance(theirs, list):
            mine[:] = theirs
        elif (isinstance(mine, dict) and isinstance(theirs, dict)) or (
            isinstance(mine, set) and isinstance(theirs, set)
        ):
            mine.clear()
            mine.update(theirs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._value(self._ask(do="get", name=name)["value"])

    def __iter__(self) -> Iterator[Any]:
        iterator = self._value(self._ask(do="built-in", name="iter")["value"])
        while True:
            try:
                yield self._value(iterator._ask(do="built-in", name="next")["value"])
            except StopIteration:
                return

    def __len__(self) -> int:
        return int(self._ask(do="built-in", name="len")["value"])

    def __bool__(self) -> bool:
        return True


class Tester:
    """The process with the tests. Its results go to a descriptor that the candidate never had."""

    def __init__(self, channel: Channel, results: int) -> None:
        self._channel = channel
        self._results = results

    def say(self, **result: Any) -> None:
        """One line of results."""
        import json

        data = json.dumps(result).encode() + b"\n"
        while data:
            data = data[os.write(self._results, data) :]

    def _missing_module(self, trees: list[ast.Module]) -> str | None:
        """A module that the tests import and this interpreter lacks."""
        import ast
        from importlib.util import find_spec

        nodes = [node for tree in trees for node in ast.walk(tree)]
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
        return next((name for name in names if find_spec(name.partition(".")[0]) is None), None)

    def _namespace(self, plan: dict[str, Any], trees: list[ast.Module], references: dict[str, int]) -> dict[str, Any]:
        """Names that the tests may use: built-ins, modules by name, and the candidate's names for all else."""
        import ast

        used = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
        used |= {test["call"] for test in plan["tests"] if "call" in test} | {plan["entry_point"], "Solution"}
        space: dict[str, Any] = {"__name__": "tests"}
        for name in used & references.keys():
            if name not in vars(builtins) and name not in sys.stdlib_module_names:
                space[name] = Remote(self._channel, int(references[name]))
        for name in used & sys.stdlib_module_names - vars(builtins).keys():
            space[name] = __import__(name)
        return space

    def _run(self, test: dict[str, Any], space: dict[str, Any]) -> dict[str, Any]:
        if "code" in test:
            exec(compile(test["code"], "test", "exec", dont_inherit=True), space)
            return {"ok": True}
        name = test["call"]
        function = space[name] if name in space else getattr(space["Solution"](), name)
        return {"value": encode(function(*test["args"]))}

    def run(self, plan: dict[str, Any]) -> None:
        """Runs the tests in their order; a test that takes too long ends this process."""
        import ast
        import signal

        trees = [ast.parse(plan["setup"]), *(ast.parse(test["code"]) for test in plan["tests"] if "code" in test)]
        missing = self._missing_module(trees)
        if missing is not None:
            self.say(missing=missing)
            return
        signal.setitimer(signal.ITIMER_REAL, plan["timeout"])
        loaded = self._channel.ask(do="load")
        if "names" not in loaded:
            self.say(load=str(loaded.get("error")))
            return
        try:
            space = self._namespace(plan, trees, loaded["names"])
            exec(compile(plan["setup"], "setup", "exec", dont_inherit=True), space)
        except Exception as error:  # most often a name that the program should have defined
            self.say(load=f"{type(error).__name__}: {error}"[:500])
            return
        self.say(load=None)
        for test in plan["tests"]:
            signal.setitimer(signal.ITIMER_REAL, plan["timeout"])
            try:
                result = self._run(test, space)
                self._channel.check()
            except Exception as error:  # whatever the test or what it calls raises
                result = {"error": f"{type(error).__name__}: {error}"[:500]}
            self.say(**result)


def run_tests(source: str, max_bytes: int, read: Callable[[bytes], Any] = marshal.loads) -> None:
    """Splits into the candidate and the tester, which reads its plan from descriptor 0 and answers on descriptor 1.

    The candidate starts before the plan is read and has neither descriptor.
    """
    (ask_read, ask_write), (answer_read, answer_write) = os.pipe(), os.pipe()
    results = os.dup(1)
    os.dup2(2, 1)
    if os.fork() == 0:
        os.close(results)
        os.close(ask_write)
        os.close(answer_read)
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        try:
            Candidate(Channel(ask_read, answer_write, max_bytes)).serve(source)
        except CandidateGoneError:
            os._exit(0)
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            os._exit(1)
    os.close(ask_read)
    os.close(answer_write)
    plan = read(sys.stdin.buffer.read())
    tester = Tester(Channel(answer_read, ask_write, max_bytes), results)
    try:
        tester.run(plan)
    except CandidateGoneError as error:
        tester.say(error=str(error), gone=True)
    os._exit(0)
