"""Writes ``docs/templates.md`` from the check of published chat templates: ``make docs``, or with ``--check``.

The templates and the tokens of their models are those of the tests (``tests/support/chat_templates``).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from generated import write_or_check

from roll.agentic.tools.dialects import parsers
from roll.data.renderer import ChatRenderer
from roll.data.template_check import DATE, TemplateReport, check_renderer
from tests.support.chat_families import FAMILIES, TEMPLATES, family_tokenizer

PAGE = Path(__file__).resolve().parents[1] / "docs" / "templates.md"
_SOURCE = re.compile(r"^\| `(\w+)\.jinja` \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
_WORDS = 48
"""Letters of a template's own text that are shown."""
_SHOWN = {"rewrites-history", "drops-reasoning", "drops-reasoning-before-calls", "adds-system", "opens-reasoning"}
_SHOWN |= {"no-tools", "no-calls", "turn-end-is-not-eos", "several-turn-ends", "turn-not-closed"}
"""Findings that have columns of their own."""

INTRODUCTION = """\
# Chat templates

<!-- Written by scripts/generate_template_docs.py. Do not edit. -->

What the [template check](agents.md#template-check) finds in the templates of published models. The texts are the
models' own; the tokenizers are small ones with the models' special tokens, padding and end tokens.

## What templates do

*Append-only*: a prompt stays as it was once its answer and what follows are rendered. *Earlier reasoning*: what
becomes of it in a rendered history. *Own text*: what the template writes before a conversation that has no system
message.

{findings}

Training is not affected by a template that is not append-only or drops reasoning: a conversation grows by the sampled
tokens ([agents](agents.md#template-check)). Conversations of a dataset are learned turn by turn, each behind the prompt
that a policy would get; turns share a row while the template appends, else each has its own.

- **Reasoning.** Behind a prompt that opens `<think>`, an answer's reasoning, `</think>` and words are learned, whether
  or not the template writes the reasoning; an answer without reasoning begins with `</think>`. What a template drops of
  answers or of messages before them is reported when the dataset is read. Rewards and judges read the channels of
  gpt-oss as `<think>…</think>` and the answer.
- **Own text and dates.** Text that a template adds is part of the prompt, in training as in generation. A date in it
  changes prompts from day to day, also when a run resumes. Every run with such a template starts with a warning that
  names what fixes it: `chat_template_kwargs: {{date_string: "26 Jul 2024"}}` for Llama 3.2, a system message of your
  own for Mistral Small, a copy of the template for gpt-oss and SmolLM3.

## Tokens

Generation ends at every token of the last but one column, in every generator: the template's end of a turn, the
tokenizer's end token, and `eos_token_id` of `generation_config.json`, which may be a list. The token at which a
response ended is trained like any other and is in no text that rewards, tools or environments read. The line break that
many templates write behind it is not trained.

{tokens}

- **Padding that is an end token, too** (Qwen2.5, Phi-3, SmolLM2, DeepSeek and others): tokens are masked by their
  position, never by their id, so an end token is trained whatever the padding token is. As in Transformers, the row of
  `pad_token_id` in the input embedding gets no gradient.
- **More tokens than rows.** A tokenizer with ids beyond the model's embedding, or an end or padding token there, ends
  the run before its first step.
- **More rows than tokens.** Most embeddings are longer than their tokenizer. If a model samples such an id, a warning
  names the step, the count and the id.

## Sources

{sources}
"""


def page() -> str:
    """The page's text."""
    sources = {
        name: (models, taken, licence)
        for name, models, taken, licence in _SOURCE.findall((TEMPLATES / "README.md").read_text(encoding="utf-8"))
    }
    reports = {name: check_renderer(_renderer(name), parsers()) for name in FAMILIES}
    return INTRODUCTION.format(
        findings=_table(
            ["Template", "Append-only", "Earlier reasoning", "Own text", "Tool dialect", "Other findings"],
            ([f"`{name}`", *_findings(report)] for name, report in reports.items()),
        ),
        tokens=_table(
            ["Template", "A prompt ends with", "A turn ends with", "Generation ends at", "Padding"],
            ([f"`{name}`", *_tokens(name, report)] for name, report in reports.items()),
        ),
        sources=_table(
            ["Template", "Models", "Taken from", "Licence of the models"],
            ([f"`{name}`", *sources[name]] for name in FAMILIES),
        ),
    )


def _renderer(name: str) -> ChatRenderer:
    renderer = ChatRenderer(family_tokenizer(name))
    return renderer.with_variables(**{DATE: lambda form: "(date)"}) if DATE in renderer.source else renderer


def _findings(report: TemplateReport) -> list[str]:
    found = {finding.name: finding.text for finding in report.findings}
    rewritten = [kind for kind, kept in report.append_only.items() if not kept]
    everything = len(rewritten) == len(report.append_only)
    reasoning = "dropped, before calls too" if "drops-reasoning-before-calls" in found else "dropped"
    own = found.get("adds-system", "").partition(": ")[2][1:].partition("'")[0]
    own = f"{own[:_WORDS].rstrip()}…" if len(own) > _WORDS else own
    dialect = f"`{report.dialect}`"
    if "no-tools" in found or "no-calls" in found:
        dialect += ", as fallback" if "no-tools" in found else "; calls as fallback"
    return [
        "yes" if not rewritten else "no" if everything else f"no: {', '.join(rewritten)}",
        reasoning if "drops-reasoning" in found else "kept",
        _code(own) if own else "–",
        dialect,
        ", ".join(f"`{each}`" for each in found if each not in _SHOWN) or "–",
    ]


def _tokens(name: str, report: TemplateReport) -> list[str]:
    family, tokenizer = FAMILIES[name], family_tokenizer(name)
    stops = tokenizer.convert_ids_to_tokens(sorted(ChatRenderer(tokenizer).stops))
    ends = dict.fromkeys([report.ending, *family.ends.split(), *stops])
    return [
        _code(report.opening.replace("\n", "\\n")) if report.opening else "–",
        _code(report.ending),
        " ".join(map(_code, ends)),
        _code(family.pad) if family.pad else "–",
    ]


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


if __name__ == "__main__":
    sys.exit(write_or_check(lambda: {PAGE: page()}, __doc__))
