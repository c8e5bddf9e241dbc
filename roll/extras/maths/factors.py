"""Factors of a mathematical answer: numbers, letters, groups, functions, matrices, with powers and other suffixes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, NoReturn, TypeVar

import sympy

from roll.extras.maths import operations
from roll.extras.maths.tokens import (
    CONSTANTS,
    FUNCTIONS,
    GREEK,
    NotUnderstoodError,
    Token,
    number_token,
)
from roll.extras.maths.units import is_unit
from roll.extras.maths.values import (
    DEGREE,
    PERCENT,
    PLUS_MINUS,
    Group,
    Relation,
    Sets,
    Term,
    Value,
    Word,
)

_OPENING = {"(": ")", "[": "]", "]": "[", r"\{": r"\}", r"\langle": r"\rangle"}
_CLOSING = {"(": (")", "]"), "[": (")", "]", "["), "]": ("[", "]")}
"""``[0,1[`` and ``]0,1]`` are intervals too, as they are written in France."""
_MATRICES = {"pmatrix": "matrix", "bmatrix": "matrix", "matrix": "matrix", "smallmatrix": "matrix", "Bmatrix": "matrix",
             "array": "matrix", "vmatrix": "det"}  # fmt: skip
_MAX_DEPTHS = {"atom": 24, "root": 10, "function": 5}
"""Most that may stand in one another: of anything, of roots, of functions and exponents. What SymPy needs for a term
grows exponentially with it."""
_SYSTEMS = ("cases", "dcases", "rcases", "aligned")
_WHEN = ("if", "for", "when", "where")
_FUNCTION_NAMES = set("fgh")
_POSSIBLE_NAMES = set("FGHPQpq")
_STARTS = {"(", r"\frac", r"\sqrt", r"\binom", r"\pi", r"\infty", r"\lfloor", r"\lceil"} | {
    f"\\{name}" for name in FUNCTIONS
}


T = TypeVar("T")


class Factors(ABC):
    """Recursive descent, the inner half: each method reads one level of the grammar and leaves what follows."""

    def __init__(self, tokens: list[Token], known: Collection[str] | None = ()) -> None:
        self._tokens = tokens
        self._known = known
        self._at = 0
        self._depths = dict.fromkeys(_MAX_DEPTHS, 0)
        self._bars = 0
        """Open ``|`` (an absolute value, the condition of a set): the next one in a product closes."""

    # --- tokens

    @property
    def _next(self) -> Token:
        return self._tokens[self._at]

    def _take(self) -> Token:
        token = self._next
        self._at += 1
        return token

    def _is(self, *signs: str) -> bool:
        return self._next.kind == "sign" and self._next.text in signs

    def _accept(self, *signs: str) -> Token | None:
        return self._take() if self._is(*signs) else None

    def _expect(self, *signs: str) -> Token:
        return self._accept(*signs) or self._fail()

    def _fail(self) -> NoReturn:
        raise NotUnderstoodError(f"{self._next.text!r} at token {self._at}")

    # --- what stands in groups

    @abstractmethod
    def enumeration(self) -> Value:
        """Values between commas or conjunctions."""

    @abstractmethod
    def relation(self) -> Value:
        """A chain of relations, or a value."""

    @abstractmethod
    def sum(self) -> Value:
        """Terms with signs between them."""

    @abstractmethod
    def _measures(self, token: Token) -> bool:
        """Tells whether the next letter is a unit."""

    # --- factors

    def factor(self) -> Value:
        value = self.atom()
        raised = hundredths = False
        while True:
            if self._accept("°") or self._degree():
                value = Term(self._scalar(value) * DEGREE)
            elif not raised and self._accept("^"):  # 2^3^2 is written for both orders
                raised = True
                value = Term(
                    operations.power(self._term(value).expr, self._scalar(self._within("function", self._argument)))
                )
            elif self._accept("!"):
                double = self._accept("!") is not None
                if self._is("!"):
                    self._fail()
                value = Term(operations.factorial(self._scalar(value), double))
            elif not hundredths and self._accept(r"\%", "%"):
                hundredths = True
                value = Term(self._scalar(value) * PERCENT, self._term(value).decimals)
            else:
                return value

    def _degree(self) -> bool:
        """Reads ``^\\circ`` or ``^{\\circ}``, where it is one."""
        if not self._is("^"):
            return False
        after = [token.text for token in self._tokens[self._at + 1 : self._at + 4]]
        length = 2 if after[:1] == [r"\circ"] else 4 if after == ["{", r"\circ", "}"] else 0
        self._at += length
        return length > 0

    # --- atoms

    def _within(self, kind: str, read: Callable[[], T]) -> T:
        """What is read one level deeper."""
        self._depths[kind] += 1
        if self._depths[kind] > _MAX_DEPTHS[kind]:
            self._fail()
        value = read()
        self._depths[kind] -= 1
        return value

    def atom(self) -> Value:
        return self._within("atom", self._atom)

    def _atom(self) -> Value:
        token = self._take()
        if token.kind == "number":
            value: Term = token.value
            return self._mixed(value) if value.decimals == 0 and token.text.isdigit() else value
        if token.kind in ("digits",):
            return token.value  # type: ignore[no-any-return]
        if token.kind == "letter":
            return self._letter(token.text)
        if token.kind == "word":
            return self._word(token.text)
        if token.kind == "text":
            return self._word(token.text, product=False)
        if token.kind == "name":
            return Term(self._subscripted(token.value))
        if token.kind == "set":
            return Sets(token.text)
        if token.kind == "begin":
            return self._matrix(token.text)
        if token.kind == "sign":
            return self._signs(token.text)
        self._at -= 1
        return self._fail()

    def _signs(self, sign: str) -> Value:
        name = sign.removeprefix("\\")
        if sign in _OPENING:
            return self._brackets(sign)
        if sign == "{" or sign == r"\boxed":
            self._at -= sign == "{"
            self._expect("{")
            value = self.enumeration()
            self._expect("}")
            return value
        if sign == "|":
            return Term(sympy.Abs(self._inside("|")))
        if sign in (r"\lfloor", r"\lceil"):
            kind = sympy.floor if sign == r"\lfloor" else sympy.ceiling
            return Term(kind(self._inside(sign.replace("l", "r", 1))))
        if sign == r"\emptyset":
            return Sets("empty")
        if sign == r"\frac":
            above, below = self._scalar(self._argument()), self._scalar(self._argument())
            return Term(operations.quotient(above, below))
        if sign == r"\binom":
            return Term(operations.binomial(self._scalar(self._argument()), self._scalar(self._argument())))
        if sign == r"\sqrt":
            return self._within("root", self._root)
        if name in FUNCTIONS and sign.startswith("\\"):
            return self._function(name)
        if name in CONSTANTS and sign.startswith("\\"):
            return Term(CONSTANTS[name])
        if name in GREEK and sign.startswith("\\"):
            return Term(self._subscripted(sympy.Symbol(name)))
        self._at -= 1
        return self._fail()

    def _inside(self, closing: str) -> Any:
        self._bars += closing == "|"
        expr = self._scalar(self.sum())
        self._bars -= closing == "|"
        self._expect(closing)
        return expr

    def _mixed(self, whole: Term) -> Value:
        r"""``1\frac{1}{2}`` is 3/2: a number, then at once a proper fraction of two numbers."""
        ahead = self._tokens[self._at : self._at + 7]
        if len(ahead) < 3 or ahead[0][:2] != ("sign", r"\frac"):
            return whole
        start = self._at
        self._take()
        above, below = self._argument(), self._argument()
        if all(isinstance(part, Term) and part.expr.is_Integer and part.expr > 0 for part in (above, below)):
            return Term(whole.expr + self._scalar(above) / self._scalar(below))
        self._at = start
        return whole

    def _letter(self, letter: str) -> Value:
        while self._is("'"):
            letter += self._take().text
        if letter == "e" and not self._is("_"):
            return Term(sympy.E)
        if letter == "i" and not self._is("_"):
            return Term(sympy.I)
        name = self._subscripted(sympy.Symbol(letter))
        inverse = self._tokens[self._at : self._at + 6]
        if letter[0] in _FUNCTION_NAMES and [t.text for t in inverse] == ["^", "{", "-", "1", "}", "("]:
            self._at += 5
            name = sympy.Symbol(f"{name}^-1")
        if self._is("(") and not self._next.spaced and letter[0] in _FUNCTION_NAMES | _POSSIBLE_NAMES:
            start = self._at
            self._take()
            value = self._brackets("(")
            items = value.items if isinstance(value, Group) else (value,)
            if all(isinstance(item, Term) for item in items):
                exprs = [self._scalar(item) for item in items]
                plain = all(expr.is_Symbol or expr.is_Number for expr in exprs)
                if letter[0] in _FUNCTION_NAMES or plain:
                    return Term(sympy.Function(str(name))(*exprs))
            self._at = start
        return Term(name)

    def _subscripted(self, symbol: Any) -> Any:
        if not self._accept("_"):
            return symbol
        if self._accept("{"):
            parts: list[str] = []
            while not self._is("}"):
                token = self._take()
                if token.kind == "end" or token.text == "{":
                    self._fail()
                parts.append(token.text)
            self._take()
        else:
            token = self._take()
            parts = [token.text]
            if token.kind == "word" and len(token.text) == 2 and token.text.islower():  # TeX takes one letter
                parts = [token.text[0]]
                self._tokens.insert(self._at, Token("letter", token.text[1]))
        return sympy.Symbol(f"{symbol}_{''.join(parts)}", commutative=symbol.is_commutative)

    def _word(self, text: str, product: bool = True) -> Value:
        """Letters side by side: the order counts where they are all, the product is meant where they are a factor."""
        letters, start = None, self._at
        if product and len(text) <= 3 and len(set(text)) == len(text):
            self._tokens[self._at : self._at] = [Token("letter", letter) for letter in text]
            parts = [self._term(self.factor()).expr for _ in text]
            letters = Term(sympy.Mul(*parts))
            if self._at > start + len(text):  # more than the word: a subscript, a power
                return letters
        return Word(" ".join(text.split()), letters)

    def _brackets(self, opening: str) -> Value:
        closings = _CLOSING.get(opening) or (_OPENING[opening],)
        bars, self._bars = self._bars, int(opening == r"\{")
        if opening == r"\{" and self._accept(r"\}"):
            self._bars = bars
            return Sets("empty")
        value = self.enumeration()
        if opening == r"\{" and self._accept("|", ":"):
            value = self._builder(value)
        closing = self._expect(*closings).text
        self._bars = bars
        items = value.items if isinstance(value, Group) and not value.brackets else (value,)
        if opening == r"\{":
            return value if isinstance(value, Relation) else Group(items, "{}")
        if opening == r"\langle":
            return Group(items, "<>")
        if opening == "]" or closing == "[":
            opening, closing = opening.replace("]", "("), closing.replace("[", ")")
            return Group(items, opening + closing) if len(items) == 2 else self._fail()
        if len(items) == 1:
            if isinstance(value, Group) and value.brackets and closing == ")":
                return Group((value,), "()")
            return value if (opening, closing) in (("(", ")"), ("[", "]")) else self._fail()
        return Group(items, opening + closing)

    def _builder(self, value: Value) -> Value:
        """``{x | x > 0}`` is its condition."""
        self._bars = 0
        condition = self.relation()
        if isinstance(value, Relation) and value.signs == ("in",) and value.sides[1] == Sets("R"):
            value = value.sides[0] or self._fail()
        if isinstance(condition, Relation) and isinstance(value, Term) and value.expr.is_Symbol:
            return condition
        return self._fail()

    def _cases(self, environment: str) -> Value:
        """Equations that hold together, or values with their conditions: pairs in any order."""
        rows: list[Value] = []
        while True:
            row = self.relation()
            self._accept(",")
            parted = self._accept("&") is not None
            if self._next.kind == "text" and self._next.text.lower().strip(" ,:") in _WHEN:
                self._take()
                parted = True
            if parted:
                row = Group((row, self.relation()), "()")
            self._accept(",", ".", ";")
            rows.append(row)
            if not self._accept("\\\\") or self._next.kind == "finish":
                break
        if self._take()[:2] != ("finish", environment):
            self._at -= 1
            self._fail()
        if all(isinstance(row, Group) for row in rows):
            return Group(tuple(rows), "{}")
        return Group(tuple(rows), joined="and") if all(isinstance(row, Relation) for row in rows) else self._fail()

    def _matrix(self, environment: str) -> Value:
        if environment in _SYSTEMS:
            return self._cases(environment)
        kind = _MATRICES.get(environment) or self._fail()
        rows: list[list[Any]] = [[]]
        while True:
            rows[-1].append(self._scalar(self.sum()))
            if self._accept("&"):
                continue
            if self._accept("\\\\"):
                if self._next.kind == "finish":
                    break
                rows.append([])
                continue
            break
        if self._take()[:2] != ("finish", environment) or len({len(row) for row in rows}) != 1:
            self._at -= 1
            self._fail()
        matrix = sympy.ImmutableMatrix(rows)
        if kind == "det":
            return Term(operations.determinant(matrix))
        return Term(matrix)

    def _root(self) -> Value:
        degree = sympy.Integer(2)
        if self._accept("["):
            degree = self._scalar(self.sum())
            self._expect("]")
        return Term(operations.root(self._scalar(self._argument()), degree))

    def _function(self, name: str) -> Value:
        base = power = None
        while self._is("_", "^"):
            if self._take().text == "_" and name == "log" and base is None:
                base = self._scalar(self._within("function", self._argument))
            elif self._tokens[self._at - 1].text == "^" and power is None:
                power = self._scalar(self._within("function", self._argument))
            else:
                self._fail()
        args = self._within("function", self._function_arguments)
        return Term(operations.apply(name, args, base, power))

    def _function_arguments(self) -> list[Any]:
        if self._accept("("):
            value = self._brackets("(")
            items = value.items if isinstance(value, Group) and value.brackets == "()" else (value,)
            return [self._scalar(item) for item in items]
        sign = self._accept("-")
        value = self.factor()
        while self._starts_factor() and not self._starts_function():
            value = Term(self._times(value, self.factor()))
        return [self._scalar(self._signed(sign, value))]

    def _starts_function(self) -> bool:
        return self._is("(", "[", "|") or (
            self._next.kind == "sign" and self._next.text.removeprefix("\\") in FUNCTIONS
        )

    def _argument(self) -> Value:
        r"""Argument of a command or a ``^``: a group, or one digit, letter or command."""
        if self._accept("{"):
            bars, self._bars = self._bars, 0
            value = self.sum()
            self._bars = bars
            self._expect("}")
            return value
        token = self._next
        if token.kind == "number" and len(token.text) > 1:
            # TeX takes one digit.
            head, rest = token.text[0], token.text[1:]
            if not token.text.isdigit():
                self._fail()
            self._tokens[self._at : self._at + 1] = [number_token(head), number_token(rest)]
        elif token.kind == "word":
            self._tokens[self._at : self._at + 1] = [Token("letter", letter) for letter in token.text]
        elif self._is("-"):
            self._take()
            return self._signed(Token("sign", "-"), self._argument())
        if self._next.kind == "number":
            return self._take().value  # type: ignore[no-any-return]
        return self.atom()

    # --- side by side

    def _signed(self, sign: Token | None, value: Value) -> Term:
        term = self._term(value)
        factor = {"-": sympy.Integer(-1), r"\pm": PLUS_MINUS, r"\mp": -PLUS_MINUS}.get(sign.text if sign else "+", 1)
        return term if factor == 1 else Term(factor * term.expr, term.decimals)

    def _times(self, one: Value, other: Value, sign: str = "") -> Any:
        left, right = self._term(one).expr, self._term(other).expr
        if isinstance(left, sympy.MatrixBase) and isinstance(right, sympy.MatrixBase):
            self._fail()
        if operations.is_vector(left) and operations.is_vector(right):
            return operations.dot(left, right) if sign == r"\cdot" else self._fail()
        return left * right

    def _starts_factor(self) -> bool:
        """Tells whether a factor follows without a sign. A number does behind ``!`` only: ``3 5`` means nothing."""
        token = self._next
        if token.kind == "number":
            return self._tokens[self._at - 1][:2] == ("sign", "!")
        if token.kind == "word":
            return not names_unit(token) and not (token.spaced and len(token.text) > 3)
        if token.kind == "letter" and self._measures(token):
            return False
        if token.kind in ("letter", "name"):
            return token.value != "marked"
        if token.kind == "begin":
            return True
        if self._is("|"):
            return not self._bars
        if self._is("(") and self._tokens[self._at + 1][:2] == ("sign", r"\mod"):
            return False
        return token.kind == "sign" and (token.text in _STARTS or token.text.lstrip("\\") in GREEK)

    # --- kinds

    def _term(self, value: Value) -> Term:
        if isinstance(value, Word) and value.product is not None:
            return value.product  # type: ignore[no-any-return]
        return value if isinstance(value, Term) and value.expr is not None else self._fail()

    def _scalar(self, value: Value) -> Any:
        expr = self._term(value).expr
        return self._fail() if isinstance(expr, sympy.MatrixBase) else expr


def names_unit(token: Token) -> bool:
    return is_unit(token.text) or not token.text.isascii() or (token.spaced and len(token.text) > 3)
