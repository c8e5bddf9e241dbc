"""Runs a program or its tests inside the sandbox: a text that ``inner.py`` is given, or a sandbox service.

It uses the standard library only. ``run_program`` runs the source as ``__main__``. With ``run_tests`` it lives in a
process (the candidate) that answers calls of another (the tester), in which alone the tests are known. Only plain
values cross: an object whose ``__eq__`` says yes to everything arrives as a reference that is equal to nothing. What
the tests lend the program (a function to call, an object of a class of theirs, an iterator) stays with them, and the
program asks for its public parts alone: none leads to the tests' other names. Which names of the tests are the
program's is settled outside (``roll.extras.sandbox.code_names``). Every request has a random token that its answer
repeats, so what a program writes into the pipe before it is asked, or beside an answer, ends its tests.
"""

from __future__ import annotations

import builtins
import marshal
import os
import sys

# Modules that take milliseconds (ast, json, signal, typing) are imported where they are needed, or not.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType
    from typing import Any, NoReturn

_REFERENCE = "ref"
_LENT = "lent"
_KNOWN = "known"
"""Keys of what is no value: the candidate's own, the tester's, and what both have by its name."""
_TEXTS = {"Decimal": "decimal", "Fraction": "fractions", "date": "datetime", "datetime": "datetime", "time": "datetime"}
"""Types that cross as the text of their values, with their modules."""
_MAX_NODES = 100_000


class ListNode:
    """A node of a list, as LeetCode has it."""

    def __init__(self, val: Any = 0, next: Any = None) -> None:
        self.val = val
        self.next = next


class TreeNode:
    """A node of a binary tree, as LeetCode has it."""

    def __init__(self, val: Any = 0, left: Any = None, right: Any = None) -> None:
        self.val = val
        self.left = left
        self.right = right


_NODES: dict[str, Any] = {"ListNode": ListNode, "TreeNode": TreeNode}
"""In the candidate the program's own classes of these names, where it has them."""


def list_node(values: list[Any]) -> Any:
    """The first node of a list with these values, ``None`` for none."""
    first = None
    for value in reversed(values):
        first = _NODES["ListNode"](value, first)
    return first


def tree_node(values: list[Any]) -> Any:
    """The root of a tree by levels, ``None`` where a node is missing."""
    nodes = [None if value is None else _NODES["TreeNode"](value) for value in values]
    parents = [node for node in nodes if node is not None]
    for number, child in enumerate(nodes[1:]):
        if number // 2 < len(parents):
            setattr(parents[number // 2], "right" if number % 2 else "left", child)
    return nodes[0] if nodes else None


def _list_values(node: Any) -> list[Any]:
    values: list[Any] = []
    while node is not None and len(values) < _MAX_NODES:
        values.append(node.val)
        node = node.next
    if node is not None:
        raise TypeError("got a list without an end, expected one")
    return values


def _tree_values(node: Any) -> list[Any]:
    values: list[Any] = []
    level = [node]
    while any(node is not None for node in level) and len(values) < _MAX_NODES:
        values += [None if node is None else node.val for node in level]
        level = [child for node in level if node is not None for child in (node.left, node.right)]
    if len(values) >= _MAX_NODES:
        raise TypeError("got a tree without an end, expected one")
    while values and values[-1] is None:
        values.pop()
    return values


def is_same_list(one: Any, other: Any) -> bool:
    """Tells whether two lists have the same values."""
    return _list_values(one) == _list_values(other)


def is_same_tree(one: Any, other: Any) -> bool:
    """Tells whether two trees have the same values at the same places."""
    return _tree_values(one) == _tree_values(other)


def encode(value: Any, refer: Callable[[Any], Any] | None = None) -> Any:
    """A value as JSON: scalars and lists as they are, other built-in types as ``{type: …}``.

    Args:
        value: what to encode; a subclass of a container or of a number counts as its base.
        refer: gives anything else a number, under which it can be asked for, or encodes it otherwise.

    Raises:
        TypeError: it is of another type, and there is no ``refer``.
    """
    cls = type(value)  # what an object says of its class does not count
    if value is None or cls is bool:
        return value
    if issubclass(cls, str):
        return str(value)
    if issubclass(cls, int):
        return int(value) if abs(value) < 1 << 53 else {"int": hex(value)}
    if issubclass(cls, float):
        return float(value)
    if issubclass(cls, complex):
        return {"complex": [value.real, value.imag]}
    if issubclass(cls, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if issubclass(cls, list):
        return [encode(item, refer) for item in value]
    if issubclass(cls, tuple) and (fields := getattr(cls, "_fields", None)):
        return {"namedtuple": [cls.__name__, list(fields), [encode(item, refer) for item in value]]}
    for kind in (tuple, set, frozenset):
        if issubclass(cls, kind):
            return {kind.__name__: [encode(item, refer) for item in value]}
    if issubclass(cls, dict):
        return {"dict": [[encode(key, refer), encode(item, refer)] for key, item in value.items()]}
    if cls is Remote:
        return {_REFERENCE: value._reference}
    if cls is Lent or cls is LentFunction:
        return {_LENT: value._number}
    known = _encode_known(value, refer)
    if known is not None:
        return known
    if refer is None:
        raise TypeError(f"got a value of type {type(value).__name__}, expected a plain one")
    found = refer(value)
    return found if isinstance(found, dict) else {_REFERENCE: found}


def _encode_known(value: Any, refer: Callable[[Any], Any] | None) -> Any:
    """A value of a type that programs often return; ``None`` for any other."""
    kind, module = type(value).__name__, type(value).__module__
    if _TEXTS.get(kind) == module:
        return {kind: value.isoformat() if module == "datetime" else str(value)}
    if kind == "timedelta" and module == "datetime":
        return {kind: [value.days, value.seconds, value.microseconds]}
    if kind == "range":
        return {kind: [encode(number) for number in (value.start, value.stop, value.step)]}
    if kind == "deque":
        return {kind: [encode(item, refer) for item in value]}
    if module == "numpy" and hasattr(value, "item") and not getattr(value, "ndim", 1):
        return encode(value.item(), refer)
    if kind in _NODES and hasattr(value, "val"):
        values = _list_values(value) if kind == "ListNode" else _tree_values(value)
        return {kind: [encode(item, refer) for item in values]}
    return None


def decode(data: Any, resolve: Callable[[Any], Any] | None = None) -> Any:
    """The inverse of ``encode``; its result consists of plain types and of what ``resolve`` returns.

    Without ``resolve``, outside the sandbox, these are built-in types alone, and nodes are the list of their values.

    Raises:
        ValueError: it is not of that form.
    """
    if isinstance(data, list):
        return [decode(item, resolve) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError("got an object with other than one key, expected {type: …}")
    ((kind, content),) = data.items()
    if kind == "int":
        return int(content, 16)
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "dict":
        return {decode(key, resolve): decode(item, resolve) for key, item in content}
    if kind == "namedtuple":
        name, fields, items = content
        plain = tuple(decode(item, resolve) for item in items)
        return plain if resolve is None else __import__("collections").namedtuple(name, fields)(*plain)
    if kind in ("tuple", "set", "frozenset"):
        return getattr(builtins, kind)(decode(item, resolve) for item in content)
    if kind in _NODES:
        values = [decode(item, resolve) for item in content]
        return values if resolve is None else (list_node if kind == "ListNode" else tree_node)(values)
    if resolve is not None:
        if kind in (_REFERENCE, _LENT):
            return resolve(int(content) if kind == _REFERENCE else [content])
        return _decode_known(kind, content, resolve)
    raise ValueError(f"got the type {kind!r}, expected a plain one")


def _decode_known(kind: str, content: Any, resolve: Callable[[Any], Any]) -> Any:
    if kind == _KNOWN:
        return resolve(tuple(content))
    if kind in _TEXTS:
        known = getattr(__import__(_TEXTS[kind]), kind)
        return known.fromisoformat(content) if _TEXTS[kind] == "datetime" else known(content)
    if kind == "timedelta":
        return __import__("datetime").timedelta(*content)
    if kind == "range":
        return range(*(decode(number) for number in content))
    if kind == "deque":
        return __import__("collections").deque(decode(item, resolve) for item in content)
    raise ValueError(f"got the type {kind!r}, expected a plain one")


def _of_python(module: str, name: str) -> Any:
    """What a module of Python's library has by a name, with a dot in the name of a type's method."""
    found = __import__("importlib").import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


# --- programs --------------------------------------------------------------------------------------------------------

_RECURSION = 100_000
"""As the graders of public datasets set it; a program of the standard limit fails on long lists of nodes."""


def _named(name: str, module: str) -> Any:
    """What Python has by this name in this module (nothing: it is one itself; ``harness``: it is of this file)."""
    return globals()[name] if module == "harness" else getattr(__import__(module), name) if module else __import__(name)


def _load(source: str, module: ModuleType, provided: dict[str, str]) -> None:
    """Runs the source in a module, whose own names are then those that it has bound itself."""
    sys.modules[module.__name__] = module
    sys.argv = ["main.py"]
    sys.setrecursionlimit(_RECURSION)
    for word in ("exit", "quit"):  # as the module site, which is left out, defines them
        setattr(builtins, word, sys.exit)
    code = compile(source, "main.py", "exec", dont_inherit=True)
    vars(builtins).update((name, _named(name, home)) for name, home in provided.items())
    try:
        exec(code, module.__dict__)
    except EOFError:  # it ends with lines that read an input, of which there is none where its functions are called
        if module.__name__ == "__main__":
            raise


def run_program(source: str, provided: dict[str, str] | None = None) -> None:
    """Runs the source as the main module; its descriptors 0, 1 and 2 are the caller's.

    Args:
        provided: names that it may use without importing them, with their modules.
    """
    try:
        _load(source, type(sys)("__main__"), provided or {})
    except (SyntaxError, ValueError) as error:  # ValueError: NUL bytes, lone surrogates
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:
            sys.exit(f"{type(error).__name__}: {error}")
        raise


# --- tests -----------------------------------------------------------------------------------------------------------


_FUNCTIONS = {"function", "method", "builtin_function_or_method", "partial", "itemgetter", "attrgetter", "methodcaller"}
_SPECIAL = {f"__{word}__" for word in ("eq", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "contains")}
_SPECIAL |= {f"__{word}__" for word in ("len", "getitem", "setitem", "iter", "next", "str", "repr", "bool")}
"""Of what the tests lend, beside its public attributes."""


def _of_tests(value: Any) -> bool:
    """Tells whether the class of a value, or the value as a class, is one of the tests."""
    kind = value if isinstance(value, type) else type(value)
    return getattr(kind, "__module__", None) == "tests"


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
        self.exceptions: dict[str, type[Exception]] = {}
        """Classes that stand for the candidate's own exceptions."""
        self.named: list[str] = []
        """Functions and classes of the candidate that the tests name."""
        self.lent: list[Any] = []
        """What the tests lend the candidate."""
        self.unsendable: str | None = None
        """What they would have given it, and it could not get."""

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
        while True:
            answer = self.receive()
            if not isinstance(answer, dict) or answer.get("token") != token:
                raise CandidateGoneError("the program wrote into the pipe of its answers")
            if _LENT not in answer:
                return answer
            try:
                reply = {"value": encode(self._use(answer), self._lend)}
            except Exception as error:  # whatever a function of the tests raises
                reply = {"raised": type(error).__name__, "text": str(error)}
            self.send({"reply": token, **reply})

    def lend(self, value: Any) -> Any:
        """What a test gives the candidate and cannot cross, see ``_lend``; what cannot be lent is kept in mind.

        Raises:
            TypeError: it cannot be lent.
        """
        try:
            return self._lend(value)
        except TypeError:
            self.unsendable = self.unsendable or f"a value of type {type(value).__name__}"
            raise

    def _lend(self, value: Any) -> Any:
        """A number for the candidate to ask for it, or its name where Python has it.

        Raises:
            TypeError: it is neither a function, nor an iterator, nor of a class of the tests.
        """
        kind = type(value)
        name = str(getattr(value, "__qualname__", ""))
        home = getattr(value, "__module__", None) or getattr(getattr(value, "__objclass__", None), "__module__", None)
        if value is NotImplemented:
            return {_KNOWN: ["builtins", "NotImplemented"]}
        if name and home in sys.modules and home != "tests":
            try:
                if _of_python(str(home), name) is value:
                    return {_KNOWN: [home, name]}
            except AttributeError:
                pass
        calls = kind.__name__ in _FUNCTIONS or (callable(value) and _of_tests(value))
        iterates = hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")
        if not (calls or iterates or _of_tests(value)):
            raise TypeError(f"got a value of type {kind.__name__}, expected a plain one")
        number = next((n for n, known in enumerate(self.lent) if known is value), len(self.lent))
        self.lent[number:] = [value] if number == len(self.lent) else self.lent[number:]
        return {_LENT: [number, calls, getattr(value, "__name__", None)]}

    def resolve(self, reference: Any) -> Any:
        """An object of the candidate, or what it gives back.

        Raises:
            ValueError: a name of Python's, which the tests alone may send: what it stands for may equal everything.
        """
        if isinstance(reference, tuple):
            raise ValueError(f"got the name {reference!r:.80}, expected a plain value")
        return Remote(self, reference) if isinstance(reference, int) else self.lent[int(reference[0])]

    def _use(self, asked: dict[str, Any]) -> Any:
        """Does with something that was lent what the candidate asks for."""
        target, do, name = self.lent[int(asked[_LENT])], asked["do"], str(asked.get("name"))
        args = [decode(item, self.resolve) for item in asked["args"]]
        if do == "call" and (type(target).__name__ in _FUNCTIONS or _of_tests(target)):
            kwargs = {key: decode(item, self.resolve) for key, item in asked["kwargs"].items()}
            return target(*args, **kwargs)
        if do == "special" and name in ("__next__", "__iter__") and hasattr(type(target), "__next__"):
            return getattr(target, name)()
        if do == "special" and name == "__bool__":
            return bool(target)
        if do == "special" and name in ("__str__", "__repr__") and not _of_tests(target):
            return f"<{type(target).__name__} of the tests>"
        if do == "special" and not (_of_tests(target) and name in _SPECIAL and hasattr(type(target), name)):
            raise TypeError(f"{type(target).__name__!r} object has no {name}")
        if do == "special":
            return getattr(type(target), name)(target, *args)
        if not _of_tests(target) or name.startswith("_"):
            raise AttributeError(name)
        return setattr(target, name, *args) if do == "set" else getattr(target, name)

    def ask_checked(self, **request: Any) -> dict[str, Any]:
        """The answer to a request, whose ``value`` is encoded.

        Raises:
            Exception: the candidate raised one of this type, or ``CandidateError`` where it is its own.
        """
        answer = self.ask(**request)
        if "raised" in answer:
            name = str(answer["raised"])
            kind: Any = self.exceptions.get(name) or getattr(builtins, name, None)
            known = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError)
            raise (kind if known else CandidateError)(str(answer.get("text")))
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
        self._own: dict[str, Any] = {}
        """What the program defines."""
        self._borrowed: dict[int, Any] = {}
        self._token = ""
        """Of the request that is being answered."""

    def _resolve(self, reference: Any) -> Any:
        """An object of the program's own by its number, what Python has by a name, or what the tests lend it."""
        if isinstance(reference, int):
            return self._objects[reference]
        if isinstance(reference, tuple):
            return _of_python(*reference)
        number, calls, name = reference[0]
        if number not in self._borrowed:
            self._borrowed[number] = (LentFunction if calls else Lent)(self, number, name)
        return self._borrowed[number]

    def borrow(self, number: int, do: str, *args: Any, name: str = "", kwargs: Any = ()) -> Any:
        """Asks the tester for something that it has lent, and answers what it asks meanwhile."""
        token = self._token
        words = {key: encode(item, self._refer) for key, item in dict(kwargs).items()}
        sent = [encode(item, self._refer) for item in args]
        self._channel.send({"token": token, _LENT: number, "do": do, "name": name, "args": sent, "kwargs": words})
        while True:
            got = self._channel.receive()
            if "reply" in got:
                break
            self._reply(got)
        self._token = token
        if "raised" in got:
            kind: Any = getattr(builtins, str(got["raised"]), None) or self._own.get(str(got["raised"]))
            known = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError)
            raise (kind if known else CandidateError)(str(got.get("text")))
        return decode(got["value"], self._resolve)

    def _reply(self, request: dict[str, Any]) -> None:
        self._token = request["token"]
        try:
            answer = self._answer(request)
        except Exception as error:  # whatever a call of the candidate's raises
            answer = {"raised": type(error).__name__, "text": str(error)}
        self._channel.send({"token": request["token"], **answer})

    def _refer(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1

    def _find(self, name: str) -> Any:
        """The function of this name, or the method of a new ``Solution``, or of the only class that has it."""
        if callable(self._own.get(name)):
            return self._own[name]
        classes = [item for item in self._own.values() if isinstance(item, type) and hasattr(item, name)]
        home = self._own.get("Solution") or (classes[0] if len(classes) == 1 else None)
        if home is None:
            raise NameError(f"name {name!r} is not defined")
        return getattr(home(), name)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "nothing":
            return {}
        if request["do"] == "run":
            return {"value": encode(self._run(self._find(request["name"]), request["args"], request["kwargs"]))}
        target = self._objects[request["on"]]
        if request["do"] == "read":
            return {"value": encode(target, self._refer)}
        if request["do"] == "get":
            return {"value": encode(getattr(target, request["name"]), self._refer)}
        if request["do"] == "await":
            return {"value": encode(__import__("asyncio").run(_awaited(target)), self._refer)}
        if request["do"] == "instance":
            return {"value": isinstance(self._objects[request["of"]], target)}
        if request["do"] == "built-in":
            return {"value": encode(getattr(builtins, request["name"])(target), self._refer)}
        args = [decode(item, self._resolve) for item in request["args"]]
        if request["do"] == "special":
            return {"value": encode(getattr(type(target), request["name"])(target, *args), self._refer)}
        if request["do"] == "operator":
            return {"value": encode(self._operate(target, request["name"], args, request["named"]), self._refer)}
        kwargs = {key: decode(item, self._resolve) for key, item in request["kwargs"].items()}
        value, printed = _call(target, args, kwargs, printing=request.get("prints", False))
        changed = [encode(item, self._refer) if isinstance(item, list | dict | set) else None for item in args]
        return {"value": encode(value, self._refer), "args": changed, "printed": printed}

    def _operate(self, target: Any, name: str, args: list[Any], named: list[str]) -> Any:
        """An operator of a class that the tests name; ``None`` for another, and for one that equals anything."""
        kind = type(target)
        if not any(kind is self._own.get(each) for each in named) or not hasattr(kind, name):
            return None
        operate = getattr(kind, name)
        if name == "__eq__":
            for other in (object(), object.__new__(kind)):  # a stranger, and one of its own without any attribute
                try:
                    if operate(target, other) is True:
                        return None
                except Exception:  # it looks for an attribute that the object does not have
                    pass
        value = operate(target, *args)
        return None if value is NotImplemented else value

    def _run(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Calls with plain values; lists are nodes where the function's annotations say so."""
        hints = dict(getattr(function, "__annotations__", None) or {})
        back = hints.pop("return", None)
        values = [decode(item, self._resolve) for item in args]
        named = {key: decode(item, self._resolve) for key, item in kwargs.items()}
        ordered = [*hints.values(), *[None] * len(values)]
        if _nodes_of(hints):
            values = [_as_nodes(value, hint) for value, hint in zip(values, ordered, strict=False)]
            named = {key: _as_nodes(value, hints.get(key)) for key, value in named.items()}
        value = function(*values, **named)
        return [] if value is None and _nodes_of(back) else value

    def serve(self, source: str, provided: dict[str, str]) -> NoReturn:
        module = type(sys)("solution")
        try:
            _load(source, module, provided)
            self._own = {name: value for name, value in vars(module).items() if not name.startswith("__")}
            _NODES.update((name, self._own[name]) for name in _NODES.keys() & self._own.keys())
            loaded: dict[str, Any] = {"names": {name: self._refer(value) for name, value in self._own.items()}}
            raised = {
                name: cls for name, cls in self._own.items() if isinstance(cls, type) and Exception in cls.__mro__
            }
            loaded["exceptions"] = {name: [base.__name__ for base in cls.__mro__] for name, cls in raised.items()}
        except Exception as error:  # whatever the candidate's module raises
            loaded = {"error": f"{type(error).__name__}: {error}"}
        self._channel.send({"token": self._channel.receive()["token"], **loaded})
        while "names" in loaded:
            self._reply(self._channel.receive())
        os._exit(1)


async def _awaited(value: Any) -> Any:
    return await value


def _call(target: Any, args: list[Any], kwargs: dict[str, Any], *, printing: bool) -> tuple[Any, str]:
    """What a call returns, and what it prints where somebody reads that."""
    if not printing:
        return target(*args, **kwargs), ""
    text, before = __import__("io").StringIO(), sys.stdout
    sys.stdout = text
    try:
        return target(*args, **kwargs), text.getvalue()
    finally:
        sys.stdout = before


class Lent:
    """An object of the tests, seen from the program."""

    def __init__(self, owner: Candidate, number: int, name: str | None) -> None:
        vars(self).update(_owner=owner, _number=number)
        if name is not None:
            vars(self)["__name__"] = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._owner.borrow(self._number, "get", name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._owner.borrow(self._number, "set", value, name=name)

    __hash__ = object.__hash__


class LentFunction(Lent):
    """One that can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._owner.borrow(self._number, "call", *args, kwargs=kwargs)


def _lent(name: str) -> Any:
    return lambda self, *args: (
        self is args[0]
        if name == "__eq__" and self is args[0]
        else self._owner.borrow(self._number, "special", *args, name=name)
    )


for _word in sorted(_SPECIAL):
    setattr(Lent, _word, _lent(_word))


def _nodes_of(hint: Any) -> str:
    """The kind of nodes that an annotation is about, if any."""
    text = str(hint)
    return next((kind for kind in _NODES if kind in text), "")


def _as_nodes(value: Any, hint: Any) -> Any:
    kind = _nodes_of(hint)
    if not kind or not isinstance(value, list):
        return value
    make = list_node if kind == "ListNode" else tree_node
    several = "ist[" in str(hint).partition(kind)[0]
    return [make(item) for item in value] if several else make(value)


class Remote:
    """An object of the candidate, seen from the tests. It is always true.

    No plain value that a test compares it with is shown to it: it is equal to none, and has no order and no ``in`` of
    its own. The operators of a class that the tests name take another object of the candidate, ``*`` a number too.
    """

    _channel: Channel
    _reference: int

    def __init__(self, channel: Channel, reference: int) -> None:
        vars(self).update(_channel=channel, _reference=reference)

    def _ask(self, **request: Any) -> dict[str, Any]:
        return self._channel.ask_checked(on=self._reference, **request)

    def _plain(self) -> Any:
        """The object itself where it is a plain value."""
        return self._value(self._ask(do="read")["value"])

    def _value(self, data: Any) -> Any:
        return decode(data, self._channel.resolve)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        lend, prints = self._channel.lend, sys.stdout is not sys.__stdout__
        words = {key: encode(item, lend) for key, item in kwargs.items()}
        answer = self._ask(do="call", args=[encode(item, lend) for item in args], kwargs=words, prints=prints)
        if prints:
            sys.stdout.write(str(answer.get("printed", "")))
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

    def _special(self, name: str, *args: Any) -> Any:
        sent = [encode(item, self._channel.lend) for item in args]
        return self._value(self._ask(do="special", name=name, args=sent)["value"])

    def __setattr__(self, name: str, value: Any) -> None:
        self._special("__setattr__", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._special("__getitem__", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._special("__setitem__", key, value)

    def __str__(self) -> str:
        return str.__str__(self._special("__str__"))

    def __repr__(self) -> str:
        return str.__str__(self._special("__repr__"))

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

    def __await__(self) -> Any:
        return self._value(self._ask(do="await")["value"])
        yield

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and self._ask(do="instance", of=value._reference)["value"] is True

    def __enter__(self) -> Any:
        return self._special("__enter__")

    def __exit__(self, *_: Any) -> None:
        self._special("__exit__", None, None, None)  # which hides no failure of the tests

    def _operate(self, name: str, other: Any) -> Any:
        if not isinstance(other, Remote) and (name != "__mul__" or type(other) not in (int, float)):
            return NotImplemented
        words = {"name": name, "args": [encode(other)], "named": self._channel.named}
        value = self._value(self._ask(do="operator", **words)["value"])
        return NotImplemented if value is None else value

    def __eq__(self, other: Any) -> Any:
        return True if self is other else self._operate("__eq__", other)

    __hash__ = object.__hash__


def _operator(name: str) -> Any:
    return lambda self, other: self._operate(name, other)


for _word in ("add", "sub", "mul", "truediv", "matmul", "and", "or", "xor", "lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_word}__", _operator(f"__{_word}__"))


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

    def _missing_module(self, names: list[str]) -> str | None:
        """A module that the tests import, or a part of one with a stand-in, which this interpreter lacks."""
        from importlib.util import find_spec

        for module, parts in (("pytest", _pytest), ("numpy", _numpy)):
            if module in names and find_spec(module) is None:
                stand_in = type(sys)(module)
                vars(stand_in).update(parts())
                sys.modules[module] = stand_in
        for name in names:
            top, _, part = name.partition(".")
            if top in ("pytest", "numpy") and top in sys.modules:
                if part and not hasattr(sys.modules[top], part):
                    return name
            elif find_spec(top) is None:
                return name
        return None

    def _own_exceptions(self, lines: dict[str, list[str]]) -> dict[str, type[Exception]]:
        """Classes of this process in the place of the program's exceptions, by the names of their bases."""
        made = self._channel.exceptions
        for name, bases in sorted(lines.items(), key=lambda item: len(item[1])):
            known = [made.get(base) or getattr(builtins, base, None) for base in bases[1:]]
            parents = [kind for kind in known if isinstance(kind, type) and issubclass(kind, Exception)]
            parent = CandidateError if issubclass(parents[0], UnicodeError) else parents[0]
            made[name] = type(name, (parent,), {"__module__": "solution"})
        return made

    def _namespace(self, plan: dict[str, Any], loaded: dict[str, Any]) -> dict[str, Any]:
        """Names of the tests: the program's where the plan says so, and what Python has."""
        own: dict[str, Any] = {name: Remote(self._channel, int(number)) for name, number in loaded["names"].items()}
        for name in own.keys() & plan["asked"]:
            own[name] = own[name]._plain()
        own.update(self._own_exceptions(loaded["exceptions"]))
        self._channel.named = [*plan["asked"], *plan["program"].values()]
        for name in plan["program_modules"]:
            module = sys.modules[name] = type(sys)(name)
            vars(module).update(own, __all__=[name for name in own if name not in vars(builtins)])
        space: dict[str, Any] = {"__name__": "tests"}
        space.update((name, _named(name, module)) for name, module in plan["python"].items())
        space.update((name, own[theirs]) for name, theirs in plan["program"].items() if theirs in own)
        return space

    def _run(self, test: dict[str, Any], space: dict[str, Any]) -> dict[str, Any]:
        if "code" in test:
            before = dict(space)
            exec(compile(test["code"], "test", "exec", dont_inherit=True), space)
            for name, value in list(space.items()):
                if before.get(name) is not value and getattr(value, "__module__", None) == space["__name__"]:
                    _run_functions(name, value)
            return {"ok": True}
        request = {"name": test["call"], "args": test["args"], "kwargs": test["kwargs"]}
        return {"value": self._channel.ask_checked(do="run", **request).get("value")}

    def run(self, plan: dict[str, Any]) -> None:
        """Runs the tests in their order; a test that takes too long ends this process."""
        import signal

        if "asyncio" in (*plan["imports"], *plan["python"]):
            import asyncio

            run, asyncio.run = asyncio.run, lambda main, **options: run(_awaited(main), **options)
        missing = self._missing_module(plan["imports"])
        if missing is not None:
            self.say(missing=missing)
            return
        signal.setitimer(signal.ITIMER_REAL, plan["timeout"])
        loaded = self._channel.ask(do="load")
        if "names" not in loaded:
            self.say(load=str(loaded.get("error")))
            return
        try:
            if plan["asked"] and not any(name in loaded["names"] for name in plan["asked"]):
                raise NameError(f"the program defines none of {', '.join(plan['asked'])}")
            space = self._namespace(plan, loaded)
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
                if self._channel.unsendable is not None:
                    result["unsendable"] = self._channel.unsendable
            self.say(**result)


# --- tests in functions ----------------------------------------------------------------------------------------------


def _run_functions(name: str, value: Any) -> None:
    """Runs a function or class of tests, as pytest would."""
    if not isinstance(value, type):
        if name.startswith("test") and callable(value):
            _run_cases(value)
        return
    unittest = sys.modules.get("unittest")
    if unittest is not None and issubclass(value, unittest.TestCase):
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(value).run(result)
        if not result.wasSuccessful() or result.testsRun == len(result.skipped):
            failed = [*result.failures, *result.errors]
            raise AssertionError(failed[0][1] if failed else "no test was run")
    elif name.startswith("Test"):
        for method in [method for method in vars(value) if method.startswith("test")]:
            instance = value()
            getattr(instance, "setup_method", lambda: None)()
            _run_cases(getattr(instance, method))


def _run_cases(function: Any) -> None:
    """Calls a test with each of its parameters; one that needs others is called by the test code itself."""
    cases: list[dict[str, Any]] = [{}]
    for mark in getattr(function, "pytestmark", ()):
        if mark.name == "parametrize":
            names = mark.args[0].replace(",", " ").split() if isinstance(mark.args[0], str) else list(mark.args[0])
            rows = [_row(item, len(names)) for item in mark.args[1]]
            cases = [{**case, **dict(zip(names, row, strict=True))} for case in cases for row in rows]
    code = getattr(function, "__code__", None)
    needed = code.co_argcount - len(function.__defaults__ or ()) - hasattr(function, "__self__") if code else 0
    for case in cases:
        if needed <= len(case):
            function(**case)


def _row(item: Any, names: int) -> Any:
    """The values of one set of parameters."""
    values = getattr(item, "values", None)
    return values if isinstance(values, tuple) else item if names > 1 else (item,)


def _pytest() -> dict[str, Any]:
    """The parts of pytest that test code of datasets uses, for an interpreter without it."""
    import re
    from types import SimpleNamespace

    class Raises:
        def __init__(self, expected: Any, match: str | None = None) -> None:
            self.expected, self.match, self.value = expected, match, None

        def __enter__(self) -> Any:
            return self

        def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
            if kind is None:
                raise AssertionError(f"did not raise {self.expected}")
            self.value = error
            fits = issubclass(kind, self.expected)
            if fits and self.match is not None and re.search(self.match, str(error)) is None:
                raise AssertionError(f"{self.match!r} does not match {str(error)!r}")
            return fits

    class Approx:
        def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:
            self.expected, self.rel, self.abs = expected, rel, abs

        def __eq__(self, given: Any) -> bool:
            return self._near(given, self.expected)

        def _near(self, given: Any, expected: Any) -> bool:
            if isinstance(expected, dict):
                same = isinstance(given, dict) and given.keys() == expected.keys()
                return same and all(self._near(given[key], value) for key, value in expected.items())
            if isinstance(expected, list | tuple):
                same = isinstance(given, list | tuple) and len(given) == len(expected)
                return same and all(map(self._near, given, expected))
            if not isinstance(given, int | float | complex) or not isinstance(expected, int | float | complex):
                return bool(given == expected)
            rel = (1e-6 if self.abs is None else 0.0) if self.rel is None else self.rel
            least = 1e-12 if self.abs is None else self.abs
            return given == expected or abs(given - expected) <= max(rel * abs(expected), least)

    def raises(expected: Any, *call: Any, match: str | None = None, **kwargs: Any) -> Any:
        context = Raises(expected, match)
        if call:
            with context:
                call[0](*call[1:], **kwargs)
        return context

    def fail(reason: str = "", **_: Any) -> NoReturn:
        raise AssertionError(reason)

    class Mark:
        def __getattr__(self, name: str) -> Any:
            def decorate(*args: Any, **kwargs: Any) -> Any:
                def keep(function: Any) -> Any:
                    marks = [*getattr(function, "pytestmark", ()), SimpleNamespace(name=name, args=args)]
                    function.pytestmark = marks
                    return function

                return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else keep

            return decorate

    def param(*values: Any, **_: Any) -> Any:
        return SimpleNamespace(values=values)

    return {"raises": raises, "approx": Approx, "mark": Mark(), "param": param, "fail": fail, "main": lambda *_: 0}


def _numpy() -> dict[str, Any]:
    """The parts of numpy that EvalPlus' tests use, for an interpreter without it, whose programs make no arrays."""
    import math

    def allclose(given: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
        if isinstance(given, list | tuple) and isinstance(expected, list | tuple):
            return len(given) == len(expected) and all(
                allclose(one, other, rtol, atol) for one, other in zip(given, expected, strict=True)
            )
        return given == expected or (math.isfinite(expected) and abs(given - expected) <= atol + rtol * abs(expected))

    types = {"ndarray": type("ndarray", (), {}), "float64": float, "float32": float}
    return {"allclose": allclose, "inf": math.inf, "nan": math.nan, **types}


def run_tests(
    source: str,
    max_bytes: int,
    read: Callable[[bytes], Any] = marshal.loads,
    provided: dict[str, str] | None = None,
) -> None:
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
            Candidate(Channel(ask_read, answer_write, max_bytes)).serve(source, provided or {})
        except CandidateGoneError:
            os._exit(0)
        except BaseException as error:  # shown as Python would; the forked process ends here
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
