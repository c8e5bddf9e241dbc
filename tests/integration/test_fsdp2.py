"""``fsdp2_train``: the same step whatever the cutting, the sharding and the number of processes; exact continuation."""

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from roll.algorithms.losses import build_policy_loss
from roll.algorithms.quantities import BASIC, Divergence, KlToReference, hidden_states
from roll.algorithms.types import LossContext, LossOutput, TokenScores
from roll.configs.algorithm import AlgorithmConfig
from roll.configs.engines import packages
from roll.configs.teacher import DivergenceConfig
from roll.data.batch import Batch
from roll.distributed.strategy import STRATEGIES
from roll.distributed.strategy.base import States, StrategyContext
from roll.distributed.strategy.fsdp2.strategy import Fsdp2Infer, Fsdp2Train
from roll.distributed.strategy.training.optim import MASTER
from tests.support.choice import slow_but
from tests.support.harness import make_model as make_scoring_model
from tests.support.ranks import (
    assert_near,
    assert_same_files,
    enter_rank,
    exported,
    gathered,
    leave_rank,
    run_ranks,
    wanted,
    write,
)
from tests.support.sizes import sizes
from tests.support.trainers import TEMPERATURE, VOCABULARY, make_batch, shares
from tests.support.trainers import make_context as context_of

ENTROPY_COEF = 0.01
KL_COV = {"pg_variant": "kl_cov", "ppo_kl_coef": 0.3}
FULL_KL = {"use_kl_loss": True, "kl_penalty": "full", "kl_loss_coef": 0.5}
ALGORITHM = AlgorithmConfig(**KL_COV, **FULL_KL, entropy_loss_coef=ENTROPY_COEF, loss_agg_mode="token-mean")
SHARDINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "keep": {"reshard_after_forward": False},
    "offload": {"cpu_offload": True},
    "replica": {"fsdp_size": 1},
}
NAMES = slow_but(("full", "replica"), SHARDINGS)
"""Offloaded weights and moments take the same steps in ``tests/parity`` (``offload2``)."""


class ProbedTrain(Fsdp2Train):
    """Keeps the whole gradient of the last step, as it is before clipping."""

    gradient: dict[str, Tensor]

    def apply_gradients(self, rate: float, norm: float) -> None:
        weights = self.weights
        self.gradient = {
            name.removeprefix("model."): gathered(
                weights, name, replace(weights.spread(name, MASTER, torch.float32), own=lambda share=share: share.grad)
            )
            for name, share in weights.local.items()
        }
        super().apply_gradients(rate, norm)


def make_model(path: Path, *, tied: bool = True, **kwargs: Any) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        **sizes(VOCABULARY, 32, 48, 2, 4, 2), tie_word_embeddings=tied, initializer_range=0.1, **kwargs
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def with_reference(batch: Batch, seed: int = 0) -> Batch:
    """Adds what ``ALGORITHM`` reads. The hidden states are no model's: the KL to them is far from 0 from the start."""
    generator = torch.Generator().manual_seed(100 + seed)
    mask_T = batch.loss_mask_T
    return batch.replace(
        old_logprobs_T=(torch.randn(batch.num_tokens, generator=generator) * 0.3 - 4) * mask_T,
        marked_T=(torch.rand(batch.num_tokens, generator=generator) < 0.5) & mask_T,
        ref_hidden_TH=torch.randn(batch.num_tokens, 32, generator=generator) * mask_T[:, None],
    )


def policy_loss(scores: TokenScores, batch: Batch, context: LossContext) -> LossOutput:
    if scores.values_T is not None:
        error = (scores.values_T - batch.advantages_T)[batch.loss_mask_T].square().sum() / context.num_tokens
        return LossOutput(error, {"critic/error": error.detach()})
    assert scores.logprobs_T is not None and scores.entropy_T is not None
    gain_T = batch.advantages_T * scores.logprobs_T + ENTROPY_COEF * scores.entropy_T
    loss = -gain_T[batch.loss_mask_T].sum() / context.num_tokens
    return LossOutput(loss, {"actor/entropy": scores.entropy_T.detach().sum() / context.num_tokens})


def nan_loss(scores: TokenScores, batch: Batch, context: LossContext) -> LossOutput:
    output = policy_loss(scores, batch, context)
    return LossOutput(output.loss * math.nan if batch.num_sequences > 1 else output.loss, output.metrics)


def make_context(model: Path, strategy: dict[str, Any] | None = None, **kwargs: Any) -> StrategyContext:
    kwargs["training_args"] = {"warmup_steps": 1, **kwargs.get("training_args", {})}
    return context_of(model, "fsdp2_train", strategy, **kwargs)


def make_trainer(model: Path, strategy: dict[str, Any] | None = None, **kwargs: Any) -> ProbedTrain:
    trainer = ProbedTrain(make_context(model, strategy, **kwargs))
    trainer.setup()
    return trainer


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


CUTTINGS: dict[str, dict[str, Any]] = {
    "one by one": {"training_args": {"per_device_train_batch_size": 1}},
    "all at once": {"training_args": {"per_device_train_batch_size": 64}},
    "by tokens": {"worker": {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 30}},
    "rounded": {"worker": {"sequence_length_round_in_train": 8}},
    "packed": {"worker": {"use_sequence_packing": True}, "training_args": {"per_device_train_batch_size": 4}},
    "recomputed": {"model_args": {"disable_gradient_checkpointing": False}},
}


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


# ---- two processes: one start, many scenarios; each leaves files that the tests below judge


def reference_shares(step: int) -> list[Batch]:
    """``shares`` with what ``ALGORITHM`` reads."""
    whole = with_reference(make_batch(seed=step), seed=step)
    rows = torch.arange(whole.num_sequences)
    cut = shares(step)[0].num_sequences
    return [whole.select(rows[:cut]), whole.select(rows[cut:])]


def run_sharding(folder: Path, model: Path, name: str, rank: int) -> None:
    options: dict[str, Any] = {"rank": rank, "world_size": 2}
    recompute = {"disable_gradient_checkpointing": name == "replica"}
    trainer = make_trainer(model, SHARDINGS[name], model_args=recompute, **options)
    out = folder / f"{name}-{rank}"
    out.mkdir()
    for step in range(3):
        trainer.logprobs(shares(step)[rank])
        trainer.train_step(shares(step)[rank], policy_loss)
        if step == 1:
            trainer.save(folder / f"{name}-checkpoint")
            saving = trainer.start_save(folder / f"{name}-beside")
    saving.result()
    write(out, "final", exported(trainer))
    metrics = trainer.train_step(shares(0)[rank], nan_loss)
    write(out, "after_nan", exported(trainer), metrics)
    resumed = make_trainer(model, SHARDINGS[name], model_args=recompute, **options)
    resumed.logprobs(shares(0)[rank])  # must leave no stale gathered weights behind
    resumed.load(folder / f"{name}-checkpoint")
    resumed.train_step(shares(2)[rank], policy_loss)
    write(out, "resumed", exported(resumed))


def run_others(folder: Path, model: Path, rank: int) -> None:
    """A critic, a reference in half precision, and a checkpoint that cannot be written, beside training neither."""
    options = {"rank": rank, "world_size": 2}
    critic = make_trainer(model, {}, head="value", role="critic", **options)
    for step in range(2):
        critic.train_step(shares(step)[rank], policy_loss)
    critic.save(folder / "critic")
    write(folder, f"values{rank}", {"values": critic.logprobs(shares(1)[rank]).values_T})
    reference = Fsdp2Infer(make_context(model, model_args={"dtype": "bf16"}, needs=(*BASIC, hidden_states), **options))
    reference.setup()
    scores = reference.logprobs(shares(1)[rank])
    write(folder, f"reference{rank}", {"logprobs": scores.logprobs_T, "hidden": scores.hidden_TH})
    for name in ("full", "replica"):
        trainer = make_trainer(model, SHARDINGS[name], needs=(*BASIC, KlToReference()), **options)
        for step in range(2):
            batch = reference_shares(step)[rank]
            write(folder, f"algorithm-{name}-kl{step}-{rank}", {"kl": trainer.logprobs(batch).kl_T})
            metrics = trainer.train_step(batch, build_policy_loss(ALGORITHM))
            write(folder, f"algorithm-{name}-{step}-{rank}", trainer.gradient, metrics)
    (folder / "occupied").write_text("a file, not a folder")
    for number, save in enumerate((critic.save, lambda path: critic.start_save(path).result())):
        try:
            save(folder / "occupied")
        except OSError as error:
            (folder / f"error{rank}-{number}").write_text(str(error))


def rank_main(rank: int, port: int, folder: Path, model: Path, names: list[str]) -> None:
    enter_rank(port)
    for name in names:
        run_sharding(folder, model, name, rank)
    run_others(folder, model, rank)
    leave_rank()


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, untied_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("two_ranks")
    run_ranks(rank_main, 2, folder, untied_model, wanted(request, "name"))
    return folder


@pytest.fixture(scope="module")
def alone(untied_model: Path) -> dict[str, Tensor]:
    """The weights after three steps of one process."""
    trainer = make_trainer(untied_model)
    for step in range(3):
        trainer.train_step(make_batch(seed=step), policy_loss)
    return exported(trainer)


@pytest.mark.parametrize("name", NAMES)
def test_every_sharding_ends_with_the_same_weights(two_ranks, alone, name):
    assert_near(load_file(two_ranks / f"{name}-0/final.safetensors"), alone, 2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(two_ranks, name):
    final, resumed = (load_file(two_ranks / f"{name}-0/{kind}.safetensors") for kind in ("final", "resumed"))
    assert_near(resumed, final, 0.0)


def test_checkpoint_of_two_ranks_continues_on_one(two_ranks, untied_model):
    trainer = make_trainer(untied_model)
    trainer.load(two_ranks / "full-checkpoint")
    trainer.train_step(make_batch(seed=2), policy_loss)
    assert_near(exported(trainer), load_file(two_ranks / "full-0/final.safetensors"), 2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_nan_on_one_rank_skips_the_step_on_both(two_ranks, name):
    assert_near(
        load_file(two_ranks / f"{name}-0/after_nan.safetensors"),
        load_file(two_ranks / f"{name}-0/final.safetensors"),
        0.0,
    )
    for rank in range(2):
        metrics = json.loads((two_ranks / f"{name}-{rank}/after_nan.json").read_text())
        assert metrics["actor/skipped_steps"] == 1
        assert "actor/loss" not in metrics


def test_only_rank_0_receives_weight_buckets(two_ranks):
    assert not load_file(two_ranks / "full-1/final.safetensors")


@pytest.mark.parametrize("strategy", ["fsdp2_infer", "megatron_infer"])
@pytest.mark.parametrize("head", ["value", "score"])
def test_a_head_is_found_in_a_folder_at_home(strategy, head, tmp_path, monkeypatch):
    package = packages().get(strategy)
    if package is not None and not package.installed:
        pytest.skip(f"{package.module} is not installed")
    make_scoring_model(tmp_path / "classifier", "qwen2_scores")
    monkeypatch.setenv("HOME", str(tmp_path))
    values = []
    for path in (tmp_path / "classifier", Path("~/classifier")):
        critic: Any = STRATEGIES.get(strategy)(context_of(path, strategy, head=head))
        critic.setup()
        values.append(critic.logprobs(make_batch()).values_T)
    assert values[0].any() and torch.equal(*values)


def test_critic_of_two_ranks_scores_the_same_on_one(two_ranks):
    critic = Fsdp2Infer(make_context(two_ranks / "critic" / "critic", head="value"))
    critic.setup()
    values = critic.logprobs(make_batch(seed=1)).values_T
    found = torch.cat([load_file(two_ranks / f"values{rank}.safetensors")["values"] for rank in range(2)])
    assert values.abs().max() > 0
    torch.testing.assert_close(values, found, rtol=0, atol=1e-5)


def test_bf16_reference_is_near_fp32(two_ranks, untied_model):
    reference = Fsdp2Infer(make_context(untied_model, needs=(*BASIC, hidden_states)))
    reference.setup()
    reference_scores = reference.logprobs(make_batch(seed=1))
    parts = [load_file(two_ranks / f"reference{rank}.safetensors") for rank in range(2)]
    found = torch.cat([part["logprobs"] for part in parts])
    torch.testing.assert_close(found, reference_scores.logprobs_T, rtol=0, atol=0.1)
    hidden = torch.cat([part["hidden"] for part in parts])  # rank 1 had nothing to score
    torch.testing.assert_close(hidden, reference_scores.hidden_TH, rtol=0, atol=0.1)


@pytest.mark.parametrize("name", ["full", "replica"])
def test_two_ranks_take_the_same_step_with_kl_over_the_vocabulary(two_ranks, untied_model, name):
    trainer = make_trainer(untied_model, needs=(*BASIC, KlToReference()))
    for step in range(2):
        batch = with_reference(make_batch(seed=step), seed=step)
        found = [load_file(two_ranks / f"algorithm-{name}-kl{step}-{rank}.safetensors")["kl"] for rank in range(2)]
        torch.testing.assert_close(torch.cat(found), trainer.logprobs(batch).kl_T, rtol=1e-5, atol=2e-5)
        metrics = trainer.train_step(batch, build_policy_loss(ALGORITHM))
        if step == 0:
            loss, gradient, _ = reference_algorithm_step(untied_model, batch)
            assert_near(trainer.gradient, gradient)
            assert metrics["actor/loss"] == pytest.approx(loss, abs=1e-6)
        for rank in range(2):
            path = two_ranks / f"algorithm-{name}-{step}-{rank}"
            assert_near(load_file(path.with_suffix(".safetensors")), trainer.gradient, 1e-6 if step == 0 else 1e-5)
            written = json.loads(path.with_suffix(".json").read_text())
            for key in ("actor/loss", "actor/kl_loss", "actor/pg_loss", "actor/grad_norm"):
                assert written[key] == pytest.approx(metrics[key], abs=2e-5), key


def test_failed_write_is_an_error_on_every_rank(two_ranks):
    for number, rank in product(range(2), range(2)):
        assert "occupied" in (two_ranks / f"error{rank}-{number}").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_save_beside_training_is_of_the_step_that_it_began_at(two_ranks, name):
    assert_same_files(two_ranks / f"{name}-beside", two_ranks / f"{name}-checkpoint")


# ---- one process


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


def sft_loss(scores: TokenScores, batch: Batch, context: LossContext) -> LossOutput:
    return LossOutput(-scores.logprobs_T.sum() / context.num_tokens)


def failing_loss(scores: TokenScores, batch: Batch, context: LossContext) -> LossOutput:
    output = policy_loss(scores, batch, context)
    if batch.num_sequences == 1:  # the last micro-batch: gradients of the others wait already
        raise RuntimeError("the loss broke")
    return output


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


def test_training_in_fp16_is_refused(model):
    with pytest.raises(ValueError, match="fp16"):
        make_trainer(model, model_args={"dtype": "fp16"})


def test_lone_worker_can_offload_to_the_cpu(model):
    trainer = make_trainer(model, {"cpu_offload": True})
    try:
        batch = make_batch()
        trainer.train_step(batch, policy_loss)
        assert_near(trainer.gradient, gradient_of_a_step(model, batch))
    finally:
        torch.distributed.destroy_process_group()


def test_log_probabilities_of_a_teacher_are_not_rounded_to_the_models_format(model):
    config = DivergenceConfig(kd_objective="forward_kl", logits_topk=2)
    needs = (*BASIC, Divergence(config, TEMPERATURE))
    trainer = make_trainer(model, {"cpu_offload": True}, model_args={"dtype": "bf16"}, needs=needs)
    try:
        batch = make_batch()
        ids_TK = torch.tensor([[3, 5]], dtype=torch.int32).expand(batch.num_tokens, 2)
        top_TK = torch.tensor([[0.567, 0.321]]).log().expand(batch.num_tokens, 2)
        tail_T = torch.tensor([0.112]).log().expand(batch.num_tokens)
        exact = batch.replace(teacher_ids_TK=ids_TK, teacher_top_TK=top_TK, teacher_tail_T=tail_T)
        rounded = exact.replace(teacher_top_TK=top_TK.bfloat16().float(), teacher_tail_T=tail_T.bfloat16().float())
        found, other = (trainer.logprobs(each).divergence_T for each in (exact, rounded))
        assert (found - other)[batch.loss_mask_T].abs().min() > 1e-4
    finally:
        torch.distributed.destroy_process_group()
