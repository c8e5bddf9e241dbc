"""Nothing that a trainer computes otherwise than the model itself gets into a score or an optimizer step."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from roll.algorithms.quantities import OutputLayer
from roll.algorithms.types import LossContext, LossOutput, TokenScores
from roll.data.batch import Batch
from roll.data.packing import ModelInput, PackedSequences, packed_row, row_with_shared_prompts
from roll.distributed.strategy.training import module_trainer
from roll.models import own_forward, planned_attention, scoring
from roll.models.heads import OutputHead, trunk_of
from roll.models.megatron.config import megatron_config
from roll.models.own_forward import in_one_process
from roll.models.scoring import TokenScorer, score_batch
from tests.support import trainers
from tests.support.batches import batch_of
from tests.support.choice import needs
from tests.support.families import FAMILIES, tiny_config, tiny_model, with_factors

ENGINES = ("fsdp2_train", "deepspeed_train")
PACKED = {"use_sequence_packing": True, "share_prompts": False}
SHARED = {"use_sequence_packing": True, "share_prompts": True}
PADDED = {"share_prompts": False}


def make_trainer(folder: Path, engine: str, family: str, worker: dict[str, Any], **options: Any) -> Any:
    needs(engine)
    tiny_model(with_factors(tiny_config(family))).save_pretrained(folder)
    options |= {"worker": {"infer_batch_size": 8, **worker}, "training_args": {"per_device_train_batch_size": 8}}
    return trainers.make_trainer(folder, engine, temperature=1.0, **options)


def make_batch(*, experts: bool = False) -> Batch:
    """Four sequences, two each with a common prompt."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 90, (30,), generator=generator) for _ in range(2)]
    rows = [torch.cat([prompts[i // 2], torch.randint(3, 90, (5 + i,), generator=generator)]) for i in range(4)]
    batch = batch_of(rows, prompts=30)
    if experts:
        # Two of four experts in each of six layers.
        chosen = torch.rand(batch.num_tokens, 6, 4, generator=generator).argsort(-1)[..., :2]
        batch = batch.replace(experts_TE=chosen.flatten(1).to(torch.int16))
    return batch


def loss_fn(scores: TokenScores, batch: Batch, context: LossContext) -> LossOutput:
    column = scores.logprobs_T if scores.values_T is None else scores.values_T
    return LossOutput(-column.sum() / context.num_tokens, {})


def running_state(monkeypatch: pytest.MonkeyPatch, trainer: Any) -> None:
    monkeypatch.setattr(trainer.weights.scorer.state_layers, "set_borders", lambda attention: None)


def wrong_layout(name: str, change: Callable[[ModelInput], ModelInput]) -> Callable:
    made = {"packed_row": packed_row, "row_with_shared_prompts": row_with_shared_prompts}[name]
    return lambda monkeypatch, _: monkeypatch.setattr(scoring, name, lambda batch: change(made(batch)))


def twofold(inputs: ModelInput) -> ModelInput:
    return dataclasses.replace(inputs, position_ids_RC=2 * inputs.position_ids_RC)


def all_seen(inputs: ModelInput) -> ModelInput:
    return dataclasses.replace(inputs, attention=PackedSequences((inputs.input_ids_RC.numel(),)))


def others_experts(inputs: ModelInput) -> ModelInput:
    return dataclasses.replace(inputs, experts_NE=inputs.experts_NE.roll(1, 0))


def plain_head(monkeypatch: pytest.MonkeyPatch, trainer: Any) -> None:
    trainer.weights.scorer.head.is_plain = True


def leaking_mask(monkeypatch: pytest.MonkeyPatch, trainer: Any) -> None:
    def attend(query: Any, key: Any, value: Any, plan: Any, *others: Any) -> Any:
        return by_sequence(query, key, value, PackedSequences((query.shape[2],)), *others)

    by_sequence = planned_attention._by_sequence
    monkeypatch.setattr(planned_attention, "_by_sequence", attend)


def without_sinks(monkeypatch: pytest.MonkeyPatch, trainer: Any) -> None:
    def attend(q: Any, k: Any, v: Any, visible: Any) -> Any:
        seen = scaled_dot_product_attention(q, k, v, visible, is_causal=visible is None, enable_gqa=True)
        return seen.transpose(1, 2)

    by_sequence = planned_attention._by_sequence
    monkeypatch.setattr(planned_attention, "_by_sequence", lambda *args: by_sequence(*args[:-1], attend))


def crowded_router(monkeypatch: pytest.MonkeyPatch, trainer: Any) -> None:
    """A mixture that takes other experts where many tokens come at once."""

    def crowded(_, __, out):
        return (*out[:-1], (out[-1] + 1) % 4) if len(out[-1]) > 60 else out

    for module in trainer.weights.scorer.modules():
        if hasattr(module, "experts"):
            module.gate.register_forward_hook(crowded)


UNPACKED, UNSHARED = "use_sequence_packing: false", "share_prompts: false"
FAULTS = {
    "a state that runs over boundaries": ("qwen3_5_text", PACKED, running_state, "layers.0", UNPACKED),
    "a convolution that does": ("lfm2_moe", PACKED, running_state, "layers.0", UNPACKED),
    "positions": ("qwen2", PACKED, wrong_layout("packed_row", twofold), "layers.0", UNPACKED),
    "a mask that leaks": ("qwen3", PACKED, leaking_mask, "layers.0", UNPACKED),
    "a soft cap": ("gemma2", PADDED, plain_head, "behind the layers", "another may"),
    "a logit scale": ("hyperclovax", PADDED, plain_head, "behind the layers", "another may"),
    "a sink": ("gpt_oss", PACKED, without_sinks, "layers.0", UNPACKED),
    "a shared prompt": ("qwen2", SHARED, wrong_layout("row_with_shared_prompts", all_seen), "layers.0", UNSHARED),
    "a mixture": ("qwen3_moe", PACKED, crowded_router, "layers.0", UNPACKED),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_computed_otherwise_ends_the_run_with_the_layer_and_the_key(monkeypatch, tmp_path, engine, fault):
    family, worker, plant, layer, advice = FAULTS[fault]
    monkeypatch.setattr(module_trainer, "check_packing", lambda *_: None)
    trainer = make_trainer(tmp_path, engine, family, worker)
    plant(monkeypatch, trainer)
    before = [parameter.clone() for parameter in trainer.weights.scorer.parameters()]
    for run in (lambda: trainer.logprobs(make_batch()), lambda: trainer.train_step(make_batch(), loss_fn)):
        with pytest.raises(ValueError, match="log-probabilities of the first micro-batch") as told:
            run()
        assert layer in str(told.value) and advice in str(told.value)
    assert trainer.optimizer_steps == 0
    assert all(map(torch.equal, before, trainer.weights.scorer.parameters()))


@pytest.mark.parametrize("engine", ENGINES)
def test_experts_that_a_row_replays_at_the_wrong_tokens_are_found(monkeypatch, tmp_path, engine):
    trainer = make_trainer(tmp_path, engine, "qwen3_moe", PACKED, router_replay="R3")
    trainer.logprobs(make_batch())
    wrong_layout("packed_row", others_experts)(monkeypatch, trainer)
    with pytest.raises(ValueError, match=r"first micro-batch \(packed, replayed\) .* or router_replay.mode: disable"):
        trainer.train_step(make_batch(experts=True), loss_fn)
    monkeypatch.undo()
    trainer.train_step(make_batch(experts=True), loss_fn)
    assert trainer.own_forward.compared == {"packed", "packed, replayed"}


@pytest.mark.parametrize("head", ["value", "score"])
def test_an_untrained_critic_is_compared_too(monkeypatch, tmp_path, head):
    """All its values are 0, whatever its trunk sees."""
    trainer = make_trainer(tmp_path, "fsdp2_train", "qwen3", PACKED, head=head, role="critic")
    assert not trainer.logprobs(make_batch()).values_T.any() and trainer.own_forward.compared == {"packed"}
    trainer.own_forward.compared.clear()
    leaking_mask(monkeypatch, trainer)
    with pytest.raises(ValueError, match=r"Qwen3Model: projected hidden states .* they part in layers.0"):
        trainer.train_step(make_batch(), loss_fn)


def test_each_layout_is_compared_where_it_comes_first_and_only_there(tmp_path):
    """Also after scores of single sequences, which nothing can go wrong in."""
    trainer, batch = make_trainer(tmp_path, "fsdp2_train", "qwen2", SHARED), make_batch()
    rows: list[int] = []
    trainer.weights.scorer.model.model.register_forward_hook(lambda _, __, out: rows.append(out[0].shape[1]))
    distinct = batch.select([0, 2])
    trainer.logprobs(distinct)
    assert trainer.own_forward.compared == {"packed"}
    trainer.train_step(batch, loss_fn)
    assert trainer.own_forward.compared == {"packed", "shared"}
    del rows[:]
    trainer.train_step(batch, loss_fn)
    trainer.logprobs(distinct)
    assert len(rows) == 2, "one forward pass each"


def test_the_generators_log_probabilities_are_a_bound_where_the_model_is_not_at_hand(tmp_path):
    scorer, batch = TokenScorer(tiny_model(tiny_config("qwen2"))), make_batch()
    batch = batch.replace(loss_mask_T=batch.positions_T > 20)
    check, right = in_one_process(scorer), score_batch(scorer, batch).logprobs_T
    check.generated = lambda _: right
    check.compare(batch, "padded")
    check.generated = lambda _: 1.2 * right
    check.compare(batch.replace(loss_mask_T=batch.loss_mask_T & (batch.positions_T < 24)), "padded")  # too few tokens
    with pytest.raises(ValueError, match="from those of the generator of the same weights, expected at most"):
        check.compare(batch, "padded")


def test_few_tokens_are_compared_and_no_logits_of_a_long_prompt():
    model, rows = tiny_model(tiny_config("qwen2")), []
    batch = batch_of([torch.randint(3, 90, (length,)) for length in (200, 120, 90)], prompts=41)
    check = in_one_process(TokenScorer(model))
    model.get_output_embeddings().register_forward_hook(lambda _, args, __: rows.append(args[0].shape[-2]))
    check.compare(batch, "padded")
    assert sum(rows) == own_forward.CHECKED_ROWS * own_forward.CHECKED_TOKENS


# ---- logits are those of the model's own forward pass, whatever it does after its trunk

CHANGING = ("cohere2", "falcon_h1", "gemma2", "gemma3_text", "granite", "hyperclovax", "minicpm3", "nanochat")
CHANGING += ("recurrent_gemma", "roberta", "xlstm")
"""Families whose logits are not those of their output layer, each in its own way."""
PLAIN = ("gpt2", "llama4_text", "nemotron", "olmo2", "opt", "phi3", "qwen2", "qwen3_5_text")


def ids_of(length: int) -> Tensor:
    return torch.randint(3, 90, (1, length), generator=torch.Generator().manual_seed(0))


def difference(family: str) -> float:
    """From the log-probabilities of the model's own forward pass."""
    model, ids = tiny_model(with_factors(tiny_config(family))), ids_of(25)
    with torch.no_grad():
        found = OutputHead(model)(trunk_of(model)(input_ids=ids, use_cache=False).last_hidden_state[0])
        wanted = model(input_ids=ids, use_cache=False).logits[0]
    return float((found.log_softmax(-1) - wanted.float().log_softmax(-1)).abs().max())


@pytest.mark.parametrize("family", [*CHANGING, *PLAIN])
def test_a_head_that_changes_logits_is_run_as_it_is_and_others_are_the_output_layer(family):
    config = tiny_config(family)
    assert OutputHead(tiny_model(config if family in PLAIN else with_factors(config))).is_plain == (family in PLAIN)
    assert difference(family) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_is_scored_wrong_without_a_word(family):
    try:
        model = tiny_model(with_factors(tiny_config(family)))
        model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
    except Exception as error:
        pytest.skip(f"cannot be built tiny from its configuration alone: {error}")
    try:
        scorer = TokenScorer(model)
        score_batch(scorer, trainers.make_batch(3), check=in_one_process(scorer))
    except ValueError as error:
        assert "own forward pass" in str(error)
        return
    assert difference(family) < 1e-5


def test_the_gradient_is_that_of_the_models_own_forward_in_chunks_too(monkeypatch):
    model, ids = tiny_model(with_factors(tiny_config("minicpm3"))), ids_of(14)
    monkeypatch.setattr(scoring, "MAX_CHUNK_LOGITS", 5 * 96)
    gradients = []
    for own in (True, False):
        model.zero_grad()
        if own:
            logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
            loss = logprobs.gather(1, ids[0, 1:, None]).sum()
        else:
            loss = TokenScorer(model)(ids, None, torch.arange(13), ids[0, 1:])["logprobs_T"].sum()
        loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for wanted, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["minicpm3", "hyperclovax"])
def test_a_copy_of_the_output_layer_goes_through_its_models_head(family):
    model, ids = tiny_model(with_factors(tiny_config(family))), ids_of(14)
    with torch.no_grad():
        hidden = trunk_of(model)(input_ids=ids, use_cache=False).last_hidden_state[0]
        wanted = model(input_ids=ids, use_cache=False).logits[0]
        with torch.device("meta"):
            outline = type(model)(model.config)
        weight = model.get_output_embeddings().weight
        torch.testing.assert_close(OutputLayer(weight, None, OutputHead(outline))(hidden), wanted)
        torch.testing.assert_close(OutputHead(model)(hidden, OutputLayer(weight)), wanted)


def test_a_model_without_a_trunk_of_its_own_is_refused():
    class Whole(nn.Module):
        base_model = property(lambda self: self)

        def get_output_embeddings(self) -> nn.Module:
            return nn.Linear(2, 2)

    with pytest.raises(ValueError, match="Whole has no trunk"):
        OutputHead(Whole())  # type: ignore[arg-type]


def test_an_entry_of_that_name_which_the_models_code_does_not_read_changes_nothing():
    config = tiny_config("qwen2", logit_scale=0.5, final_logit_softcapping=2.0)
    scorer, batch = TokenScorer(tiny_model(config)), trainers.make_batch(3)
    plain = score_batch(TokenScorer(tiny_model(tiny_config("qwen2"))), batch).logprobs_T
    assert torch.equal(score_batch(scorer, batch, check=in_one_process(scorer)).logprobs_T, plain)


@pytest.mark.parametrize("family", CHANGING)
def test_megatron_refuses_what_it_would_not_compute(family):
    with pytest.raises(ValueError, match="expected"):
        megatron_config(with_factors(tiny_config(family)))
