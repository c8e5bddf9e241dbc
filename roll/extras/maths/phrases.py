r"""Answers in words: what a phrase means (``no real solutions``), and when two texts are the same but for their marks.

``\text{July } 4`` is ``July 4``; nothing else of a text is changed but white space, case of words and full stops.
"""

from __future__ import annotations

import re

import sympy

from roll.extras.maths.tokens import TEXT_COMMAND
from roll.extras.maths.values import Sets, Term, Value, Word

_OF = r"(?:real|integer|integral|rational|positive|negative|such|possible|valid|complex|finite|unique)"
_THINGS = (
    r"(?:solutions?|roots?|zeros?|values?(?: of \w)?|numbers?|integers?|pairs?|triples?|primes?|functions?|answers?)"
)
_MEANINGS: tuple[tuple[str, Value], ...] = (
    (
        r"(?:(?:the|this|its) )?(?:\w+ )?(?:(?:is )?(?:undefined|not defined)|dne|d\.n\.e"
        r"|does(?: not|n't) exist)|no limit",
        Word("undefined"),
    ),
    (
        rf"(?:there (?:is|are) |has |it has |the equation has )?no (?:{_OF} )*{_THINGS}(?: exists?)?|none"
        r"|(?:the )?empty set|null set|无解|нет решений|ninguna|keine lösung(?:en)?|pas de solution",
        Sets("empty"),
    ),
    (
        rf"(?:there are )?(?:infinitely many|an? infinite(?: number of)?|infinite)(?: {_OF})?(?: {_THINGS})?|无穷多个?",
        Word("infinitely many"),
    ),
    (
        r"(?:the )?(?:set of )?(?:all|any|every) (?:reals?|real (?:numbers?|values?(?: of \w)?))"
        r"|(?:the )?(?:set of )?real numbers|全体实数",
        Sets("R"),
    ),
)
_PHRASES = tuple((re.compile(pattern), value) for pattern, value in _MEANINGS)
_WRITTEN = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_NUMBERS = _WRITTEN.split()
_TEXT_GROUP = re.compile(rf"(?:{TEXT_COMMAND})\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}")
_FORMULA = re.compile(r"(?:[A-Z][a-z]?|[()\[\]]|_?\{?\d+\}?|\^?\{?\d*[+-]\}?)+")
_CLOCK = re.compile(r"(?<=\d)\s*([ap])\.?\s?m\b\.?", re.IGNORECASE)
_CHOICE = re.compile(
    r"(?:故|应)?选(?:择)?[:：]?\s*([A-J])"
    r"|(?:(?:[Tt]he )?(?:correct )?(?:[Oo]ption|[Cc]hoice|[Aa]nswer)(?: is)?:? )?\(?([A-J])\)?\.?"
)
APPROXIMATE = re.compile(
    rf"(?:\\approx|(?:{TEXT_COMMAND}\{{\s*)?(?:approximately|approx|about|roughly|around|ca|circa|约|約|大约|大約|около)\b\.?\s*\}}?)\s*"
)
"""Before a number that is rounded."""


def plain_text(text: str) -> str:
    """The words of a normalised text, without the commands that mark them as words."""
    while match := _TEXT_GROUP.search(text):
        text = text[: match.start()] + match[1] + text[match.end() :]
    text = re.sub(r"\\([%&#_$])|\{([:.=<>+-])\}", r"\1\2", text)
    text = re.sub(r"\s*([^\w\s\\',])\s*", r"\1", text)
    text = re.sub(r"(?<=[^\d\s])\s*,\s*|\s*,\s*(?=[^\d\s])", ", ", text)
    text = _CLOCK.sub(lambda match: f" {match[1].lower()}m", text)
    text = re.sub(r"(?<=\d)(?:st|nd|rd|th)\b", "", text)
    text = " ".join(text.split()).strip().rstrip(".").strip()
    if re.search(r"[A-Z]", text) and _FORMULA.fullmatch(text):
        return re.sub(r"[_{}]", "", text)
    return re.sub(r"(?<![\\\w])(?:[^\W\d_]{3,}|^[A-Z][a-z](?!\w))", lambda match: match[0].casefold(), text)


def meaning(text: str) -> Value | None:
    """The value of a whole answer in words, where the words have one."""
    words = " ".join(text.split()).rstrip(".").strip()
    lower = words.casefold().replace("’", "'")
    for pattern, value in _PHRASES:
        if pattern.fullmatch(lower):
            return value
    return None


def choice(text: str) -> str | None:
    """The letter in ``Option (C)``; a letter alone is none."""
    match = _CHOICE.fullmatch(text.strip())
    return (match[1] or match[2]) if match and (match[1] or len(text.strip()) > 4) else None


def predicate(text: str) -> Word | None:
    """What a sentence says of its subject: "the function is even"."""
    match = _SENTENCE.fullmatch(text.strip().rstrip("."))
    return Word(match[1]) if match else None


_SENTENCE = re.compile(
    r"(?:the|this|it|its)\b(?: (?!not|no|never)[^\W\d_]+){0,3} is (?:an? |the )?(?!not|no|never)([^\W\d_]{3,})", re.I
)


def number_word(value: Value) -> Term | None:
    """The number that a word is."""
    if isinstance(value, Word) and value.text.casefold() in _NUMBERS:
        return Term(sympy.Integer(_NUMBERS.index(value.text.casefold())))
    return None
