"""Which models may have several sequences in one row: those that ``packing.json`` lists, as it was measured."""

import json
import logging
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from roll.data.batch import Batch
from roll.data.packing import PackedSequences, packed_row
from roll.models import planned_attention
from roll.models.measured import FILE, kinds, packing_problem, watched
from roll.models.scoring import TokenScorer, score_input
from tests.support.batches import batch_of
from tests.support.families import BOUND, FAMILIES, LAYERS, measured, packing_differences, tiny_config, tiny_model
from tests.support.trainers import make_batch, make_trainer
from tests.unit.models.conftest import refusals

LISTED = json.loads(FILE.read_text(encoding="utf-8"))
KNOWN, OTHERS = LISTED["families"], LISTED["others"]
RIGHT = ("deepseek_v3", "gemma3_text", "gpt2", "llama", "mistral", "olmo2", "qwen2", "qwen3", "qwen3_moe")
RIGHT += ("gpt_oss", "lfm2", "mamba2", "nemotron_h", "qwen3_5_text", "qwen3_next")
WRONG = ("bloom", "falcon", "mpt", "opt", "rwkv")


@pytest.mark.parametrize("family", RIGHT)
def test_what_is_listed_keeps_sequences_apart(family):
    config = tiny_config(family)
    found = packing_differences(config)
    assert found and max(found.values()) <= BOUND  # by positions, too
    assert packing_problem(config) == ""


@pytest.mark.parametrize("family", WRONG)
def test_what_is_not_listed_does_not(family):
    config = tiny_config(family)
    assert max(packing_differences(config).values()) > 1000 * BOUND
    assert "see each other" in packing_problem(config)


def test_a_family_that_needs_a_plan_is_not_packed_with_flash_attention():
    config = tiny_config("granitemoehybrid")
    assert packing_problem(config) == packing_problem(config, kernel="sdpa") == ""
    assert "not with fa2" in packing_problem(config, kernel="fa2")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_list_is_what_is_measured(family):
    entry, problem = measured(family)
    assert (family in KNOWN) == (entry is not None)
    if entry is not None:
        assert entry | {"difference": 0} == KNOWN[family] | {"difference": 0}
    else:
        assert problem.partition("(")[0] == OTHERS[family].partition("(")[0]


def test_every_family_is_in_the_list_which_the_documentation_shows():
    assert KNOWN.keys() | OTHERS.keys() == set(FAMILIES)
    for family in ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"):  # those that Megatron has, too
        assert family in KNOWN
    page = (Path(__file__).parents[3] / "docs" / "strategies.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- packing: begin -->")[2].partition("<!-- packing: end -->")[0]
    right, *others = [set(re.findall(r"`([\w.-]+)`", line)) for line in shown.strip().splitlines()[2:]]
    assert right == KNOWN.keys() and set().union(*others) == OTHERS.keys()


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("family", "change", "told"),
    [
        ("llama", {"rope_parameters": LONG}, '"longrope"'),  # positions that depend on the longest
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_an_entry_that_changes_who_sees_whom_counts(family, change, told):
    config = tiny_config(family, **change)
    assert max(packing_differences(config).values()) > 100 * BOUND
    assert told in packing_problem(config) and packing_problem(tiny_config(family)) == ""


def test_windows_and_mixtures_of_layers_are_fine_where_they_were_measured_and_other_classes_unknown():
    mixed = {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2), "use_sliding_window": True}
    assert packing_problem(tiny_config("qwen2", **mixed, sliding_window=8)) == ""
    assert packing_problem(tiny_config("mistral", sliding_window=None)) == ""

    class OtherConfig(PreTrainedConfig):
        model_type = "other"

    assert packing_problem(OtherConfig()) == "has not been measured"
    assert "its own code" in packing_problem(tiny_config("llama"), own_code=True)
    assert kinds([1, 0]) == ["number"] and kinds(8) == ["number"] and kinds(True) == [True] and kinds(None) == [None]
    assert kinds({"a": {"rope_type": "yarn"}, "b": {"rope_type": "default"}}) == ["default", "yarn"]
    assert "sliding_window" in watched(tiny_config("mistral"))


STAGE_3 = {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize(
    ("family", "strategy", "options", "reason"),
    [
        ("nemotron", "fsdp2_infer", {}, "false: nemotron lets the sequences of a row see"),
        ("nemotron", "deepspeed_infer", {}, "false: nemotron lets the sequences of a row see"),
        ("nemotron", "hf_infer", {}, "false: nemotron lets the sequences of a row see"),
        (
            "qwen3_5_text",
            "deepspeed_infer",
            STAGE_3,
            "false with zero_optimization.stage: 3: Qwen3_5ForCausalLM has layers with a state",
        ),
    ],
)
def test_validation_refuses_a_packed_role_with_its_reason(tmp_path, family, strategy, options, reason):
    tiny_model(tiny_config(family)).save_pretrained(tmp_path)
    role = {"strategy_args": {"strategy_name": strategy, "strategy_config": options}, "use_sequence_packing": True}
    told = refusals(pretrain="tiny", reference_pretrain=str(tmp_path), reference=role)
    assert told["reference.use_sequence_packing"].startswith(reason)


@pytest.mark.parametrize(
    ("name", "role"), [("fsdp2_train", "actor_train"), ("fsdp2_infer", "actor_train"), ("hf_infer", "reference")]
)
def test_loading_refuses_it_where_the_configuration_was_not_at_hand(tmp_path, name, role):
    tiny_model(tiny_config("nemotron")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"{role}\.use_sequence_packing: true, expected false: nemotron lets"):
        make_trainer(tmp_path, name, worker={"use_sequence_packing": True}, role=role, sequence_length=64)


def test_prompts_are_not_shared_in_a_model_that_is_not_known(tmp_path, caplog):
    """Sharing is on by default: the run continues without it and says so once."""
    tiny_model(tiny_config("nemotron")).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        scorer = make_trainer(tmp_path, "fsdp2_infer")
    assert not scorer.shares_prompts
    (line,) = [record.getMessage() for record in caplog.records if "share_prompts" in record.getMessage()]
    assert line.startswith("actor_train.share_prompts: off, as nemotron lets the sequences of a row see each other")
    scorer.logprobs(make_batch())


LENGTHS = (7, 1, 12, 3)
two_layers = partial(tiny_config, num_hidden_layers=2)
WINDOW = {"sliding_window": 4}
CONFIGS = {
    "qwen2": two_layers("qwen2"),
    "qwen2, one layer with a window": two_layers("qwen2", **WINDOW, use_sliding_window=True, max_window_layers=1),
    "mistral, a window without kinds of layers": two_layers("mistral", **WINDOW),
    "gemma2, every second layer with a window": two_layers("gemma2", **WINDOW, attn_logit_softcapping=None),
    "qwen3-moe": two_layers("qwen3_moe", norm_topk_prob=True),
    "gpt2, positions that are learned": two_layers("gpt2"),
}


def short_rows() -> Batch:
    generator = torch.Generator().manual_seed(3)
    return batch_of([torch.randint(0, 37, (length,), generator=generator) for length in LENGTHS], prompts=2)


def dense(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Block-diagonal attention over the whole row, written out in float64; the result is [1, T, heads, size]."""
    rows = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place = torch.arange(len(rows))
    distance = place[:, None] - place
    visible = (rows[:, None] == rows) & (distance >= 0) & (distance < (window or len(rows)))
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize(("heads", "kv_heads", "size", "keys"), [(4, 2, 8, 16), (9, 3, 64, 80), (6, 1, 32, 48)])
def test_a_decode_step_does_not_copy_keys_and_changes_no_bit(heads, kv_heads, size, keys, monkeypatch):
    assert planned_attention.enable(tiny_model(CONFIGS["qwen2"]))
    attend = ALL_ATTENTION_FUNCTIONS[planned_attention.NAME]
    states = [torch.randn(16, *shape, size) for shape in ((heads, 1), (kv_heads, keys), (kv_heads, keys))]
    mask = torch.where(torch.arange(keys) <= torch.randint(keys, (16, 1)), 0.0, -torch.inf)[:, None, None]
    module = SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True)
    expected = ALL_ATTENTION_FUNCTIONS["sdpa"](module, *states, mask, scaling=0.3)[0]
    monkeypatch.setattr("transformers.integrations.sdpa_attention.sdpa_attention_forward", None)
    assert torch.equal(attend(module, *states, mask, scaling=0.3)[0], expected)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_attention_and_its_gradient_are_block_diagonal(heads, kv_heads, window):
    assert planned_attention.enable(tiny_model(CONFIGS["qwen2"]))
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, n, sum(LENGTHS), 8) for n in (heads, kv_heads, kv_heads)]
    exact = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    states = [each.detach().float().requires_grad_() for each in exact]
    module = SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True)
    attend = ALL_ATTENTION_FUNCTIONS[planned_attention.NAME]
    found, _ = attend(module, *states, None, attention_plan=PackedSequences(LENGTHS), sliding_window=window)
    wanted = dense(*exact, window)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-6)
    weights = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    (wanted * weights).sum().backward()
    (found * weights.float()).sum().backward()
    for state, each in zip(states, exact, strict=True):
        torch.testing.assert_close(state.grad.double(), each.grad, rtol=0, atol=5e-6)


def scores_and_gradient(name: str, attention: str) -> list[Tensor]:
    model, batch = tiny_model(CONFIGS[name], 1, attn_implementation=attention), short_rows()
    scorer = TokenScorer(model)
    scorer._takes_plans = attention == "sdpa"
    scores = score_input(scorer, packed_row(batch), batch.num_tokens)
    (scores.logprobs_T.sum() - 0.1 * scores.entropy_T.square().sum()).backward()
    return [scores.logprobs_T, scores.entropy_T, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_rows_score_and_learn_as_under_a_mask_over_the_whole_row(name):
    assert planned_attention.enable(tiny_model(CONFIGS[name], attn_implementation="sdpa"))
    for found, wanted in zip(scores_and_gradient(name, "sdpa"), scores_and_gradient(name, "eager"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)


def test_a_model_whose_layers_drop_arguments_is_left_as_it_is(monkeypatch):
    model = tiny_model(CONFIGS["qwen2"], attn_implementation="sdpa")
    layer: type[nn.Module] = type(model.model.layers[0])
    monkeypatch.setattr(layer, "forward", lambda self, hidden_states: hidden_states)
    assert not planned_attention.enable(model)
    assert model.config._attn_implementation == "sdpa"
