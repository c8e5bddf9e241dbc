"""LaTeX and plain text as tokens, in one spelling."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import sympy

from roll.extras.maths.values import Digits, Term

MAX_CHARS = 500
"""Longer answers are texts."""
MAX_EXPONENT = 1200
"""Of a number in E notation: others would be written out as so many digits."""


class NotUnderstoodError(ValueError):
    """The text has a part that means nothing here."""


_CHARACTERS = {
    "−–﹣－": "-", "×✕": r"\times ", "·⋅∙": r"\cdot ", "÷": r"\div ", "≤⩽≦": r"\le ", "≥⩾≧": r"\ge ", "≠": r"\ne ",
    "≡": r"\equiv ", "∞": r"\infty ", "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ",
    "λ": r"\lambda ", "μ": r"\mu ", "ω": r"\omega ", "φ": r"\phi ", "√": r"\sqrt ", "∪": r"\cup ", "∩": r"\cap ",
    "∅": r"\emptyset ", "∈": r"\in ", "±": r"\pm ", "∓": r"\mp ", "°": "°", "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}", "⟨〈": r"\langle ", "⟩〉": r"\rangle ", "′’": "'", "≈": r"\approx ", "。": ".", "、": ",",
    "\u00a0\u2009\u202f": r"\,", "…": r"\ldots ", "→": r"\to ", "½": " 1/2", "⅓": " 1/3", "⅔": " 2/3", "¼": " 1/4",
    "¾": " 3/4", "∛": r"\sqrt[3]",
}  # fmt: skip
_TRANSLATION = str.maketrans({char: text for chars, text in _CHARACTERS.items() for char in chars})
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_THIN = r"(?:\\[,;:! ]|~|\{,\}|\\(?:thinspace|enspace)\b)"
_DECORATION = re.compile(
    r"(?<!\\)\\(?:(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|q?quad|enspace|thinspace)(?![a-zA-Z])"
    r"|[!,;: ])|~|\\(?:left|right)(?=\\)"
)
_SAME = {
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\nicefrac": r"\frac",
    r"\sfrac": r"\frac", r"\dbinom": r"\binom", r"\tbinom": r"\binom",
    r"\leq": r"\le", r"\leqslant": r"\le", r"\geq": r"\ge", r"\geqslant": r"\ge", r"\neq": r"\ne", r"\lt": "<",
    r"\gt": ">", r"\varnothing": r"\emptyset", r"\lvert": "|", r"\rvert": "|", r"\vert": "|", r"\mid": "|",
    r"\lbrace": r"\{", r"\rbrace": r"\}", r"\lbrack": "[", r"\rbrack": "]", r"\lparen": "(", r"\rparen": ")",
    r"\ast": "*", r"\setminus": r"\backslash", r"\smallsetminus": r"\backslash", r"\land": r"\text{and}",
    r"\wedge": r"\text{and}", r"\lor": r"\text{or}", r"\vee": r"\text{or}", r"\degree": r"^\circ", r"\dots": r"\ldots",
    r"\cdots": r"\ldots", r"\thickapprox": r"\approx",
    r"\simeq": r"\approx", r"\rightarrow": r"\to", r"\imath": " i", r"\jmath": " j", r"\varphi": r"\phi",
    r"\varepsilon": r"\epsilon", r"\tg": r"\tan", r"\ctg": r"\cot", r"\infin": r"\infty", r"\colon": ":",
    r"\bmod": r"\mod", r"\euro": "€", r"\pounds": "£", r"\lg": r"\log_{10}",
}  # fmt: skip
_MIXED = re.compile(r"(?<![\d/.,\w}])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d/.])")


_COLOUR = re.compile(r"\\(?:color|textcolor|colorbox)\s*(?:\[\w+\])?\s*\{[\w!#.\s]*\}")
_LOOKS = re.compile(
    r"\\(?:tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge|bf|rm|it|sf|tt|bfseries|itshape"
    r"|scriptstyle|strut|nolimits|mathstrut|nonumber|notag|hfill|therefore|centering|allowbreak|left\s*\.|right\s*\.)(?![a-zA-Z.])"
)
_STYLE = re.compile(
    r"\\(mathbf|boldsymbol|bm|pmb|mathit|mathnormal|ensuremath|underline|underbar|uline|fbox|mathop)\s*\{"
)
_CELL_SPACE = re.compile(r"(?<=\\\\)\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm|in)\s*\]")
_SYSTEM = re.compile(
    r"\\left\s*\\(?:\{|lbrace)\s*\\begin\s*\{(array|matrix|aligned)\}(?:\{[lcr|\s]*\})?(.*?)\\end\s*\{\1\}\s*\\right\s*\.",
    re.DOTALL,
)
_CHOSEN = re.compile(r"\{?\}?\s*\^\s*\{?(\d+|[a-z])\}?\s*\\?(?:mathrm\{)?C\}?_\s*\{?(\d+|[a-z])\}?")


def _plain_characters(text: str) -> str:
    """Full-width signs, digits of other scripts, raised and lowered digits as ASCII."""
    if text.isascii():
        return text
    text = re.sub(f"[{''.join(_RAISED)}]+", lambda m: f"^{{{''.join(_RAISED[char] for char in m[0])}}}", text)
    text = re.sub(f"[{''.join(_LOWERED)}]+", lambda m: f"_{{{''.join(_LOWERED[char] for char in m[0])}}}", text)
    text = re.sub(r"√\s*(\d+(?:\.\d+)?)", r"\\sqrt{\1}", text)
    wide = {char: chr(ord(char) - 0xFEE0) for char in text if "\uff01" <= char <= "\uff5e"}
    digits = {char: str(unicodedata.decimal(char)) for char in text if char.isdecimal()}
    return text.translate({ord(char): plain for char, plain in (wide | digits).items()}).translate(_TRANSLATION)


def closing(text: str, start: int) -> int:
    """Where the brace that opens before ``start`` closes; the length of the text where it does not."""
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return len(text)


def _without_style(text: str) -> str:
    """Bold, slanted, underlined and coloured parts as others; a bold letter stays what it is, a vector."""
    text = _LOOKS.sub(" ", _COLOUR.sub(" ", text))
    at = 0
    while match := _STYLE.search(text, at):
        end = closing(text, match.end())
        content = text[match.end() : end].strip()
        name = re.fullmatch(r"\\?[a-zA-Z]", content) or re.fullmatch(r"\\(?!pi\b|infty\b)[a-zA-Z]+|[ijk]", content)
        at = match.start()
        if name and match[1] not in ("underline", "underbar", "uline", "fbox", "mathop", "mathnormal", "mathit"):
            at = end
        elif re.fullmatch(r"[^\W\d_]{2,}(?:[\s-]+[^\W\d_]+)*", content):
            text = f"{text[:at]}\\text{{{content}}}{text[end + 1 :]}"
        elif at == 0 and end == len(text) - 1:
            text = content
        else:
            text = f"{text[:at]} {{{content}}}{text[end + 1 :]}"
    return text


def _prefixed(text: str) -> str:
    r"""``{a \over b}`` as ``\frac{a}{b}``, ``{n \choose k}`` as ``\binom{n}{k}``."""
    while match := re.search(r"\\(over|choose)(?![a-zA-Z])", text):
        end = closing(text, match.end())
        starts = [i.start() for i in re.finditer(r"(?<!\\)\{", text[: match.start()]) if closing(text, i.end()) == end]
        start = starts[-1] + 1 if starts and end < len(text) else 0
        command = "frac" if match[1] == "over" else "binom"
        above, below = text[start : match.start()].strip(), text[match.end() : end].strip()
        text = f"{text[:start]}\\{command}{{{above}}}{{{below}}}{text[end:]}"
    return text


def normalise(text: str) -> str:
    """The text without what only changes its looks: spacing commands, sizes, dollar signs, other names of a sign."""
    text = _plain_characters(text).strip()
    if "\\" in text:
        text = _SYSTEM.sub(r"\\begin{cases}\2\\end{cases}", text)
        text = _CELL_SPACE.sub("", text)
        text = _prefixed(_without_style(text))
        text = re.sub(r"\\(?:mathrm|text)\s*\{\s*([ie])\s*\}", r" \1 ", text)
        text = re.sub(r"\\mathrm\s+([ie])(?![a-zA-Z])", r" \1 ", text)
        text = re.sub(
            r"\\frac\s*\{\\(?:text|mathrm)\s*\{([^{}]*)\}\}\s*\{\\(?:text|mathrm)\s*\{([^{}]*)\}\}",
            r"\\text{\1/\2}",
            text,
        )
    text = re.sub(r"(?<=\d) x (?=\$?\d)", r" \\times ", text)
    text = _CHOSEN.sub(r"\\binom{\1}{\2}", text)
    text = re.sub(r"(\d),\\!(?=\d)", r"\1,", text)
    text = re.sub(rf"(?<![\d.,])\d{{1,3}}(?:{_THIN}\d{{3}})+(?![\d])", lambda m: re.sub(_THIN, "", m[0]), text)
    text = re.sub(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d,/])", lambda m: m[0].replace(" ", ""), text)
    text = re.sub(r"(\d)\{,\}(?=\d)", r"\1.", text)
    text = re.sub(r"\\(?:hspace|vspace|phantom|label)\*?\{[^{}]*\}", " ", text)
    text = _DECORATION.sub(" ", text)
    text = re.sub(r"\\[a-zA-Z]+", lambda m: _SAME.get(m[0], m[0]), text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"(?<!\\)\$(?!\d+(?:[.,]\d+)*$)|\\[()\[\]](?<!\\\\[()\[\]])", " ", text)
    text = text.strip().rstrip(".").strip() if not text.rstrip().endswith("..") else text
    return " ".join(text.split())


class Token(NamedTuple):
    kind: str
    """number, digits, letter, word (letters without a mark), text (marked as such), name (a vector), sign, end."""
    text: str
    spaced: bool = False
    """White space before it."""
    value: Any = None


TEXT_COMMAND = r"\\(?:text(?:rm|bf|it|normal|sf|tt)?|mbox|hbox|mathrm|mathsf|mathtt|mathit|operatorname\*?|textup)\s*"
_VECTOR_COMMAND = r"\\(?:mathbf|vec|boldsymbol|bm|overrightarrow|hat|widehat|overline|bar|widetilde|tilde|dot|ddot)\s*"
_NAME = r"(?:(?:[a-zA-Z]+|\\[a-zA-Z]+)\s*|\{\s*(?:[a-zA-Z]+|\\[a-zA-Z]+)\s*\}\s*)"
_TOKEN = re.compile(
    rf"""(?P<space>\s+)
    |(?P<repeating>(?P<lead>\d*\.\d*)(?:\\(?:overline|bar)\s*\{{(?P<period>\d+)\}}|\((?P<period2>\d+)\)
        |\\dot\s*\{{?(?P<first>\d)\}}?(?:(?P<middle>\d*)\\dot\s*\{{?(?P<last>\d)\}}?)?))
    |(?P<digits>\d[\dA-F]*_(?:\{{(?P<base>[^{{}}]*(?:\{{[^{{}}]*\}})?[^{{}}]*)\}}|(?P<base1>\d)))
    |\((?P<digits2>\d[\dA-F]*)\)_(?:\{{(?P<base2>[^{{}}]*(?:\{{[^{{}}]*\}})?[^{{}}]*)\}}|(?P<base3>\d))
    |(?P<number>\d+(?:,\d{{3}})*(?:\.\d+)?(?:[eE][+-]?\d+(?![\d.a-zA-Z\\^({{]))?|\d+\.(?!\d)|\.\d+)
    |(?P<text>{TEXT_COMMAND}\{{(?P<said>(?:[^{{}}]|\\[{{}}]|\{{[^{{}}]*\}})*)\}})
    |(?P<name>{_VECTOR_COMMAND}(?:\{{\s*{_VECTOR_COMMAND}{_NAME}\}}|{_VECTOR_COMMAND}{_NAME}|{_NAME}))
    |(?P<begin>\\begin\s*\{{(?P<env>[a-zA-Z]+)\}}(?:\{{[clr|\s]*\}})?)
    |(?P<finish>\\end\s*\{{(?P<env2>[a-zA-Z]+)\}})
    |(?P<set>\\mathbb\s*\{{?(?P<set_name>[A-Z])\}}?(?:\^(?P<set_sign>[+*])|\^\{{(?P<set_sign2>[+*])\}})?)
    |(?P<command>\\(?:[a-zA-Z]+|.))
    |(?P<word>(?:[^\W\d_]|[\u0900-\u0dff\u0e00-\u0e7f])+)
    |(?P<sign><=|>=|!=|==|.)""",
    re.VERBOSE | re.DOTALL,
)
_NAMES_OF_BASES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11,
    "twelve": 12, "sixteen": 16,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sin": sympy.sin, "cos": sympy.cos, "tan": sympy.tan, "cot": sympy.cot, "sec": sympy.sec, "csc": sympy.csc,
    "arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan, "arccot": sympy.acot, "sinh": sympy.sinh,
    "cosh": sympy.cosh, "tanh": sympy.tanh, "ln": sympy.log, "exp": sympy.exp, "log": sympy.log, "max": sympy.Max,
    "min": sympy.Min, "gcd": sympy.gcd, "lcm": sympy.lcm,
}  # fmt: skip
TRIGONOMETRY = {"sin", "cos", "tan", "cot", "sec", "csc"}
INVERSE = {name: FUNCTIONS[f"arc{name}"] for name in ("sin", "cos", "tan", "cot")}
PLAIN = FUNCTIONS.keys() | {"sqrt", "pi", "infty", "theta", "alpha", "beta", "gamma", "lambda", "frac", "binom"}
CONSTANTS = {"pi": sympy.pi, "infty": sympy.oo}
_GREEK_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar"
)
GREEK = frozenset(_GREEK_NAMES.split())
_SPOKEN = {
    "mod": r"\mod",
    "union": r"\cup",
    "percent": r"\%",
    "percentage": r"\%",
    "degrees": "°",
    "degree": "°",
    "%": r"\%",
    r"\%": r"\%",
    "°": "°",
}
INFINITY = {"infinity", "inf", "oo"}


def tokens_of(text: str) -> list[Token]:
    found: list[Token] = []
    spaced = False
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        # The last group that matched may be an inner one.
        kind = next(name for name in _KINDS if match[name] is not None)
        if kind == "space":
            spaced = True
            continue
        found.extend(token._replace(spaced=spaced) for token in _token(kind, match))
        spaced = False
    found.append(Token("end", ""))
    for index, token in enumerate(found[:-1]):
        if token[:2] == ("sign", r"\min") and found[index + 1].text not in ("(", "{", "_", r"\{"):
            found[index] = Token("word", "min", token.spaced)
    return found


_KINDS = (
    "space", "repeating", "digits", "digits2", "number", "text", "name", "begin", "finish", "set", "command", "word",
    "sign",
)  # fmt: skip


def _token(kind: str, match: re.Match[str]) -> Iterable[Token]:
    if kind == "repeating":
        yield Token("number", match[0], value=Term(_repeating(match)))
    elif kind in ("digits", "digits2"):
        digits = match["digits2"] if kind == "digits2" else match[0].partition("_")[0]
        yield Token("digits", match[0], value=Digits(digits, _base_of(match)))
    elif kind == "number":
        yield number_token(match[0])
    elif kind == "text":
        yield from _said(match["said"].strip())
    elif kind == "name":
        named = re.findall(r"[a-zA-Z]+", match[0])[-1]
        yield Token("name", named, value=_decorated(match[0], named))
    elif kind in ("begin", "finish"):
        yield Token(kind, match["env"] or match["env2"])
    elif kind == "set":
        yield Token("set", match["set_name"] + (match["set_sign"] or match["set_sign2"] or ""))
    elif kind == "word" and match[0] not in PLAIN:
        yield from _letters(match[0])
    else:
        yield Token("sign", match[0] if kind != "word" else f"\\{match[0]}")


def _letters(word: str) -> Iterable[Token]:
    if word in ("and", "or"):
        yield Token("joint", word)
    elif word.lower() in INFINITY:
        yield Token("sign", r"\infty")
    elif word in _SPOKEN:
        yield Token("sign", _SPOKEN[word])
    else:
        yield Token("letter" if len(word) == 1 and word.isascii() else "word", word)


def _said(text: str) -> Iterable[Token]:
    plain = text.strip(" .").lower()
    if plain.strip(", ") in ("and", "or"):
        yield Token("joint", plain.strip(", "))
    elif plain in (",", ";"):
        yield Token("sign", plain)
    elif plain in PLAIN:
        yield Token("sign", f"\\{plain}")
    elif plain in _SPOKEN or plain in INFINITY:
        yield Token("sign", _SPOKEN.get(plain, r"\infty"))
    elif len(text) == 1 and text.isalpha():
        yield Token("letter", text, value="marked")
    elif text:
        yield Token("text", text)


def number_token(text: str) -> Token:
    plain = text.replace(",", "").rstrip(".")
    mantissa, *exponent = re.split("[eE]", plain)
    if exponent and (len(exponent[0]) > 6 or abs(int(exponent[0])) > MAX_EXPONENT):
        raise NotUnderstoodError(f"an exponent beyond {MAX_EXPONENT}")
    value = sympy.Rational(plain) if len(plain) <= MAX_CHARS else None
    return Token("number", text, value=Term(value, decimals=len(mantissa.partition(".")[2])))


def _repeating(match: re.Match[str]) -> Any:
    whole, _, fixed = match["lead"].partition(".")
    period = match["period"] or match["period2"]
    if period is None:
        period = match["first"] + (match["middle"] or "") + (match["last"] or "")
    head = sympy.Rational(int((whole + fixed) or "0"), 10 ** len(fixed))
    return head + sympy.Rational(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))


def _base_of(match: re.Match[str]) -> int:
    named = next(match[name] for name in ("base", "base1", "base2", "base3") if match[name] is not None)
    word = re.sub(r"\\[a-zA-Z]+|[{}()\s]|base", "", named).lower()
    base = _NAMES_OF_BASES.get(word) or (int(word) if word.isdigit() else 0)
    digits = match["digits2"] or match[0].partition("_")[0]
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in digits):
        raise NotUnderstoodError(match[0])
    return base


def _decorated(command: str, name: str) -> Any:
    """A letter with an arrow, a hat, a bar; bold letters and those with an arrow are the same vector."""
    bold = re.search(r"mathbf|vec|boldsymbol|bm|overrightarrow", command) or (name in "ijk" and "hat" in command)
    mark = "vec" if bold else re.findall(r"\\([a-z]+)", command)[0].replace("overline", "bar").replace("wide", "")
    return sympy.Symbol(f"{mark} {name}", commutative=True)
