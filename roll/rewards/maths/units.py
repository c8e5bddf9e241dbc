"""Units behind numbers: one spelling for each, so that ``5 metres`` is ``5 m`` and not ``5 cm``."""

from __future__ import annotations

import re

CURRENCIES = {r"\$": "dollar", "$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee"}
MULTIPLIERS = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}

_SPELLINGS = {
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "dm": "decimeter decimetre",
    "m": "meter metre",
    "km": "kilometer kilometre kms",
    "mi": "mile",
    "ft": "foot feet",
    "in": "inch inches",
    "yd": "yard",
    "mg": "milligram",
    "g": "gram gm",
    "kg": "kilogram kgs kilo",
    "lb": "lbs",
    "oz": "ounce",
    "ml": "milliliter millilitre mL",
    "L": "l liter litre",
    "s": "second sec secs",
    "min": "minute mins",
    "h": "hour hr hrs",
    "day": "",
    "week": "wk",
    "month": "",
    "year": "yr yrs",
    "mph": "",
    "kmh": "kph",
    "unit": "",
    "dollar": "USD",
    "cent": "¢",
    "°": "degree deg",
    "°C": "celsius",
    "°F": "fahrenheit",
    "rad": "radian",
    "Hz": "hertz",
    "N": "newton",
    "J": "joule",
    "W": "watt",
    "V": "volt",
    "ohm": "",
    "Pa": "pascal",
    "mol": "mole",
}
_CANONICAL = {spelling: unit for unit, others in _SPELLINGS.items() for spelling in (unit, *others.split())}
_NO_UNIT_WORDS = (
    "or and more less not than at least most no if to from over under plus minus between about but below above short "
    "left squared cubed mod modulo base"
)
_SI = frozenset(["", "g", "m", "l", "L", "s", "A", "V", "W", "J", "N", "Hz", "Pa"])
"""With these the prefix M is mega, m is milli."""
_NO_UNITS = frozenset(_NO_UNIT_WORDS.split())
_POWERS = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
_WORD = re.compile(r"/|°?[^\W\d_]*\.?(?:\^-?\d+)?|\w+-\w+|[¢']")
MAX_WORDS = 5


def is_unit(word: str) -> bool:
    """Tells whether bare letters behind a number are a unit, not a product of variables."""
    return len(word) > 1 and (word in _CANONICAL or word.removesuffix("s") in _CANONICAL)


def canonical_unit(text: str) -> str | None:
    """The unit in one spelling; ``None`` where the words change the number (``or more``) or are no unit at all.

    >>> canonical_unit("square meters per hour")
    'm^2/h'
    """
    text = re.sub(r"\\(?:text|mathrm)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\s*\^\s*\{?(-?\d+)\}?", r"^\1", text.replace("\\circ", "°"))
    text = re.sub(r"\s+per\s+|\s*/\s*", " / ", text)
    words = text.strip(" .").split()
    if not words or len(words) > MAX_WORDS:
        return None
    if any(word.lower() in _NO_UNITS or not _WORD.fullmatch(word) for word in words):
        return None
    if words[0].lower() in MULTIPLIERS:
        return " ".join([words[0].lower(), *_canonical_words(words[1:])])
    return " ".join(_canonical_words(words)).replace(" / ", "/")


def _canonical_words(words: list[str]) -> list[str]:
    power, found = "", []
    for word in words:
        if word.lower() in _POWERS:
            power = _POWERS[word.lower()]
            continue
        base, _, exponent = word.partition("^")
        found.append(_canonical_word(base) + power + (f"^{exponent}" if exponent else ""))
        power = ""
    return found


def _canonical_word(word: str) -> str:
    if word[:1] == "M" and word[1:] in _SI:
        return word
    for spelling in (word, word.lower()):
        for candidate in (spelling, spelling.removesuffix("s")):
            if candidate in _CANONICAL:
                return _CANONICAL[candidate]
    lower = word.lower()
    return lower.removesuffix("s") if len(lower) > 3 else lower
