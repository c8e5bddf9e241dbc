"""What stands beside the weights of a saved model."""

from __future__ import annotations

import logging
from pathlib import Path

import huggingface_hub.constants
import pytest

from roll.models.loading import copy_companions
from roll.models.tiny import make_tokenizer
from roll.models.tokenizer import load_tokenizer


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a model in the hub's cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "hub" / "models--org--small"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("a" * 40)
    make_tokenizer().save_pretrained(model / "snapshots" / ("a" * 40))
    (model / "snapshots" / ("a" * 40) / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    return "org/small"


@pytest.mark.parametrize("place", ["hub", "home"])
def test_a_model_of_the_hub_or_the_home_folder_keeps_its_tokenizer_and_its_ends(
    place: str, cached: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "hub" / "models--org--small" / "snapshots"))
    target = tmp_path / "saved"
    target.mkdir()
    (target / "generation_config.json").write_text("{}")
    copy_companions(cached if place == "hub" else f"~/{'a' * 40}", target)
    assert "eos_token_id" in (target / "generation_config.json").read_text()
    assert load_tokenizer(str(target), alone=True).get_vocab() == make_tokenizer().get_vocab()


def test_a_tokenizer_that_cannot_be_had_is_told(cached: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        copy_companions("org/other", tmp_path)
    assert "org/other: its tokenizer is not in the hub's cache" in caplog.text
