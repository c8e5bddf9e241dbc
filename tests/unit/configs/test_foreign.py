"""The table of other libraries' keys: where each leads, and what becomes of its value."""

from __future__ import annotations

import pytest

from roll.configs.agentic import AgenticConfig
from roll.configs.base import Config
from roll.configs.engines import cards
from roll.configs.foreign import FOREIGN, ROLE, by_hand
from roll.configs.rlvr import RLVRConfig
from roll.configs.schema import locate
from roll.configs.worker import WorkerConfig

OPTIONS = "strategy_args.strategy_config."


def known(root: type[Config], path: str) -> bool:
    """Whether a key exists; those of a strategy in the options of some engine."""
    _, options, rest = path.partition(OPTIONS)
    if options:
        return any(locate(card.options, rest.split(".")) for card in cards())
    if path.startswith("tracker_kwargs."):
        return True  # of wandb
    return locate(root, path.split(".")) is not None


@pytest.mark.parametrize("key", FOREIGN)
def test_every_foreign_key_leads_to_one_that_exists(key: str) -> None:
    foreign = FOREIGN[key]
    assert foreign.ours or foreign.note or foreign.advice == "remove it"
    if foreign.ours is None:
        return
    if foreign.ours.startswith(ROLE):
        assert known(WorkerConfig, foreign.ours.removeprefix(ROLE)), foreign
    else:
        assert any(known(schema, foreign.ours) for schema in (AgenticConfig, RLVRConfig)), foreign


def test_values_are_carried_over_where_they_can_be() -> None:
    assert FOREIGN["gradient_checkpointing"].transform(True) is False
    assert FOREIGN["target_modules"].transform(["q_proj", "v_proj"]) == "q_proj,v_proj"
    assert FOREIGN["bf16"].transform(True) == "bf16" and FOREIGN["bf16"].transform(False) is None
    assert FOREIGN["lr"].transform is None
    with pytest.raises(ValueError, match="no single value"):
        by_hand(8)


def test_advice_is_made_from_the_table() -> None:
    assert FOREIGN["clip_ratio"].advice == "use pg_clip"
    assert FOREIGN["use_liger"].advice == "use model_args.use_liger_kernel of the role"
    assert FOREIGN["clip_ratio_high"].advice == "use pg_clip_high; with use_pg_clip_range: true"
    assert FOREIGN["offload_nccl"].advice == "remove it"
