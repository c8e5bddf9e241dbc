"""The effect of a run's chat template on growing conversations: its tool dialect, and what it rewrites."""

from __future__ import annotations

from contextlib import suppress

from roll.agentic.tools.dialects import DIALECTS, parsers
from roll.configs.agentic import MANAGERS, AgenticConfig
from roll.configs.pipeline import TINIES, PipelineConfig
from roll.configs.problems import ConfigProblem
from roll.configs.prompts import PromptsConfig
from roll.configs.rl import RLConfig
from roll.configs.tools import AUTO_DIALECT
from roll.data.renderer import ChatRenderer
from roll.data.template_check import DATE, TemplateReport, check_renderer, date_in_prompts
from roll.data.templates import ChatTemplate, read_template
from roll.models.tokenizer import model_folder, policy_pictures, policy_tokenizer
from roll.preflight.models import has_tokenizer


def check_dialect(config: RLConfig) -> list[ConfigProblem]:
    """``tools.dialect: auto`` can be found out, where the tokenizer is on this machine."""
    if config.tools is None or config.tools.dialect != AUTO_DIALECT or not has_tokenizer(config):
        return []
    try:
        report = _report(config)
    except ValueError:  # no tokenizer or template, which others tell of
        return []
    if report.dialect is not None:
        return []
    expected = f"the model's tool dialect, one of {', '.join(DIALECTS.names())}, or package.module:Class"
    involved = ("pretrain", "actor_train.data_args.template")
    return [ConfigProblem("tools.dialect", AUTO_DIALECT, expected, report.why_no_dialect, involves=involved)]


def check_results(config: RLConfig) -> list[ConfigProblem]:
    """The chat template shows the pictures that tools may return, where the tokenizer is on this machine."""
    if config.tools is None or not config.tools.pictures or not has_tokenizer(config):
        return []
    try:
        renderer = policy_renderer(config)
    except ValueError:  # no tokenizer or template, which others tell of
        return []
    if renderer.pictures is None or renderer.shows_results:
        return []
    expected = "a chat template that writes a picture in the result of a tool"
    return [ConfigProblem("tools.pictures", True, expected, involves=("pretrain", "actor_train.data_args.template"))]


def describe_template(config: PipelineConfig) -> list[str]:
    """Notes on the template that are worth knowing, a line each, warnings so marked; most for conversations that grow.

    Raises:
        ValueError: there is no such tokenizer or template, or it cannot render a question and its answer.
    """
    if not _has_turns(config):
        with suppress(ValueError):  # no tokenizer or template, which others tell of
            return _dated(policy_renderer(config)) if _may_write_date(config) else []
        return []
    renderer = policy_renderer(config)
    report = check_renderer(renderer, parsers())
    rewritten = [kind for kind, kept in report.append_only.items() if not kept]
    found = [f"rewrites the history of {', '.join(rewritten)}" if rewritten else "append-only"]
    found += [finding.name for finding in report.problems if finding.name != "rewrites-history"]
    found.append(f"speaks the tool dialect {report.dialect}" if report.dialect else "speaks no known tool dialect")
    more = "; roll template check shows more" if report.problems else ""
    return [f"chat template: {', '.join(found)}{more}", *_dated(renderer), *_contradictions(config, report)]


def _may_write_date(config: PipelineConfig) -> bool:
    """Tells whether a template's text asks for the date, without opening a tokenizer where it lies in a folder."""
    args = config.actor_train.data_args
    texts = [read_template(args.template), *map(read_template, args.tag_templates.values())]
    folder = model_folder(config.tokenizer_path or config.pretrain)
    if None in texts and config.pretrain not in TINIES and not folder.is_dir():
        return True  # it is on the hub
    files = [folder / name for name in ("chat_template.jinja", "tokenizer_config.json")] if None in texts else []
    texts += [path.read_text(encoding="utf-8", errors="replace") for path in files if path.is_file()]
    return any(DATE in text for text in texts if text is not None)


def _dated(renderer: ChatRenderer) -> list[str]:
    date = date_in_prompts(renderer)
    return [f"warning: actor_train.data_args.template: {date}"] if date else []


def _contradictions(config: PipelineConfig, report: TemplateReport) -> list[str]:
    """A dialect that is named and is not what the prompts tell the model to write."""
    assert isinstance(config, RLConfig), "others have no turns"
    named = {f"{key}.dialect": agent.dialect for key, agent in config.agents.items()}
    if config.tools is not None:
        named["tools.dialect"] = config.tools.dialect
    # A template that tells of tools and writes no calls leaves their notation to the training of the model.
    silent = any(finding.name == "no-calls" for finding in report.findings)
    return [
        f"warning: {key}: got {name}, expected {report.dialect}, the dialect of the chat template"
        for key, name in named.items()
        if name in DIALECTS.names() and report.dialect not in (None, name) and not silent
    ]


def _has_turns(config: PipelineConfig) -> bool:
    if not isinstance(config, RLConfig):
        return False
    if config.tools is not None or config.agents or getattr(config, "user", None) is not None:
        return True
    if not isinstance(config, AgenticConfig):
        return False
    envs = [env for name in MANAGERS for env in config.played_envs(getattr(config, name)).values()]
    return any(env.env_manager_cls != "step" for env in envs)


def policy_renderer(config: PipelineConfig) -> ChatRenderer:
    """Renderer of the policy's tokenizer and chat template.

    Raises:
        ValueError: there is no such tokenizer or template.
    """
    trusts = config.trusts("actor_train")
    tokenizer = policy_tokenizer(config.pretrain, config.tokenizer_path, trust_remote_code=trusts)
    data = config.actor_train.data_args
    pictures = policy_pictures(config.pretrain, data.picture_bounds, tokenizer)
    return ChatRenderer(tokenizer, ChatTemplate.of(data), pictures)


def tag_renderers(config: PromptsConfig, renderer: ChatRenderer) -> dict[str, ChatRenderer]:
    """Of the tags whose prompts have a chat template of their own, held-out ones too."""
    templates = ChatTemplate.of(config.actor_train.data_args).of_tags()
    return {tag: ChatRenderer(renderer.tokenizer, template, renderer.pictures) for tag, template in templates.items()}


def _report(config: PipelineConfig) -> TemplateReport:
    return check_renderer(policy_renderer(config), parsers())
