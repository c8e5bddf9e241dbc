"""Writes the values that verl's keys have where they are not given, ``roll/extras/importers/tables/*_defaults.tsv``.

``python scripts/generate_import_defaults.py 0.7.0=/tmp/verl-0.7.0 0.9.1=/tmp/verl-0.9.1``: releases, each an unpacked
source distribution (``pip download --no-deps --no-binary verl verl==0.9.1``). Keys of all of these releases that the
importer drops whatever they say have no line.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from roll.extras.importers.common import leaves
from roll.extras.importers.recognise import pictures_in
from roll.extras.importers.table import DROP, FOLDER, find, yaml_text

CONFIGS = "verl/trainer/config"
WHOLE = {"verl": ("_generated_ppo_trainer.yaml", "_generated_ppo_megatron_trainer.yaml"), "verl_sft": ()}
"""Files that hold all keys of a trainer, resolved by verl itself."""
COMPOSED = {"verl": (), "verl_sft": ("sft_trainer", "sft_trainer_engine")}
OTHERS = {
    "verl": (
        "verl/experimental/fully_async_policy/config/fully_async_ppo_trainer.yaml",
        "verl/experimental/one_step_off_policy/config/one_step_off_ppo_trainer.yaml",
    ),
    "verl_sft": (),
}
"""Files that build on these."""


def _values(system: str, folder: Path) -> Iterator[tuple[str, Any, str, str]]:
    """Keys with their values, links resolved where that can be, these links, and the file that they come from."""
    configs = (folder / CONFIGS).resolve()
    for path in [*(f"{CONFIGS}/{name}" for name in WHOLE[system]), *OTHERS[system]]:
        if not (folder / path).is_file():
            continue
        tree = OmegaConf.load(folder / path)
        assert isinstance(tree, DictConfig)
        for name in ("defaults", "hydra"):
            tree.pop(name, None)
        yield from ((*found, path) for found in _leaves(tree))
    for name in COMPOSED[system]:
        if (configs / f"{name}.yaml").is_file():
            with initialize_config_dir(str(configs), version_base=None):
                yield from ((*found, f"{CONFIGS}/{name}.yaml") for found in _leaves(compose(name)))


def _leaves(tree: Any) -> Iterator[tuple[str, Any, str]]:
    plain = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(plain, dict)
    for key, value in leaves(plain):  # type: ignore[arg-type]
        link = value if isinstance(value, str) and "${" in value else ""
        if link:
            try:
                value = OmegaConf.select(tree, key)
            except Exception:  # a resolver of verl's own, or a link out of the file
                continue
        if OmegaConf.is_config(value):  # a link to a section
            value = OmegaConf.to_container(value, resolve=True)
        if isinstance(value, dict) and value:
            yield from ((inner, each, "") for inner, each in leaves(value, f"{key}."))
        elif value != "???":
            yield key, value, link


def main() -> None:
    releases = dict(each.split("=", 1) for each in sys.argv[1:])
    for system in WHOLE:
        found: dict[tuple[str, str, str], tuple[list[str], str]] = {}
        everywhere: dict[str, set[str]] = {}
        for release, folder in releases.items():
            for key, value, link, source in _values(system, Path(folder)):
                names, _ = found.setdefault((key, yaml_text(value), link), ([], source))
                names += [release] * (release not in names)
                everywhere.setdefault(key, set()).add(release)
        for key, value, link in list(found):
            row = find(system, key.split("."))
            read = row is None or row[0].how != DROP or any(pictures_in({key: value}))
            if key.endswith("_target_") or not (read or len(everywhere[key]) < len(releases)):
                del found[key, value, link]
        with (FOLDER / f"{system}_defaults.tsv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="\t", quoting=csv.QUOTE_NONE, lineterminator="\n", quotechar=None)
            writer.writerow(("key", "value", "link", "releases", "source"))
            for (key, value, link), (names, source) in sorted(found.items()):
                writer.writerow((key, value, link, " ".join(names), source))
        print(f"{system}: {len(found)} values")


if __name__ == "__main__":
    main()
