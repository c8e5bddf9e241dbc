"""Chat templates by name, for tokenizers that have none or the wrong one.

Each template writes only what its model family was trained on for plain conversations (no tools). A template is Jinja
text over ``messages``, ``add_generation_prompt`` and the tokenizer's special tokens (``bos_token`` …).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.configs.data import DataArguments

_CHATML_TURNS = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _chatml(default_system: str | None = None) -> str:
    """ChatML, with the system message that the model was trained to expect where a conversation has none."""
    if default_system is None:
        return _CHATML_TURNS
    opening = f"{{{{ '<|im_start|>system\n{default_system}<|im_end|>\n' }}}}"
    return "{% if messages[0]['role'] != 'system' %}" + opening + "{% endif %}" + _CHATML_TURNS


_LLAMA3 = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{ message['content'] | trim }}{{ '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

# Gemma has no system role: its words open the first user turn.
_GEMMA = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] | trim + '\n\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{{ bos_token }}"
    "{% for message in turns %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{{ (system if loop.first else '') + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

# For policies that have been shown what their tools are for: their names alone.
_TOOL_NAMES = (
    "{% if tools %}<|im_start|>tools\n"
    "{% for tool in tools %}{{ tool['function']['name'] }}\n{% endfor %}<|im_end|>\n{% endif %}"
)

TEMPLATES: dict[str, str] = {
    "chatml": _chatml(),
    "chatml_tool_names": _TOOL_NAMES + _CHATML_TURNS,
    "qwen2": _chatml("You are a helpful assistant."),
    "qwen2_5": _chatml("You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
    "llama3": _LLAMA3,
    "gemma": _GEMMA,
    # The texts end to end and nothing else, for base models: separators are the dataset's.
    "plain": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
}


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a run and the variables that it is rendered with, as plain data."""

    template: str = "native"
    """``native``, a name, Jinja text or a path, as ``read_template`` takes it."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Those of ``chat_template_kwargs``."""
    by_tag: Mapping[str, str] = field(default_factory=dict)
    """Templates of prompts whose tag has one of its own."""

    @classmethod
    def of(cls, data_args: DataArguments) -> ChatTemplate:
        """The template that a role's data is rendered with."""
        return cls(data_args.template, data_args.chat_template_kwargs, data_args.tag_templates)

    def of_tags(self) -> dict[str, ChatTemplate]:
        """The templates of tags that have one of their own, each with the variables that it reads.

        Raises:
            ValueError: there is no such template.
        """
        found = {}
        for tag, template in self.by_tag.items():
            text = read_template(template)
            read = {name: value for name, value in self.variables.items() if text is None or name in text}
            found[tag] = ChatTemplate(template, read)
        return found


def read_template(template: str) -> str | None:
    """The Jinja text that ``template`` names or holds; ``None`` for ``native``, the tokenizer's own.

    Raises:
        ValueError: neither a name, nor Jinja text, nor a file that can be read.
    """
    if template == "native":
        return None
    if template in TEMPLATES:
        return TEMPLATES[template]
    if "{" in template:
        return template
    path = Path(template).expanduser()
    if not path.is_file():
        near = difflib.get_close_matches(template, ["native", *TEMPLATES], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"template: {template!r} is neither 'native', nor a named template ({', '.join(TEMPLATES)}), "
            f"nor Jinja text, nor a readable file{hint}"
        )
    return path.read_text(encoding="utf-8")
