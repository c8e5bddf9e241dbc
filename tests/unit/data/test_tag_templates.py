"""Prompts of tags with a chat template of their own, against Transformers' rendering with that template."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from roll.configs.data import DataArguments
from roll.configs.loader import load_config
from roll.configs.problems import ConfigErrors
from roll.configs.rlvr import RLVRConfig
from roll.data.prompts import DataError
from roll.data.renderer import ChatRenderer
from roll.data.templates import TEMPLATES, ChatTemplate
from roll.distributed.strategy.generation.model_outline import stop_token_ids
from roll.extras.importers.convert import convert
from roll.extras.importers.draft import Kind
from roll.models.tiny import make_tokenizer
from roll.pipeline.prompts import load_datasets
from roll.preflight.choices import CHECKS
from tests.unit.configs.test_rlvr_config import MINIMAL
from tests.unit.extras.importers.test_import import FILES

TOKENIZER = make_tokenizer()
QUOTED = "{% for m in messages %}{{ m['content'] }}{{ '!' if loud }}{% endfor %}{{ '<eos>' if add_generation_prompt }}"
KEY = "actor_train.data_args.tag_templates"


def load(folder: Path, *overrides: str) -> RLVRConfig:
    (folder / "mine.yaml").write_text(MINIMAL)
    return load_config(RLVRConfig, "mine", folder, overrides, CHECKS[RLVRConfig])


def write(folder: Path) -> tuple[str, ...]:
    """Rows of three tags, two of which have templates, one of them in a file; held out as well."""
    tags = ["gsm8k", "aime", "mmlu", "gsm8k", "mmlu", "aime"]
    rows = [
        {"question": f"{i}+{i}=", "solution": "B" if tag == "mmlu" else "2", "tag": tag} for i, tag in enumerate(tags)
    ]
    for name in ("a.jsonl", "val.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "plain.jinja").write_text(TEMPLATES["plain"])
    (folder / "quoted.jinja").write_text(QUOTED)
    return (
        f"actor_train.data_args.file_name={folder / 'a.jsonl'}",
        f"validation.data_args.file_name={folder / 'val.jsonl'}",
        f"{KEY}.gsm8k={folder / 'quoted.jinja'}",
        f"{KEY}.aime=plain",
    )


def test_rows_of_a_tag_have_the_ids_of_transformers_with_its_template(tmp_path: Path) -> None:
    config = load(tmp_path, *write(tmp_path), "actor_train.data_args.chat_template_kwargs={loud: true}")
    # The variable is read by one of the templates alone.
    general = ChatRenderer(TOKENIZER, "chatml")
    datasets = load_datasets(config, general)
    texts = {"gsm8k": QUOTED, "aime": TEMPLATES["plain"]}
    for dataset in (datasets.train, datasets.val):
        assert dataset is not None and [prompt.tag for prompt in dataset[:3]] == ["gsm8k", "aime", "mmlu"]
        for prompt in dataset:
            assert (prompt.prompt_ids is None) == (prompt.tag == "mmlu")
            ids = general.prompt(prompt.messages) if prompt.prompt_ids is None else prompt.prompt_ids
            expected = TOKENIZER.apply_chat_template(
                list(prompt.messages),
                chat_template=texts.get(prompt.tag, TEMPLATES["chatml"]),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                loud=True,
            )
            assert np.array_equal(ids, expected), prompt.tag


def test_a_prompt_that_is_too_long_by_its_own_template_is_treated_as_any_other(tmp_path: Path) -> None:
    words = write(tmp_path)
    with pytest.raises(DataError, match=r"a\.jsonl:1: 4\d tokens, expected at most prompt_length = 20"):
        (tmp_path / "quoted.jinja").write_text("1" * 40 + QUOTED)
        load_datasets(load(tmp_path, *words, "prompt_length=20"), ChatRenderer(TOKENIZER, "plain"))
    config = load(tmp_path, *words, "prompt_length=20", "actor_train.data_args.prompt_overflow=left")
    config.validation = None
    train = load_datasets(config, ChatRenderer(TOKENIZER, "plain")).train
    assert train is not None and train.report.overlong == 2
    lengths = [len(prompt.prompt_ids) for prompt in train if prompt.tag == "gsm8k" and prompt.prompt_ids is not None]
    assert lengths == [20, 20]


def test_turns_end_where_any_of_the_templates_ends_them() -> None:
    data = DataArguments(template="plain", tag_templates={"chat": "chatml"})
    alone, end = stop_token_ids(None, TOKENIZER, "plain"), TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    both = stop_token_ids(None, TOKENIZER, ChatTemplate.of(data))
    assert set(both) == {*alone, *stop_token_ids(None, TOKENIZER, "chatml")} and end in both


def test_what_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    tools = "tools={dialect: hermes, use: {calculator: {tool: calculator}}}"
    with pytest.raises(ConfigErrors) as caught:
        load(tmp_path, *write(tmp_path), f"{KEY}.gsmk=plain", f"{KEY}.mmlu=./absent", tools)
    found = {problem.path: str(problem) for problem in caught.value.problems}
    assert "did you mean gsm8k?" in found[f"{KEY}.gsmk"] and "absent" in found[f"{KEY}.mmlu"]
    assert "conversations of several turns have one template" in found["tools"]
    with pytest.raises(ConfigErrors, match=r"validation\.data_args\.tag_templates.*the same as"):
        load(tmp_path, "validation.data_args.tag_templates={gsm8k: plain}")


def test_tag_to_template_of_roll() -> None:
    words = ["+tag_to_template={sums: chatml, talk: their_own}"]
    imported = convert("roll", [FILES / "roll" / "run" / "rlvr.yaml"], words)
    told = {outcome.key: outcome for outcome in imported.outcomes if outcome.key.startswith("tag_to_template")}
    assert {outcome.kind for outcome in told.values()} == {Kind.DERIVED}
    assert imported.exit_code == 0 and told["tag_to_template.talk"].value == "native"
    assert "sums: chatml" in imported.text and "talk: native" in imported.text
