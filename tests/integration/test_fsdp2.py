"""``fsdp2_train``: the same step whatever the cutting, exact continuation, what is offloaded, and what is refused.

And ``optimizer: muon``: PyTorch's Muon on one rank, the same bits in every layout and after resuming; its matrices.
"""

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.algorithms.losses import build_policy_loss
from roll.algorithms.quantities import BASIC, Divergence, KlToReference, hidden_states
from roll.algorithms.types import LossContext, LossOutput, TokenScores
from roll.configs.algorithm import AlgorithmConfig
from roll.configs.pipeline import PARTS
from roll.configs.teacher import DivergenceConfig
from roll.data.batch import Batch
from roll.distributed.strategy.base import States, StrategyContext
from roll.distributed.strategy.fsdp2 import muon, strategy
from roll.distributed.strategy.fsdp2.muon import layer_matrices, number_format
from roll.distributed.strategy.fsdp2.strategy import Fsdp2Infer, Fsdp2Train
from roll.distributed.strategy.training.checkpoint import restore_checkpoint
from roll.distributed.strategy.training.module_trainer import use_liger_kernels
from roll.distributed.strategy.training.optim import ADAM_STATE, MASTER, MOMENTUM
from roll.models.loading import load_causal_lm
from tests.support.picture_models import make_picture_model
from tests.support.ranks import assert_near, exported, gathered, run_ranks, whole
from tests.support.sizes import save_random
from tests.support.trainers import (
    ENTROPY_COEF,
    TEMPERATURE,
    VOCABULARY,
    make_batch,
    nan_loss,
    policy_loss,
    with_reference,
)
from tests.support.trainers import make_context as context_of

KL_COV = {"pg_variant": "kl_cov", "ppo_kl_coef": 0.3}
FULL_KL = {"use_kl_loss": True, "kl_penalty": "full", "kl_loss_coef": 0.5}
ALGORITHM = AlgorithmConfig(**KL_COV, **FULL_KL, entropy_loss_coef=ENTROPY_COEF, loss_agg_mode="token-mean")
SHARDED = {"checkpoint": "sharded"}
SHARDS = "resume/actor_train/shards"


class ProbedTrain(Fsdp2Train):
    """Keeps the whole gradient of the last step, as it is before clipping."""

    gradient: dict[str, Tensor]

    def apply_gradients(self, rate: float, norm: float) -> None:
        weights = self.weights
        self.gradient = {
            name.removeprefix("model."): gathered(
                weights, name, replace(weights.spread(name, MASTER, torch.float32), own=lambda share=share: share.grad)
            )
            for name, share in weights.trained.items()
        }
        super().apply_gradients(rate, norm)


def make_model(path: Path, *, tied: bool = True) -> Path:
    return save_random(path, "Qwen2", VOCABULARY, 32, 48, 2, 4, 2, tie_word_embeddings=tied)


def make_context(model: Path, strategy: dict[str, Any] | None = None, **kwargs: Any) -> StrategyContext:
    kwargs["training_args"] = {"warmup_steps": 1, **kwargs.get("training_args", {})}
    return context_of(model, "fsdp2_train", strategy, **kwargs)


def make_trainer(model: Path, strategy: dict[str, Any] | None = None, **kwargs: Any) -> ProbedTrain:
    trainer = ProbedTrain(make_context(model, strategy, **kwargs))
    trainer.setup()
    return trainer


def sft_loss(scores: TokenScores, batch: Batch, context: LossContext) -> LossOutput:
    return LossOutput(-scores.logprobs_T.sum() / context.num_tokens)


def failing_loss(scores: TokenScores, batch: Batch, context: LossContext) -> LossOutput:
    output = policy_loss(scores, batch, context)
    if batch.num_sequences == 1:  # the last micro-batch: gradients of the others wait already
        raise RuntimeError("the loss broke")
    return output


def gradient_of_a_step(model: Path, batch: Batch) -> dict[str, Tensor]:
    """Of a trainer that has done nothing else."""
    trainer = make_trainer(model)
    trainer.train_step(batch, policy_loss)
    return trainer.gradient


def reference_algorithm_step(model_path: Path, batch: Batch) -> tuple[float, dict[str, Tensor], list[float]]:
    """Loss and gradient of ``ALGORITHM`` in float64, token by token, and the KL of the sampled tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path).double()
    start = model.lm_head.weight.detach().clone()
    total, divergences = torch.zeros((), dtype=torch.float64), []
    for row in range(batch.num_sequences):
        one = batch.select([row])
        logprobs = (model(one.tokens_T[None], use_cache=False).logits[0] / TEMPERATURE).log_softmax(-1)
        for i in one.loss_mask_T.nonzero().flatten().tolist():
            p = logprobs[i - 1]
            q = (one.ref_hidden_TH[i].double() @ start.T / TEMPERATURE).log_softmax(-1)
            d = p[one.tokens_T[i]] - one.old_logprobs_T[i]
            kl, entropy = (p.exp() * (p - q)).sum(), -(p.exp() * p).sum()
            stay = 0.3 * d.abs() if one.marked_T[i] else 0.0
            total = total - one.advantages_T[i] * d.exp() + stay + 0.5 * kl - ENTROPY_COEF * entropy
            divergences.append(kl.item())
    loss = total / batch.loss_mask_T.sum()
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}, divergences


def state_of(trainer: Fsdp2Train) -> dict[str, Tensor]:
    """All trained weights and the optimizer's states, whole (collective)."""
    weights = trainer.weights
    return {
        f"{name}.{kind}": whole(weights, name, kind).contiguous()
        for name in weights.trained
        for kind in (*weights.kinds(name), MASTER)
    }


def share_step(trainer: Fsdp2Train, seed: int) -> float:
    batch, info = make_batch(seed=seed), trainer.info
    rows = torch.arange(batch.num_sequences).tensor_split(info.dp_size)[info.dp_rank]
    return trainer.train_step(batch.select(rows), policy_loss)["actor/loss"]


CUTTINGS: dict[str, dict[str, Any]] = {
    "one by one": {"training_args": {"per_device_train_batch_size": 1}},
    "all at once": {"training_args": {"per_device_train_batch_size": 64}},
    "by tokens": {"worker": {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 30}},
    "rounded": {"worker": {"sequence_length_round_in_train": 8}},
    "packed": {"worker": {"use_sequence_packing": True}, "training_args": {"per_device_train_batch_size": 4}},
    "recomputed": {"model_args": {"disable_gradient_checkpointing": False}},
}


@pytest.fixture
def own_group() -> Iterator[None]:
    """Ends the process group that offloading and several sizes make in this process."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.mark.parametrize("cutting", CUTTINGS)
def test_the_training_pass_gives_the_old_logprobs_of_a_scoring_pass(model, cutting):
    """To the bit, since both see the same micro-batches here."""
    batch = make_batch()
    options = json.loads(json.dumps(CUTTINGS[cutting]))
    worker = options.get("worker", {})
    alike = {name.replace("_in_train", "_in_infer"): value for name, value in worker.items()}
    per_pass = options.get("training_args", {}).get("per_device_train_batch_size", 2)
    options["worker"] = worker | alike | {"infer_batch_size": per_pass}
    gradients = []
    for fresh in (True, False):
        trainer = make_trainer(model, **json.loads(json.dumps(options)))
        old_T = torch.zeros(batch.num_tokens) if fresh else trainer.logprobs(batch).logprobs_T
        known = batch.replace(old_logprobs_T=old_T, on_policy_B=torch.full((batch.num_sequences,), fresh))
        trainer.train_step(known, build_policy_loss(AlgorithmConfig()))
        gradients.append(trainer.gradient)
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


@pytest.mark.parametrize("cutting", CUTTINGS)
def test_gradient_with_kl_over_the_vocabulary_does_not_depend_on_the_cutting(model, untied_model, cutting):
    batch = with_reference(make_batch())
    path = untied_model if cutting == "packed" else model
    trainer = make_trainer(path, needs=(*BASIC, KlToReference()), **json.loads(json.dumps(CUTTINGS[cutting])))
    loss, gradient, divergences = reference_algorithm_step(path, batch)
    found = trainer.logprobs(batch).kl_T[batch.loss_mask_T]
    torch.testing.assert_close(found, torch.tensor(divergences), rtol=1e-5, atol=1e-6)
    metrics = trainer.train_step(batch, build_policy_loss(ALGORITHM))
    assert_near(trainer.gradient, gradient)
    assert metrics["actor/num_tokens"] == batch.num_tokens
    assert metrics["actor/loss"] == pytest.approx(loss, abs=1e-6)
    assert metrics["actor/kl_loss"] == pytest.approx(sum(divergences) / len(divergences), abs=1e-6)


def test_kl_to_the_reference_grows_from_zero_as_the_policy_learns(model):
    from transformers import AutoModelForCausalLM

    trainer = make_trainer(
        model,
        needs=(*BASIC, KlToReference()),
        training_args={"learning_rate": 1e-2, "warmup_steps": 0},
        max_grad_norm=1e9,
    )
    reference = Fsdp2Infer(make_context(model, role="reference", needs=(*BASIC, hidden_states)))
    reference.setup()
    batch = make_batch()
    scores = reference.logprobs(batch)
    batch = batch.replace(ref_hidden_TH=scores.hidden_TH, ref_logprobs_T=scores.logprobs_T)
    assert trainer.logprobs(batch).kl_T.abs().max() < 1e-6
    for _ in range(3):
        trainer.train_step(batch, sft_loss)
    found = trainer.logprobs(batch).kl_T
    start, now = (AutoModelForCausalLM.from_pretrained(model) for _ in range(2))
    now.load_state_dict(exported(trainer), strict=False)
    now.tie_weights()
    for row in range(batch.num_sequences):
        tokens = batch.token_index([row])
        ids = batch.tokens_T[tokens][None]
        with torch.no_grad():
            p, q = ((m(ids).logits[0, :-1].double() / TEMPERATURE).log_softmax(-1) for m in (now, start))
        expected = (p.exp() * (p - q)).sum(-1) * batch.loss_mask_T[tokens[1:]]
        torch.testing.assert_close(found[tokens[1:]].double(), expected, rtol=1e-4, atol=1e-5)
    assert found.max() > 0.01


def test_kl_over_the_vocabulary_needs_the_kept_output_layer(model):
    with pytest.raises(ValueError, match="kl_penalty 'full'"):
        make_trainer(model).train_step(with_reference(make_batch()), build_policy_loss(ALGORITHM))
    with pytest.raises(ValueError, match=r"kl_penalty 'full'.*kl_T"):
        batch = with_reference(make_batch()).replace(ref_hidden_TH=None)
        make_trainer(model, needs=(*BASIC, KlToReference())).train_step(batch, build_policy_loss(ALGORITHM))


def test_shards_start_the_moments_anew_where_these_are_not_loaded(untied_model, tmp_path):
    trainer = make_trainer(untied_model, SHARDED)
    share_step(trainer, 0)
    trainer.save(tmp_path)
    resumed = make_trainer(untied_model, loads=frozenset({"model", "rng"}))
    resumed.load(tmp_path)
    state, saved = state_of(resumed), state_of(trainer)
    assert all(tensor.equal(saved[name]) for name, tensor in state.items() if name.endswith(MASTER))
    assert not any(tensor.any() for name, tensor in state.items() if name.endswith(ADAM_STATE))


@pytest.mark.parametrize("parts", [PARTS, ("model", "rng")])
def test_shards_are_no_checkpoint_of_another_engine(untied_model, tmp_path, parts):
    trainer = make_trainer(untied_model, SHARDED)
    trainer.save(tmp_path)
    with pytest.raises(ValueError, match="it holds shards of actor_train; expected the strategy that wrote them"):
        restore_checkpoint(tmp_path, "actor_train", trainer.trained, parts)  # as other engines do


def test_offloaded_activations_change_nothing(untied_model, monkeypatch):
    monkeypatch.setattr(strategy, "MIN_BYTES", 0)
    results = []
    for offload in (False, True):
        args = {"model_args": {"disable_gradient_checkpointing": False}}
        trainer = make_trainer(untied_model, {"activation_offload": offload}, **args)
        share_step(trainer, 0)
        results.append(trainer.gradient)
    assert_near(results[1], results[0], 0.0)


@pytest.mark.parametrize(
    ("config", "model_args", "message"),
    [
        ({}, {"dtype": "fp16"}, "fp16"),
        ({"tensor_parallel_size": 3}, {}, "tensor_parallel_size: 3, expected a divisor of the 1 workers"),
        ({}, {"ulysses_size": 2}, "ulysses_size: 2, expected a divisor of the 1 workers"),
        ({"fsdp_size": 2, "cpu_offload": True}, {}, "fsdp_size: 2, expected a divisor of the 1 workers"),
        pytest.param(
            {},
            {"use_liger_kernel": True},
            "use_liger_kernel: true, expected false on a machine without a GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU"),
        ),
    ],
)
def test_what_cannot_be_set_up_is_refused(model, own_group, config, model_args, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(model, config, model_args=model_args)


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="liger-kernel is installed")
def test_missing_liger_kernels_name_the_extra(untied_model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ImportError, match=r"use_liger_kernel.*roll-rl\[liger\]"):
        use_liger_kernels(load_causal_lm(str(untied_model)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_saved_model_loads_in_transformers_and_continues_exactly(model, tmp_path, dtype):
    from transformers import AutoModelForCausalLM

    trainer = make_trainer(model, model_args={"dtype": dtype})
    batch = make_batch()
    trainer.train_step(batch, policy_loss)
    trainer.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "actor_train")
    assert loaded.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    mine, theirs = exported(trainer), loaded.state_dict()
    assert set(theirs) - set(mine) == {"lm_head.weight"}, "tied weights go out once"
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    assert not list(tmp_path.rglob("*.pt")) + list(tmp_path.rglob("*.bin"))

    resumed = make_trainer(model, model_args={"dtype": dtype})
    resumed.load(tmp_path)
    for each in (trainer, resumed):
        each.train_step(make_batch(seed=1), policy_loss)
    assert_near(exported(resumed), exported(trainer), 0.0)
    assert resumed.optimizer_steps == 2


def test_a_checkpoint_of_the_model_alone_starts_the_moments_anew(model, tmp_path):
    trainer = ProbedTrain(replace(make_context(model), saves=frozenset({"model"})))
    trainer.setup()
    trainer.train_step(make_batch(), policy_loss)
    trainer.save(tmp_path)
    assert [file.name for file in (tmp_path / "resume" / "actor_train").iterdir()] == ["trainer.json"]
    with pytest.raises(ValueError, match=r"saved without rng and optimizer; .*load_contents: \[model\]"):
        trainer.load(tmp_path)

    resumed = ProbedTrain(replace(make_context(model), loads=frozenset({"model"})))
    resumed.setup()
    resumed.load(tmp_path)
    assert_near(exported(resumed), exported(trainer), 0.0)
    assert resumed.optimizer_steps == 1, "the place in the schedule"
    for state in resumed.weights.optimizer.state.values():
        assert state["step"] == 0 and not state["exp_avg"].any() and not state["exp_avg_sq"].any()


def test_loading_restores_the_generator(model, tmp_path):
    trainer = make_trainer(model)
    trainer.save(tmp_path)
    expected = torch.rand(3)
    trainer.load(tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_skipped_step_leaves_weights_and_schedule(model):
    trainer = make_trainer(model)
    before = exported(trainer)
    metrics = trainer.train_step(make_batch(), nan_loss)
    assert metrics["actor/skipped_steps"] == 1
    assert trainer.optimizer_steps == 0
    assert_near(exported(trainer), before, 0.0)
    batch = make_batch()
    trainer.train_step(batch, policy_loss)
    assert_near(trainer.gradient, gradient_of_a_step(model, batch))
    unlearned = batch.replace(loss_mask_T=torch.zeros_like(batch.loss_mask_T))
    assert make_trainer(model).train_step(unlearned, policy_loss)["actor/skipped_steps"] == 1


def test_the_rows_of_an_episode_that_branched_count_as_one_sequence(model):
    seen = []

    def watched(scores: TokenScores, batch: Batch, context: LossContext) -> LossOutput:
        seen.append(context)
        return policy_loss(scores, batch, context)

    batch = make_batch()
    sampled_B = torch.zeros(batch.num_sequences).index_add(0, batch.rows_T, batch.loss_mask_T.float())
    first_two = sampled_B[:2] / sampled_B[:2].sum()
    sample_weight_B = torch.cat([first_two, torch.ones(batch.num_sequences - 2)]).double()
    make_trainer(model).train_step(batch.replace(sample_weight_B=sample_weight_B), watched)
    assert seen[0].num_sequences == pytest.approx(batch.num_sequences - 1)
    assert seen[0].max_length == pytest.approx(max(sampled_B[:2].sum(), sampled_B[2:].max()).item())


def test_l2_penalty_is_added_to_the_loss(model):
    batch = make_batch()
    plain, penalised = make_trainer(model), make_trainer(model, l2=0.01)
    weights = exported(plain)
    losses = [trainer.train_step(batch, policy_loss)["actor/loss"] for trainer in (plain, penalised)]
    square = sum(float(w.double().square().sum()) for w in weights.values())
    assert losses[1] - losses[0] == pytest.approx(0.01 * square, rel=1e-5)
    expected = {name: plain.gradient[name] + 0.02 * weight for name, weight in weights.items()}
    assert_near(penalised.gradient, expected)


def test_offloaded_states_must_come_back_before_use_and_the_optimizer_can_start_again(model):
    trainer = make_trainer(model)
    trainer.offload(States.OPTIMIZER)
    trainer.logprobs(make_batch())
    with pytest.raises(RuntimeError, match="OPTIMIZER is offloaded"):
        trainer.train_step(make_batch(), policy_loss)
    trainer.onload(States.ALL)
    assert trainer.train_step(make_batch(), policy_loss)["actor/skipped_steps"] == 0
    trainer = make_trainer(model)
    first = trainer.train_step(make_batch(), policy_loss)
    trainer.reset_optimizer()
    assert trainer.train_step(make_batch(), policy_loss)["actor/lr"] == first["actor/lr"]


def test_moved_parameters_are_still_the_ones_that_are_trained(model):
    trainer, moved = make_trainer(model), make_trainer(model)
    moved.weights.move(torch.device("cpu"))
    for each in (trainer, moved):
        each.train_step(make_batch(), policy_loss)
    assert_near(exported(moved), exported(trainer), 0.0)


def test_failed_step_leaves_no_gradient_behind(model):
    trainer, batch = make_trainer(model), make_batch()
    with pytest.raises(RuntimeError, match="the loss broke"):
        trainer.train_step(batch, failing_loss)
    trainer.train_step(batch, policy_loss)
    assert_near(trainer.gradient, gradient_of_a_step(model, batch))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "resume" / "actor_train" / "trainer.json").unlink(), "no trainer.json"),
        (lambda folder: next((folder / "resume" / "actor_train" / "optimizer").iterdir()).unlink(), "no safetensors"),
        (lambda folder: (folder / "actor_train" / "model.safetensors").unlink(), "no model.safetensors in it"),
    ],
)
def test_incomplete_checkpoint_is_refused(model, tmp_path, break_it, message):
    trainer = make_trainer(model)
    trainer.save(tmp_path)
    break_it(tmp_path)
    with pytest.raises(ValueError, match=message):
        trainer.load(tmp_path)


def test_lone_worker_can_offload_to_the_cpu(model, own_group):
    trainer, batch = make_trainer(model, {"cpu_offload": True}), make_batch()
    trainer.train_step(batch, policy_loss)
    assert_near(trainer.gradient, gradient_of_a_step(model, batch))


def test_log_probabilities_of_a_teacher_are_not_rounded_to_the_models_format(model, own_group):
    config = DivergenceConfig(kd_objective="forward_kl", logits_topk=2)
    needs = (*BASIC, Divergence(config, TEMPERATURE))
    trainer = make_trainer(model, {"cpu_offload": True}, model_args={"dtype": "bf16"}, needs=needs)
    batch = make_batch()
    ids_TK = torch.tensor([[3, 5]], dtype=torch.int32).expand(batch.num_tokens, 2)
    top_TK = torch.tensor([[0.567, 0.321]]).log().expand(batch.num_tokens, 2)
    tail_T = torch.tensor([0.112]).log().expand(batch.num_tokens)
    exact = batch.replace(teacher_ids_TK=ids_TK, teacher_top_TK=top_TK, teacher_tail_T=tail_T)
    rounded = exact.replace(teacher_top_TK=top_TK.bfloat16().float(), teacher_tail_T=tail_T.bfloat16().float())
    found, other = (trainer.logprobs(each).divergence_T for each in (exact, rounded))
    assert (found - other)[batch.loss_mask_T].abs().min() > 1e-4


# ---- Muon

LAYOUTS: dict[str, dict[str, Any]] = {
    "four": {},
    "groups": {"fsdp_size": 2},
    "tensor": {"tensor_parallel_size": 2},
    "replicas": {"fsdp_size": 1},
    "offload": {"cpu_offload": True},
}
STEPS = 2
# Without clipping: the gradient's norm is a sum over shares, which rounds differently in each layout.
MUON: dict[str, Any] = {"training_args": {"optimizer": "muon"}, "max_grad_norm": 0.0}


def given_steps(trainer: Fsdp2Train) -> dict[str, Tensor]:
    """The state after steps with gradients that are drawn, not computed (collective)."""
    weights, generator = trainer.weights, torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for name, share in weights.trained.items():
            gradient = torch.randn(weights.shape(name), generator=generator)
            share.grad = weights.share(name, gradient).to(share.device).clone()
        trainer._gradients = []
        trainer.apply_gradients(0.01, 0.0)
    return state_of(trainer)


def train(trainer: Fsdp2Train, *, seeds: range = range(STEPS)) -> dict[str, Tensor]:
    """The state after steps whose samples the first rank has alone: a sum over ranks adds zeros."""
    for seed in seeds:
        batch = make_batch(seed=seed)
        rows = range(batch.num_sequences) if trainer.info.dp_rank == 0 else []
        trainer.train_step(batch.select(list(rows)), policy_loss)
    return state_of(trainer)


def ranks_main(rank: int, folder: Path, model: Path) -> dict[str, dict[str, Tensor]]:
    """The states by layout, and by kind of checkpoint."""
    states = {}
    for name, config in LAYOUTS.items():
        states[name] = given_steps(make_trainer(model, config, rank=rank, world_size=4, **MUON))
    for name, config in {"trained": {}, "sharded": {"checkpoint": "sharded"}}.items():
        trainer = make_trainer(model, config, rank=rank, world_size=4, **MUON)
        states[name] = train(trainer)
        trainer.save(folder / f"checkpoint-{name}")
        resumed = make_trainer(model, config, rank=rank, world_size=4, **MUON)
        resumed.load(folder / f"checkpoint-{name}")
        pair = [train(each, seeds=range(STEPS, STEPS + 1)) for each in (trainer, resumed)]
        assert_near(pair[1], pair[0], 0.0)
    return states


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Shares of whole vector registers: what is left over, AdamW's kernel rounds in another way.
    path = tmp_path_factory.mktemp("small")
    return save_random(path, "Qwen2", VOCABULARY, 128, 192, 2, 4, 4, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory, wide_model: Path) -> tuple[Path, dict[str, dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("muon")
    return folder, run_ranks(ranks_main, 4, folder, wide_model)[0]


def test_one_rank_steps_as_pytorch_does(wide_model, monkeypatch):
    monkeypatch.setattr(muon, "number_format", lambda _: torch.bfloat16)  # as PyTorch's has on a CPU too
    trainer = make_trainer(wide_model, **MUON)
    weights, chosen = trainer.weights, layer_matrices(trainer.weights)
    assert {name.rpartition(".layers.")[2].split(".", 1)[1] for name in chosen} == {
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    }
    copies = {name: torch.nn.Parameter(share.detach().clone()) for name, share in weights.trained.items()}
    others = [copies[name] for name in copies if name not in chosen]
    theirs = [
        torch.optim.Muon([copies[n] for n in chosen], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for p in others if p.ndim > 1], lr=0.01, weight_decay=0.1, fused=True),
        torch.optim.AdamW([p for p in others if p.ndim < 2], lr=0.01, weight_decay=0.0, fused=True),
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for copy in copies.values():
            copy.grad = torch.randn(copy.shape, generator=generator)
        for optimizer in theirs:
            optimizer.step()
    found = given_steps(trainer)
    assert_near({name: found[f"{name}.{MASTER}"] for name in copies}, {n: c.detach() for n, c in copies.items()}, 0.0)
    for name in copies:
        assert weights.kinds(name) == ([MOMENTUM] if name in chosen else [*ADAM_STATE])


def test_the_iteration_has_sixteen_bits_on_gpus_alone():
    formats = {kind: number_format(torch.device(kind)) for kind in ("cpu", "cuda")}
    assert formats == {"cpu": torch.float32, "cuda": torch.bfloat16}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_matrices_of_a_tower_and_its_projector_are_among_them(tmp_path, family):
    path = make_picture_model(tmp_path / "model", family)
    context = make_context(path, training_args={"optimizer": "muon"})
    trainer = Fsdp2Train(replace(context, pictures=True))
    trainer.setup()
    chosen = [name for name in layer_matrices(trainer.weights) if ".visual." in name]
    matrices = {name: p for name, p in trainer.weights.parameters.items() if ".visual." in name and p.ndim == 2}
    assert {name for name in matrices if "pos_embed" not in name} == {*chosen}
    assert any("merger" in name for name in chosen) and any("blocks" in name for name in chosen)


@pytest.mark.slow  # four processes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_steps_as_one_rank_does(four_ranks, wide_model, layout):
    assert_near(four_ranks[1][layout], given_steps(make_trainer(wide_model, **MUON)), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trained", "sharded"])
def test_four_ranks_train_and_resume_as_one(four_ranks, wide_model, name):
    folder, states = four_ranks
    trainer = make_trainer(wide_model, **MUON)
    state = train(trainer)
    assert_near(states[name], state, 0.0)
    if name == "trained":
        resumed = make_trainer(wide_model, **MUON)
        resumed.load(folder / f"checkpoint-{name}")
        assert_near(state_of(resumed), state, 0.0)
        pair = [train(each, seeds=range(STEPS, STEPS + 1)) for each in (trainer, resumed)]
        assert_near(pair[1], pair[0], 0.0)


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path, wide_model):
    trainer = make_trainer(wide_model, **MUON)
    trainer.save(tmp_path)
    other = make_trainer(wide_model, max_grad_norm=0.0)
    with pytest.raises(ValueError, match=r"its optimizer has exp_avg, exp_avg_sq, momentum_buffer; expected exp_avg, "):
        other.load(tmp_path)
