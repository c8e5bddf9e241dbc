"""The card of an exported model: what was trained on what, with which settings and results, and how to load it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from roll.configs.base import Config
from roll.configs.resuming import Effect, effect_of
from roll.configs.schema import settings_of
from roll.report.sections import evaluations
from roll.tracking.display import what_was_learned
from roll.tracking.redact import redact, redact_text
from roll.tracking.run import read_json_lines

BASE_CARD = "BASE_README.md"
"""The card of the model that the run started from, beside the new one."""
_LICENSE = ("license", "license_name", "license_link")
_MOST_ROWS = 20
_LOAD = {
    "policy": (
        "model = AutoModelForCausalLM.from_pretrained(folder)",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
    ),
    "adapter": (
        "model = AutoPeftModelForCausalLM.from_pretrained(folder)  # with its base, {base}",
        "from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer",
    ),
    "scores": (
        "model = AutoModelForSequenceClassification.from_pretrained(folder)",
        "from transformers import AutoModelForSequenceClassification, AutoTokenizer",
    ),
    "scores with pictures": (
        "model = classifier_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder)",
        "from roll.models.loading import classifier_class  # Transformers has none of this family\n"
        "from transformers import AutoConfig, AutoTokenizer",
    ),
    "critic": (
        "model = AutoModel.from_pretrained(folder)  # the trunk; value_head.safetensors has the head",
        "from transformers import AutoModel, AutoTokenizer",
    ),
}


def model_card(
    run: Path, pipeline: str, schema: type[Config], step: int, kind: str, base: str, base_card: str | None
) -> str:
    """Markdown with a header of metadata; secrets are taken out.

    Args:
        step: of the checkpoint.
        kind: a key of ``_LOAD``.
        base: the model that the role started from.
        base_card: text of that one's card, whose license the new model inherits.
    """
    config = redact(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")))
    summary_path = run / "summary.json"
    summary = json.loads(summary_path.read_text(encoding="utf-8")) if summary_path.is_file() else {}
    metrics = [record for record in read_json_lines(run / "metrics.jsonl") if record["step"] <= step]
    estimator = config.get("adv_estimator")
    head = {
        "base_model": base,
        "library_name": "peft" if kind == "adapter" else "transformers",
        "tags": ["roll", pipeline, *([estimator] if estimator else [])],
        **_license(base_card),
    }
    code, imports = _LOAD[kind]
    versions = summary.get("versions") or {}
    what = {"scores": "reward model", "critic": "critic"}.get(kind.partition(" ")[0], "policy")
    how = ", ".join(filter(None, (pipeline, estimator)))
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n# {run.resolve().name}, step {step}\n",
        f"The {what} of a run of ROLL {versions.get('roll', '')} ({how}), trained from `{base}` for {step} of "
        f"{config.get('max_steps')} steps. The license of that model applies"
        + (f"; its card is [{BASE_CARD}]({BASE_CARD}).\n" if base_card else ".\n"),
        "## Results\n",
        *_results(summary, metrics, step),
        "## Data\n",
        _table(("What", "From"), list(_data(config, summary))),
        "## Settings\n",
        "Those that decide results and differ from their defaults:\n",
        _table(("Key", "Value"), list(_settings(config, schema))),
        "## How to load it\n",
        f'```python\n{imports}\n\nfolder = "."\n{code.format(base=base)}\n'
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n```\n",
        "## Versions\n",
        _table(("Software", "Version"), list(versions.items())),
    ]
    return redact_text("\n".join(parts))


def _license(card: str | None) -> dict[str, Any]:
    """The license in the metadata of a card."""
    found = re.match(r"---\n(.*?)\n---", card or "", re.DOTALL)
    try:
        values = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        return {}
    return {key: values[key] for key in _LICENSE if key in values} if isinstance(values, Mapping) else {}


def _results(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], step: int) -> Iterator[str]:
    if summary.get("steps") == step and summary.get("eval"):
        yield f"{what_was_learned(summary)}.\n"
    rows = evaluations(metrics)
    if rows:
        cells = [(str(each["step"]), each["share"], each["interval"], each["others"]) for each in rows]
        yield _table(
            ("Step", "Held-out success", "95% interval (trials)", "Also"), [*cells[:1], *cells[1:][-_MOST_ROWS:]]
        )
        return
    measured = [each for each in metrics if any(name.startswith("eval/") for name in each)]
    if not measured:
        yield "Nothing was held out.\n"
        return
    first, last = measured[0], measured[-1]
    names = [name for name in last if name.startswith("eval/") and isinstance(last[name], int | float)]
    ends = [(name.removeprefix("eval/"), _figure(first.get(name)), _figure(last[name])) for name in names]
    yield _table(("Held-out", f"Step {first['step']}", f"Step {last['step']}"), ends)


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "–"


def _data(config: Mapping[str, Any], summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for section, rows in (summary.get("data") or {}).items():
        node: Any = config
        for part in section.split("."):
            node = (node or {}).get(part)
        files = (node or {}).get("file_name") or (node or {}).get("dataset_cls") or "?"
        files = ", ".join(files) if isinstance(files, list) else str(files)
        yield section, f"{files}: {rows['rows']:,} rows, {rows['samples']:,} samples, content {rows['digest'][:8]}"
    for tag, env in (config.get("custom_envs") or {}).items():
        trained = tag in (config.get("train_env_manager") or {}).get("tags", ())
        yield f"environment {tag}", f"{env['env_type']}{'' if trained else ' (not trained on)'}"
    for domain, reward in (config.get("rewards") or {}).items():
        yield f"reward {domain}", ", ".join(str(each["name"]) for each in reward.get("verifiers") or ())


def _settings(config: Mapping[str, Any], schema: type[Config]) -> Iterator[tuple[str, str]]:
    for key, value, differs in settings_of(config, schema):
        if differs and effect_of(key) in (Effect.RESULT, Effect.POSITION) and not key.startswith("system_envs"):
            yield f"`{key}`", f"`{json.dumps(value, ensure_ascii=False, default=str)}`"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "Nothing is recorded.\n"
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *cells]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)
