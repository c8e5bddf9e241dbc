"""``megatron_train`` beyond the parity matrix: checkpoints of other layouts, shared prompts, routers, refusals.

What a layout computes is compared with ``fsdp2_train`` in one process, which the parity matrix holds to plain Hugging
Face in float64; ``test_several_ranks.py`` has what all trainers have. The layouts of this file run in one pair of
processes.
"""

import functools
import os
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.algorithms.quantities import BASIC, Distribution, hidden_states, logprobs
from roll.algorithms.types import LossContext, LossOutput, TokenScores
from roll.configs.engines.megatron import MegatronConfig
from roll.data.batch import Batch
from roll.distributed.strategy.base import Metrics
from roll.distributed.strategy.training.tensor_files import StoredTensors
from tests.support import trainers
from tests.support.choice import slow_but
from tests.support.harness import make_groups, share
from tests.support.ranks import assert_near, assert_same_files, exported, recorded_warnings, run_ranks, wanted
from tests.support.sizes import save_random
from tests.support.trainers import TEMPERATURE, VOCABULARY, make_batch, policy_loss

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
CP, EP = "context_parallel_size", "expert_model_parallel_size"
TP_SP = {TP: 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp": ("dense", TP_SP),
    "pp": ("dense", {PP: 2}),
    "cp": ("dense", {CP: 2}),
    "balanced": ("moe", {**TP_SP, "moe_aux_loss_coeff": 1.0}),
}
"""What some cases run in: the model and the strategy's keys."""
SHARED = {"moe_shared_expert_overlap": True, "recompute_granularity": "full"}
NEAR = 2e-6


def make_model(path: Path, kind: str) -> Path:
    """A random model of four layers; ``kind`` is ``dense`` or ``moe`` (with a shared expert)."""
    options: dict[str, Any] = {"max_position_embeddings": 64, "tie_word_embeddings": kind == "dense"}
    if kind == "moe":
        options |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": False}
        options["shared_expert_intermediate_size"] = 16
    family = {"dense": "Qwen2", "moe": "Qwen2Moe"}[kind]
    return save_random(path, family, VOCABULARY, 32, 48, 4, 4, 2, **options)


def make_trainer(model: Path, name: str, options: dict[str, Any] | None = None, rank: int = 0, **kwargs: Any) -> Any:
    """A trainer (or scorer) that is set up; on its own, or one of two."""
    worker = {"infer_batch_size": 3, "share_prompts": kwargs.pop("share_prompts", False)}
    training_args = {"lr_scheduler_type": "constant", "adam_epsilon": 1e-4}  # rounding noise must not become steps
    sections = {"worker": worker, "training_args": training_args, "model_args": {"dtype": kwargs.pop("dtype", "fp32")}}
    world_size = 2 if name.startswith("megatron") else 1
    return trainers.make_trainer(model, name, options, rank=rank, world_size=world_size, **sections, **kwargs)


def step(trainer: Any, seed: int, loss: Any = policy_loss, **kwargs: Any) -> Metrics:
    return trainer.train_step(share(trainer, make_batch(seed=seed, **kwargs)), loss)


# Cases run on both ranks. Each gets the folder with the models and what fsdp2 has saved, and says what it found.


def case_empty_share(folder: Path, rank: int) -> dict[str, Any]:
    trainer = make_trainer(folder / "dense", "megatron_train", {"overlap_grad_reduce": True}, rank)
    return {"metrics": step(trainer, 3, num_sequences=1), "weights": exported(trainer)}


def case_checkpoint(folder: Path, rank: int) -> dict[str, Any]:
    """Saved by tensor-parallel ranks, continued by pipeline stages."""
    trainer = make_trainer(folder / "dense", "megatron_train", TP_SP, rank)
    step(trainer, 1)
    trainer.save(folder / "saved-dense")
    saving = trainer.start_save(folder / "saved-beside")
    step(trainer, 2)
    saving.result()
    other = make_trainer(folder / "dense", "megatron_train", {PP: 2, VPP: 2}, rank)
    other.load(folder / "saved-dense")
    step(other, 2)
    return {"weights": exported(other), "steps": other.optimizer_steps}


def case_checkpoint_of_fsdp2(folder: Path, rank: int) -> dict[str, Any]:
    trainer = make_trainer(folder / "moe", "megatron_train", {EP: 2}, rank)
    trainer.load(folder / "saved-by-fsdp2")
    step(trainer, 2)
    return {"weights": exported(trainer)}


def case_checkpoint_of_experts(folder: Path, rank: int) -> dict[str, Any]:
    """Saved by expert-parallel ranks without sharing the optimizer's states; fsdp2 continues from it."""
    trainer = make_trainer(folder / "moe", "megatron_train", {EP: 2, "use_distributed_optimizer": False}, rank)
    step(trainer, 1)
    trainer.save(folder / "saved-moe")
    step(trainer, 2)
    return {"weights": exported(trainer)}


def case_checkpoint_bf16(folder: Path, rank: int) -> dict[str, Any]:
    """Continuing in the same layout changes not a bit."""
    return _continued(folder, rank, {}, "saved-bf16")


def case_checkpoint_of_stages(folder: Path, rank: int) -> dict[str, Any]:
    """The last stage has a copy of the tied embeddings."""
    return _continued(folder, rank, {PP: 2}, "saved-by-stages")


def _continued(folder: Path, rank: int, config: dict[str, Any], name: str) -> dict[str, Any]:
    trainer = make_trainer(folder / "dense", "megatron_train", config, rank, dtype="bf16")
    step(trainer, 1)
    trainer.save(folder / name)
    step(trainer, 2)
    expected = exported(trainer)
    other = make_trainer(folder / "dense", "megatron_train", config, rank, dtype="bf16")
    other.load(folder / name)
    step(other, 2)
    found = exported(other)
    return {"equal": all(found[n].equal(expected[n]) for n in expected), "count": len(expected)}


def cubes(p: Distribution) -> dict[str, Tensor]:
    """A quantity that only this file knows: the sum of cubed probabilities."""
    return {"cubes_T": p.total(p.probabilities_KV**3)}


def cubes_loss(scores: TokenScores, batch: Batch, context: LossContext) -> LossOutput:
    loss = (scores.others["cubes_T"] * batch.advantages_T).sum() / context.num_tokens
    return LossOutput(loss, {"actor/loss": loss.detach()})


def case_own_quantity(folder: Path, rank: int, name: str) -> dict[str, Any]:
    trainer = make_trainer(folder / "dense", "megatron_train", LAYOUTS[name][1], rank, needs=(logprobs, cubes))
    scores = trainer.logprobs(make_batch(seed=1)).others["cubes_T"]
    return {"scores": scores, "metrics": step(trainer, 1, cubes_loss), "weights": exported(trainer)}


def case_reference(folder: Path, rank: int, name: str) -> dict[str, Any]:
    needs = (*BASIC, hidden_states)
    scorer = make_trainer(folder / "dense", "megatron_infer", LAYOUTS[name][1], rank, needs=needs)
    scores = scorer.logprobs(make_batch(seed=1))
    return {"scores": [scores.logprobs_T, scores.entropy_T, scores.hidden_TH]}


def case_shared_prompts(folder: Path, rank: int, name: str) -> dict[str, Any]:
    kind, options = LAYOUTS[name]
    found: dict[str, Any] = {}
    for what, shares in (("shared", True), ("single", False)):
        trainer = make_trainer(folder / kind, "megatron_train", options, rank, share_prompts=shares)
        seen = tokens_seen(trainer)
        scores = trainer.logprobs(make_groups(1)).logprobs_T
        metrics = trainer.train_step(make_groups(1), policy_loss)
        found[what] = {"tokens": sum(seen), "scores": scores, "metrics": metrics}
    return found


def case_reference_of_shared_prompts(folder: Path, rank: int) -> dict[str, Any]:
    options = {"share_prompts": True, "needs": (*BASIC, hidden_states)}
    reference = make_trainer(folder / "dense", "megatron_infer", TP_SP, rank, **options)
    seen = tokens_seen(reference)
    return {"hidden": reference.logprobs(make_groups(1)).hidden_TH, "tokens": sum(seen)}


def tokens_seen(trainer: Any) -> list[int]:
    """Grows by the tokens of each micro-batch that enters the model."""
    seen: list[int] = []
    trainer.own_forward = None  # what it compares would count
    trainer.model.chunks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].numel()))
    return seen


def case_shared_expert(folder: Path, rank: int) -> dict[str, Any]:
    trainer = make_trainer(folder / "moe", "megatron_train", {EP: 2, **SHARED}, rank)
    return {"metrics": step(trainer, 1), "weights": exported(trainer)}


def case_frozen_router(folder: Path, rank: int) -> dict[str, Any]:
    options = {**TP_SP, "freeze_moe_router": True, "overlap_grad_reduce": True}
    trainer = make_trainer(folder / "moe", "megatron_train", options, rank)
    before = exported(trainer)
    step(trainer, 1)
    trainer.save(folder / "saved-frozen")
    after = exported(trainer)
    return {"same": sorted(n for n in before if before[n].equal(after[n]))}


def case_balancing_loss(folder: Path, rank: int) -> dict[str, Any]:
    norms = [
        step(make_trainer(folder / "moe", "megatron_train", {**TP_SP, "moe_aux_loss_coeff": c}, rank), 1)
        for c in (0.0, 1.0)
    ]
    return {"norms": [metrics["actor/grad_norm"] for metrics in norms], "losses": [m["actor/loss"] for m in norms]}


def case_refused_setup(folder: Path, rank: int) -> dict[str, Any]:
    refused = {
        "workers": {TP: 4},
        "heads": {TP: 2, PP: 1, "overlap_grad_reduse": True},
        "experts": {EP: 2, "moe_grouped_gemm": True},
        "owned": {"adam_eps": 1e-3, "num_layers": 3},
    }
    messages = {}
    for name, options in refused.items():
        with pytest.raises(ValueError) as raised:
            make_trainer(folder / "dense", "megatron_train", options, rank)
        messages[name] = str(raised.value)
    return messages


CASES = [value for name, value in globals().items() if name.startswith("case_")]
OF_LAYOUTS = {case_own_quantity: "stage", case_reference: "scores", case_shared_prompts: "shares"}
"""Cases that run in several layouts, and the argument of the tests that names these."""


def run_rank(rank: int, folder: Path, layouts: dict[str, list[str]]) -> None:
    with recorded_warnings(folder / f"warnings-{rank}"):
        for case in CASES:
            for name in layouts[OF_LAYOUTS[case]] if case in OF_LAYOUTS else [None]:
                try:
                    found = case(folder, rank, name) if name else case(folder, rank)
                except BaseException:
                    found = {"error": traceback.format_exc()}
                torch.save(found, folder / f"{case.__name__}-{name}-{rank}.pt")
                if "error" in found:
                    os._exit(0)  # the other rank may be waiting in a collective
    os._exit(0)  # the other rank may have failed in its last case


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of all cases, the models, and what either engine saved."""
    path: Path = tmp_path_factory.mktemp("megatron")
    for kind in ("dense", "moe"):
        make_model(path / kind, kind)
    trainer = make_trainer(path / "moe", "fsdp2_train")
    step(trainer, 1)
    trainer.save(path / "saved-by-fsdp2")
    run_ranks(run_rank, 2, path, {argument: wanted(request, argument) for argument in OF_LAYOUTS.values()})
    return path


def found_by(case: Any, folder: Path, layout: str | None = None) -> dict[str, Any]:
    """What rank 0 found; both must have come through."""
    results = []
    for rank in (0, 1):
        file = folder / f"{case.__name__}-{layout}-{rank}.pt"
        assert file.exists(), "not run: an earlier case failed"
        results.append(torch.load(file, weights_only=True))
        assert "error" not in results[-1], results[-1]["error"]
    return results[0]


def assert_same_metrics(found: Metrics, expected: Metrics) -> None:
    for name, value in expected.items():
        if not name.startswith("time/") and not name.endswith(("padding_waste", "computed_tokens")):
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@functools.cache
def expected_after(
    folder: Path, kind: str, *seeds: int, num_sequences: int = 9, **kwargs: Any
) -> tuple[Metrics, dict[str, Tensor]]:
    """The last step's metrics, and the weights, of fsdp2."""
    trainer = make_trainer(folder / kind, "fsdp2_train", **kwargs)
    metrics = [step(trainer, seed, num_sequences=num_sequences) for seed in seeds][-1]
    return metrics, exported(trainer)


def continued_by_fsdp2(folder: Path, kind: str, name: str) -> dict[str, Tensor]:
    """The weights after a step from a checkpoint."""
    trainer = make_trainer(folder / kind, "fsdp2_train")
    trainer.load(folder / name)
    step(trainer, 2)
    return exported(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_said_that_a_user_cannot_change(folder, rank):
    assert (folder / f"warnings-{rank}").read_text() == ""


@pytest.mark.parametrize(
    ("case", "kind", "seed", "options"),
    [
        pytest.param(case_shared_expert, "moe", 1, {}, id="a shared expert beside the dispatcher"),
        pytest.param(case_empty_share, "dense", 3, {"num_sequences": 1}, id="a rank without sequences takes part"),
    ],
)
def test_a_step_is_that_of_fsdp2(folder, case, kind, seed, options):
    found = found_by(case, folder)
    metrics, weights = expected_after(folder, kind, seed, **options)
    assert_same_metrics(found["metrics"], metrics)
    assert_near(found["weights"], weights, NEAR)


def test_checkpoint_continues_in_another_layout_and_engine_and_equals_one_saved_beside_training(folder):
    found = found_by(case_checkpoint, folder)
    assert found["steps"] == 2
    _, weights = expected_after(folder, "dense", 1, 2)
    assert_near(found["weights"], weights, NEAR)
    assert_near(continued_by_fsdp2(folder, "dense", "saved-dense"), weights, NEAR)
    assert_same_files(folder / "saved-beside", folder / "saved-dense")


def test_checkpoint_with_experts_travels_both_ways(folder):
    _, weights = expected_after(folder, "moe", 1, 2)
    assert_near(found_by(case_checkpoint_of_fsdp2, folder)["weights"], weights, NEAR)
    assert_near(found_by(case_checkpoint_of_experts, folder)["weights"], weights, NEAR)
    assert_near(continued_by_fsdp2(folder, "moe", "saved-moe"), weights, NEAR)


def test_bf16_continues_bit_for_bit_alone_and_in_stages_with_tied_embeddings(folder):
    found = found_by(case_checkpoint_bf16, folder)
    assert found["equal"] and found["count"] > 40
    stored = StoredTensors(folder / "saved-bf16" / "resume" / "actor_train" / "optimizer")
    assert stored.get("model.norm.weight.master").dtype == torch.float32
    found = found_by(case_checkpoint_of_stages, folder)
    assert found["equal"] and found["count"] > 40
    alone, stages = (
        StoredTensors(folder / name / "resume" / "actor_train" / "optimizer").forms
        for name in ("saved-bf16", "saved-by-stages")
    )
    assert stages == alone


@pytest.mark.parametrize("stage", slow_but(["tp"], ["tp", "pp"]))
def test_a_quantity_is_one_function_for_every_engine_and_cut(folder, stage):
    import transformers

    batch, start = make_batch(seed=1), {"needs": (logprobs, cubes)}
    model = transformers.Qwen2ForCausalLM.from_pretrained(folder / "dense").double()
    with torch.no_grad():
        logits = torch.cat([model(row[None]).logits[0] for row in batch.tokens_T.split(batch.lengths_B.tolist())])
    expected = ((logits / TEMPERATURE).softmax(-1) ** 3).sum(-1).roll(1) * batch.loss_mask_T
    trainer = make_trainer(folder / "dense", "fsdp2_train", **start)
    scores = trainer.logprobs(batch).others["cubes_T"]
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=NEAR)
    metrics, weights = step(trainer, 1, cubes_loss), exported(trainer)
    found = found_by(case_own_quantity, folder, stage)
    torch.testing.assert_close(found["scores"].double(), expected, rtol=1e-5, atol=NEAR)
    assert_same_metrics(found["metrics"], metrics)
    assert_near(found["weights"], weights, NEAR)


@pytest.mark.parametrize("scores", slow_but(["pp", "cp"], ["tp", "pp", "cp"]))
def test_reference_scores_and_hidden_states(folder, scores):
    scorer = make_trainer(folder / "dense", "fsdp2_infer", needs=(*BASIC, hidden_states))
    one = scorer.logprobs(make_batch(seed=1))
    found = found_by(case_reference, folder, scores)["scores"]
    for tensor, expected in zip(found, [one.logprobs_T, one.entropy_T, one.hidden_TH], strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("shares", slow_but(["tp"], LAYOUTS))
def test_shared_prompts_are_computed_once_where_rows_can_follow_a_plan(folder, shares):
    found = found_by(case_shared_prompts, folder, shares)
    shared, single = found["shared"], found["single"]
    torch.testing.assert_close(shared["scores"], single["scores"], rtol=0, atol=NEAR)
    assert_same_metrics(shared["metrics"], single["metrics"])
    if shares in ("cp", "balanced"):
        assert shared["tokens"] == single["tokens"]
    else:
        assert shared["tokens"] < 0.8 * single["tokens"]


def test_a_reference_computes_shared_prompts_once(folder):
    scorer = make_trainer(folder / "dense", "fsdp2_infer", needs=(*BASIC, hidden_states))
    found = found_by(case_reference_of_shared_prompts, folder)
    expected = scorer.logprobs(make_groups(1)).hidden_TH
    torch.testing.assert_close(found["hidden"], expected, rtol=1e-5, atol=5e-6)
    assert found["tokens"] < 0.8 * make_groups(1).num_tokens


def test_frozen_routers_stay_and_a_balancing_loss_adds_to_the_gradient_alone(folder):
    names = found_by(case_frozen_router, folder)["same"]
    assert names == [f"model.layers.{layer}.mlp.gate.weight" for layer in range(4)]
    found = found_by(case_balancing_loss, folder)
    assert found["losses"][0] == pytest.approx(found["losses"][1], abs=1e-6)
    assert abs(found["norms"][0] - found["norms"][1]) > 1e-4


def test_setup_says_what_does_not_fit(folder):
    messages = found_by(case_refused_setup, folder)
    assert "expected a multiple of 4" in messages["workers"]
    assert "overlap_grad_reduse" in messages["heads"] and "did you mean overlap_grad_reduce?" in messages["heads"]
    assert "expert_model_parallel_size: got 2, expected 1" in messages["experts"]
    assert "moe_grouped_gemm: got true, expected auto" in messages["experts"]
    assert "adam_eps" in messages["owned"] and "training_args.adam_epsilon" in messages["owned"]
    assert "num_layers: got 3" in messages["owned"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({TP: 3}, "tensor_model_parallel_size: got 3, expected a divisor of num_attention_heads 4"),
        ({PP: 3}, "pipeline_model_parallel_size: got 3, expected a divisor of num_hidden_layers 4 (nearest: 2)"),
        ({PP: 2, VPP: 3}, "= 6, expected a divisor of num_hidden_layers 4 (nearest: 4)"),
        ({PP: 3, "num_layers_in_first_pipeline_stage": 3}, "got 3, expected to leave equally many for 2"),
        ({PP: 2, "num_layers_in_last_pipeline_stage": 4}, "of 4 layers (nearest: 3)"),
        ({EP: 3}, "expert_model_parallel_size: got 3, expected a divisor of num_experts 4"),
        ({TP: 2}, "sequence_parallel: got false, expected true with experts"),
    ],
)
def test_model_that_does_not_fit_the_layout(options, expected):
    from transformers import Qwen3MoeConfig

    from roll.distributed.strategy.megatron.fit import check_model_fit

    config = Qwen3MoeConfig(
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2
    )
    problems = list(check_model_fit(config, MegatronConfig.model_validate(options)))
    assert any(expected in str(problem) for problem in problems), problems


def test_unknown_model_class_is_named():
    from transformers import GemmaConfig

    from roll.distributed.strategy.megatron.fit import check_model_fit

    with pytest.raises(ValueError, match=r"(?s)gemma.*LlamaForCausalLM"):
        list(check_model_fit(GemmaConfig(), MegatronConfig()))
