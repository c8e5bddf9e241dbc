"""``roll`` as a user calls it, in this process."""

from typing import Any

from roll.__main__ import main


def call(capsys: Any, *words: object, code: int = 0) -> tuple[str, str]:
    """What a command that ends with ``code`` writes to its output and to the terminal."""
    capsys.readouterr()
    try:
        ended = main([*map(str, words)])
    except SystemExit as early:
        ended = int(early.code or 0)
    out, err = capsys.readouterr()
    assert ended == code, err
    return out, err


def refused(capsys: Any, *words: object) -> str:
    """What a command says that cannot do what it is asked for, as one line."""
    _, err = call(capsys, *words, code=2)
    return " ".join(err.split())
