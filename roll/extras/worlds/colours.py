"""Colours of a terminal, told in words: what an environment shows by colour alone is part of its text."""

from __future__ import annotations

import re

_STYLE = re.compile(r"\x1b\[([0-9;]*)m")
_OTHER_CODE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_NAMES = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_LAYERS = {3: ("text", ""), 4: ("ground", ""), 9: ("text", "bright "), 10: ("ground", "bright ")}


def tell_colours(text: str) -> str:
    """Writes coloured parts of a terminal's text as ``[red:S]``, each on its line; other codes are left out.

    Letters of one colour on a ground of another are ``[blue on yellow:S]``. White space counts only with a ground.
    """
    plain, *rest = _STYLE.split(text)
    told = [plain]
    colours: dict[str, str] = {}
    for codes, part in zip(rest[::2], rest[1::2], strict=True):
        _apply(colours, codes)
        colour = " on ".join(colours[layer] for layer in ("text", "ground") if layer in colours)
        told.append("\n".join(_marked(line, colour, "ground" in colours) for line in part.split("\n")))
    return _OTHER_CODE.sub("", "".join(told))


def _marked(line: str, colour: str, has_ground: bool) -> str:
    visible = bool(line) if has_ground else bool(line.strip())
    return f"[{colour}:{line}]" if colour and visible else line


def _apply(colours: dict[str, str], codes: str) -> None:
    """Notes what the numbers of one code change in the colours of ``text`` and ``ground``."""
    numbers = iter([int(number or 0) for number in codes.split(";")])
    for number in numbers:
        tens, digit = divmod(number, 10)
        layer, shade = _LAYERS.get(tens, ("", ""))
        if number == 0:
            colours.clear()
        elif not layer:  # bold, underlined and the like
            continue
        elif digit < len(_NAMES):
            colours[layer] = shade + _NAMES[digit]
        elif digit == 8:  # one of 256 colours, or red, green and blue
            length = 3 if next(numbers, 0) == 2 else 1
            colours[layer] = f"colour {' '.join(str(next(numbers, 0)) for _ in range(length))}"
        else:
            colours.pop(layer, None)
