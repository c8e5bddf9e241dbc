"""Checks what a configuration refers to: rows of data files, models on the hub; only for ``roll validate``."""

from __future__ import annotations

import glob
import os
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from roll.configs.data import DataArguments
from roll.configs.offline import OfflineConfig
from roll.configs.pipeline import SMOLLM2, TINIES, PipelineConfig
from roll.configs.preference import DPOConfig, RewardTrainingConfig
from roll.configs.problems import ConfigProblem
from roll.configs.prompts import PromptsConfig
from roll.configs.rl import RLConfig
from roll.preflight.choices import check_functions
from roll.preflight.models import has_tokenizer, media_refused
from roll.preflight.templates import policy_renderer, tag_renderers

if TYPE_CHECKING:
    from roll.data.reading import Reading

HEAD = 2000
"""Rows that are read of each data file."""
TRIAL_SECONDS = 10.0
"""For the reference answers of a dataset."""
SHOWN_ROWS = 5
HUB_SECONDS = 8.0
"""Patience with a hub."""

Findings = tuple[list[str], list[ConfigProblem]]
"""Lines that say what is there, and what is wrong with it."""


def check_inputs(config: PipelineConfig) -> Findings:
    """Reads the head of every data file that is on this machine and asks the hub for models that are not.

    Functions in the training step are imported, too.

    Data that is not here yet is no problem: a configuration may be checked on another machine than it runs on.
    """
    data_lines, data_problems = check_data(config)
    model_lines, model_problems = check_hub(config)
    function_problems = check_functions(config) if isinstance(config, RLConfig) else ()
    return [*data_lines, *model_lines], [*data_problems, *model_problems, *function_problems]


def check_data(config: PipelineConfig) -> Findings:
    """Columns, values, tags and chat template of the first rows of each file; prompts have their lengths, too."""
    lines: list[str] = []
    problems: list[ConfigProblem] = []
    if not isinstance(config, PromptsConfig):
        return lines, problems
    if config.data_generator is not None:
        made = config.data_generator
        lines.append(f"data: made by {made.path} in {made.folder}, if it does not exist")
    datasets = {"actor_train.data_args": None if config.eval_only else config.actor_train.data_args}
    datasets["validation.data_args"] = config.validation.data_args if config.validation else None
    for key, args in datasets.items():
        if args is not None and args.has_dataset:
            found = _check_dataset(key, args, config)
            lines += found[0]
            problems += found[1]
    return lines, problems


def _check_dataset(key: str, args: DataArguments, config: PromptsConfig) -> Findings:
    if args.dataset_cls is not None:
        return [f"data: {args.dataset_cls}: called when the run starts"], []
    absent = [name for name in args.file_names if not _on_disk(name)]
    lines = [f"data: {name}: not there yet" for name in absent]
    if len(absent) == len(args.file_names):
        return lines, []
    from roll.data.files import DataError
    from roll.data.reading import Reading

    present = args.model_copy(update={"file_name": [name for name in args.file_names if name not in absent]})
    reading = Reading(present, config.seed, HEAD, refused=media_refused(config))
    try:
        tags, whole = _read_head(reading, config, lines, held_out=key.startswith("validation"))
    except DataError as error:
        shown = error.problems[:SHOWN_ROWS]
        rest = [f"and {error.count - len(shown):,} more"] if error.count > len(shown) else []
        seen, hint = ", ".join(present.file_names), "; ".join([*shown, *rest])
        return lines, [ConfigProblem(f"{key}.file_name", seen, "rows that fit the columns and domains named", hint)]
    which = "rows" if whole else f"rows checked, the first {HEAD:,} of each file"
    counts = ", ".join(f"{tag} {count:,}" for tag, count in sorted(tags.items()))
    lines += [f"data: {', '.join(present.file_names)}: {sum(tags.values()):,} {which} ({counts})"]
    return [*lines, *reading.noted()], []


def _read_head(
    reading: Reading, config: PromptsConfig, lines: list[str], *, held_out: bool
) -> tuple[Counter[str], bool]:
    """Samples by tag, and whether these are all; with the chat template where the tokenizer is on this machine.

    Args:
        lines: takes what there was no time for.

    Raises:
        DataError: everything that is wrong with the rows.
    """
    from roll.data.conversations import Scoring, check_conversations, encode_talk
    from roll.data.preferences import check_preferences, check_scored, encode_whole_talk
    from roll.data.prompts import check_prompts
    from roll.data.template_check import LeftOut
    from roll.rewards.scoring import References

    renderer = None
    if has_tokenizer(config):
        with suppress(ValueError):  # no tokenizer or template, which others tell of
            renderer = policy_renderer(config)
    if not isinstance(config, OfflineConfig):
        references = References(config.rewards, TRIAL_SECONDS, lines.append)
        own = tag_renderers(config, renderer) if renderer else {}
        bound = config.lengths(held_out=held_out)[0]
        return check_prompts(reading, config.domains, renderer, own, references, bound)
    scored = config.validation if held_out and config.rewards else None
    scoring = None
    if scored:
        references = References(config.rewards, TRIAL_SECONDS, lines.append)
        scoring = Scoring(tuple(config.domains), scored.solution, references)
    if isinstance(config, RewardTrainingConfig):
        if config.reward_loss != "bradley_terry":
            return check_scored(reading, config.answers, config.reward_loss == "process", renderer)
        template = (encode_whole_talk(renderer, blank=True), LeftOut(renderer, "whole")) if renderer else ()
        return check_preferences(reading, config.answers, None, scoring, *template)
    last_only = getattr(config, "train_on", "all") == "last"
    template = (encode_talk(renderer, last_only=last_only, blank=True), LeftOut(renderer)) if renderer else ()
    if isinstance(config, DPOConfig):
        label = None if config.in_pairs else config.preferences.label
        return check_preferences(reading, config.preferences, label, scoring, *template)
    return check_conversations(reading, scoring, *template)


def _on_disk(name: str) -> bool:
    return bool(glob.glob(str(Path(name).expanduser()), recursive=True)) or Path(name).expanduser().exists()


def check_hub(config: PipelineConfig) -> Findings:
    """Models by name exist on the hub, where it may be asked and answers."""
    lines: list[str] = []
    problems: list[ConfigProblem] = []
    for key, model in config.models.items():
        if model in (*TINIES, SMOLLM2) or Path(model).expanduser().exists():
            continue
        offline = hub_is_off()
        status = None if offline else ask_hub(f"models/{model}", HUB_SECONDS)
        if status in (401, 403, 404):
            expected = "a folder, or a model on the Hugging Face hub that may be read from here"
            hint = f"the hub answers {status}: there is no such name, or it needs a token (HF_TOKEN)"
            problems.append(ConfigProblem(key, model, expected, hint))
            continue
        reason = "HF_HUB_OFFLINE is set" if offline else f"it answers {status}" if status else "no answer"
        said = "there" if status == 200 else f"not checked: {reason}"
        lines.append(f"{key}: {model}: a name on the Hugging Face hub, {said}")
    return lines, problems


def hub_is_off() -> bool:
    """Tells whether the environment says that the hub must not be asked."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def hub_endpoint() -> str:
    """Address of the hub."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def ask_hub(what: str, seconds: float) -> int | None:
    """Status of an answer of the hub, within ``seconds``; ``None`` without one."""
    answers: list[int] = []

    def ask() -> None:
        import httpx
        from huggingface_hub import get_token

        token = get_token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            url = f"{hub_endpoint()}/api/{what}"
            answers.append(httpx.get(url, headers=headers, timeout=seconds, follow_redirects=True).status_code)
        except httpx.HTTPError:
            return

    # A thread that may be left behind: the system's look-up of a host knows no time limit.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None
