"""What several ranks do, whatever the trainer, is what ``fsdp2_train`` does in one process.

Steps of uneven shares, checkpoints, skipped steps, critics, references, adapters and KL terms; and FSDP2's checkpoints
in shards. The two processes start once and leave files that the tests judge; four go on with what they saved.
"""

import math
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from roll.algorithms.losses import build_policy_loss
from roll.algorithms.quantities import BASIC, KlToReference, hidden_states
from roll.algorithms.types import LossContext, LossOutput, TokenScores
from roll.data.batch import Batch
from roll.distributed.strategy import STRATEGIES
from roll.distributed.strategy.base import Metrics, States
from roll.distributed.strategy.training.optim import ADAM_STATE, MASTER
from roll.distributed.strategy.training.tensor_files import StoredTensors
from roll.models import scoring
from roll.models.lora import LoraSpec
from tests.integration.test_fsdp2 import (
    ALGORITHM,
    SHARDED,
    SHARDS,
    ProbedTrain,
    make_model,
    make_trainer,
    share_step,
    state_of,
)
from tests.support.choice import installed, needs, slow_but
from tests.support.harness import make_groups
from tests.support.layouts_deepspeed import CPU, zero
from tests.support.layouts_megatron import CP, PP, TP
from tests.support.ranks import (
    assert_near,
    assert_same_files,
    exported,
    exported_adapter,
    metrics_of,
    recorded_warnings,
    run_ranks,
    tensors_of,
    wanted,
    whole,
    write,
)
from tests.support.sizes import save_random
from tests.support.trainers import VOCABULARY, make_batch, make_context, nan_loss, policy_loss, shares, with_reference

Row = tuple[str, dict[str, Any]]
ALONE: Row = ("fsdp2_train", {})
ZERO3_OFFLOAD = zero(3, offload_optimizer=CPU, offload_param=CPU)
CASES: dict[str, Row] = {
    "full": ("fsdp2_train", {}),
    "keep": ("fsdp2_train", {"reshard_after_forward": False}),
    "offload": ("fsdp2_train", {"cpu_offload": True}),
    "replica": ("fsdp2_train", {"fsdp_size": 1}),
    "zero0": ("deepspeed_train", zero(0)),
    "zero1": ("deepspeed_train", zero(1)),
    "zero2-offload": ("deepspeed_train", zero(2, offload_optimizer=CPU)),
    "zero3": ("deepspeed_train", zero(3, stage3_param_persistence_threshold=40)),
    "zero3-offload": ("deepspeed_train", ZERO3_OFFLOAD),
    "tp": ("megatron_train", {TP: 2, "sequence_parallel": True}),
    "pp": ("megatron_train", {PP: 2}),
    "cp": ("megatron_train", {CP: 2}),
}
QUICK = ("full", "replica", "zero3", "tp", "pp")
"""What ``make test`` runs; offloaded weights and moments take the same steps in ``tests/parity`` (``offload2``)."""
QUICK_CRITICS = ("full", "zero3-offload", "pp")
NEAR = {"odd": 5e-6, "tied": 2e-6}
SCORERS: dict[str, Row] = {
    "fsdp2": ("fsdp2_infer", {}),
    "zero3": ("deepspeed_infer", ZERO3_OFFLOAD),
    "whole": ("deepspeed_infer", {}),
}
SHARING: dict[str, Row] = {"zero1": CASES["zero1"], "zero3": CASES["zero3"], "infer": ("deepspeed_infer", zero(3))}
ENGINES = {name: strategy for name, (strategy, _) in (CASES | SCORERS | SHARING).items()}
LORA = LoraSpec(rank=3, alpha=6, targets=("q_proj", "down_proj"))
LAYOUTS: dict[str, dict[str, Any]] = {
    "four": {},
    "groups": {"fsdp_size": 2},
    "tensor": {"tensor_parallel_size": 2},
    "whole replicas": {"fsdp_size": 1},
}


class FailingLoss:
    """Fails in the second micro-batch of a step, when there are gradients of the first."""

    calls = 0

    def __call__(self, scores: TokenScores, batch: Batch, context: LossContext) -> LossOutput:
        self.calls += 1
        if self.calls == 2:
            raise ArithmeticError("no such loss")
        return policy_loss(scores, batch, context)


def started(model: Path, row: Row, rank: int | None = None, **kwargs: Any) -> Any:
    """A trainer or scorer that is set up: in one process, or one of two."""
    name, strategy = row
    kwargs["model_args"] = {"disable_gradient_checkpointing": False, **kwargs.get("model_args", {})}
    kwargs |= {} if rank is None else {"rank": rank, "world_size": 2}
    # Rounding noise must not become steps, of which Megatron has more.
    training_args = {"adam_epsilon": 1e-4 if model.name == "tied" else 1e-6, "warmup_steps": 1}
    context = make_context(model, name, strategy, training_args=training_args, **{"l2": 0.01, **kwargs})
    found = (ProbedTrain if name == "fsdp2_train" else STRATEGIES.get(name))(context)
    found.setup()
    return found


def kind_of(name: str) -> str:
    """The model of a row: one of odd sizes, of which data-parallel ranks get different parts, or one that is tied."""
    return "tied" if ENGINES[name] == "megatron_train" else "odd"


def parts(name: str, step: int, *, kl: bool = False) -> list[Batch]:
    """Uneven shares of the ranks that split a step's samples, of others all; with ``kl`` what ``ALGORITHM`` reads."""
    batch = make_batch(seed=step)
    if kl:
        batch = with_reference(batch, step, 33 if kind_of(name) == "odd" else 32)
    if kind_of(name) == "tied":
        return [batch, batch]
    rows, cut = torch.arange(batch.num_sequences), shares(step)[0].num_sequences
    return [batch.select(rows[:cut]), batch.select(rows[cut:])]


def own(name: str, rank: int, scores_T: Tensor) -> Tensor:
    """What a rank has that others have not."""
    return scores_T if kind_of(name) == "odd" or rank == 0 else scores_T[:0]


# ---- two processes: one start, many scenarios


def of_case(out: Path, name: str, rank: int) -> None:
    options: dict[str, Any] = {"rank": rank, "model_args": {"disable_gradient_checkpointing": name == "replica"}}
    # Some also score in chunks that are computed again in the backward pass.
    scoring.MAX_CHUNK_LOGITS = 5 * VOCABULARY if name in ("zero3", "tp") else 2**25
    trainer = started(out / kind_of(name), CASES[name], **options)
    for step in range(3):
        batch = parts(name, step)[rank]
        write(out, f"{name}-scores{step}-{rank}", {"logprobs": own(name, rank, trainer.logprobs(batch).logprobs_T)})
        if step == 2:
            if kind_of(name) == "odd":  # of pipeline stages the last has the loss alone
                with pytest.raises(ArithmeticError, match="no such loss"):
                    trainer.train_step(parts(name, 0)[rank], FailingLoss())
            write(out, f"{name}-nan-{rank}", {}, trainer.train_step(parts(name, 0)[rank], nan_loss))
        metrics = trainer.train_step(batch, policy_loss)
        norm = trainer.weights.engine.get_global_grad_norm() if "zero" in name else None
        write(out, f"{name}-step{step}-{rank}", {}, metrics | ({} if norm is None else {"engine_norm": float(norm)}))
        if step == 1:
            trainer.save(out / f"{name}-checkpoint")
            saving = trainer.start_save(out / f"{name}-beside")
    saving.result()
    write(out, f"{name}-final-{rank}", exported(trainer))
    trainer.load(out / f"{name}-checkpoint")
    trainer.train_step(parts(name, 2)[rank], policy_loss)
    write(out, f"{name}-went_back-{rank}", exported(trainer))
    trainer.shutdown()
    resumed = started(out / kind_of(name), CASES[name], **options)
    resumed.logprobs(parts(name, 0)[rank])  # must leave no stale gathered weights behind
    resumed.load(out / f"{name}-checkpoint")
    resumed.train_step(parts(name, 2)[rank], policy_loss)
    write(out, f"{name}-resumed-{rank}", exported(resumed))
    resumed.load(out / f"alone-{kind_of(name)}")
    resumed.offload(States.ALL)  # from a CPU to a CPU
    resumed.onload(States.WEIGHTS)
    resumed.offload(States.WEIGHTS)
    resumed.onload(States.ALL)
    resumed.train_step(parts(name, 2)[rank], policy_loss)
    write(out, f"{name}-moved-{rank}", exported(resumed))
    resumed.shutdown()


def of_critic(out: Path, name: str, rank: int) -> None:
    """The value head's bias is one number: one of the ranks has no part of it."""
    critic = started(out / kind_of(name), CASES[name], rank, head="value", role="critic")
    for step in range(2):
        metrics = critic.train_step(parts(name, step)[rank], policy_loss)
    values_T = critic.logprobs(parts(name, 1)[rank]).values_T
    write(out, f"values-{name}-{rank}", {"values": own(name, rank, values_T)}, metrics)
    critic.save(out / f"critic-{name}")
    (out / "occupied").write_text("a file, not a folder")
    for number, save in enumerate((critic.save, lambda path: critic.start_save(path).result())):
        try:
            save(out / "occupied")
        except OSError as error:
            (out / f"error-{name}-{rank}-{number}").write_text(str(error))
    critic.shutdown()


def of_kl(out: Path, name: str, rank: int) -> None:
    trainer = started(out / kind_of(name), CASES[name], rank, needs=(*BASIC, KlToReference()))
    for step in range(2):
        batch = parts(name, step, kl=True)[rank]
        write(out, f"kl-{name}-{step}-{rank}", {"kl": own(name, rank, trainer.logprobs(batch).kl_T)})
        metrics = trainer.train_step(batch, build_policy_loss(ALGORITHM))
        write(out, f"kl-{name}-stepped{step}-{rank}", getattr(trainer, "gradient", {}), metrics)
    write(out, f"kl-{name}-final-{rank}", exported(trainer))
    trainer.load(out / f"alone-{kind_of(name)}")
    trainer.shutdown()


def of_scorer(out: Path, name: str, rank: int) -> None:
    half = {"model_args": {"dtype": "bf16"}, "needs": (*BASIC, hidden_states)}
    scorer = started(out / kind_of(name), SCORERS[name], rank, **half)
    scores = scorer.logprobs(parts(name, 1)[rank])
    write(out, f"scorer-{name}-{rank}", {"logprobs": scores.logprobs_T, "hidden": scores.hidden_TH})
    scorer.shutdown()


def of_sharing(out: Path, name: str, rank: int) -> None:
    groups = make_groups(1)
    group_share = groups.select(groups.split(2)[rank])
    for is_on in (True, False):
        found = started(out / kind_of(name), SHARING[name], rank, worker={"share_prompts": is_on})
        found.own_forward = None  # what it computes would count
        seen: list[int] = []
        found.weights.scorer.model.base_model.register_forward_pre_hook(
            lambda _, args, kwargs, seen=seen: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        scored = found.logprobs(group_share).logprobs_T
        metrics = found.train_step(group_share, policy_loss) if name != "infer" else {}
        write(out, f"sharing-{name}-{is_on}-{rank}", {"logprobs": scored}, metrics | {"seen": float(sum(seen))})
        found.shutdown()


def of_adapted(out: Path, name: str, rank: int) -> None:
    learner = started(out / kind_of(name), CASES[name], rank, lora=LORA)
    metrics: Metrics = {}
    for step in range(2):
        metrics = learner.train_step(parts(name, step)[rank], policy_loss)
        learner.weights.leave(States.ALL)  # from a CPU to a CPU, the frozen weights too
        learner.weights.come_back(States.ALL)
    write(out, f"lora-{name}-{rank}", exported_adapter(learner), metrics)
    write(out, f"lora-base-{name}-{rank}", exported(learner))
    scores = learner.logprobs(parts(name, 0)[rank], adapter=False)
    write(out, f"lora-off-{name}-{rank}", {"logprobs": scores.logprobs_T})
    learner.save(out / f"lora-{name}")
    learner.reset_optimizer()
    learner.load(out / f"lora-{name}")
    write(out, f"lora-restored-{name}-{rank}", exported_adapter(learner))
    learner.shutdown()


def of_half(out: Path, name: str, rank: int) -> None:
    half = started(out / kind_of(name), CASES[name], rank, model_args={"dtype": "bf16"})
    half.train_step(parts(name, 0)[rank], policy_loss)
    half.save(out / f"half-{name}")
    for when in ("master", "restored"):
        masters = {key: whole(half.weights, key, MASTER) for key in half.weights.trained}
        write(out, f"half-{name}-{when}-{rank}", masters)
        half.reset_optimizer()
        half.load(out / f"half-{name}")
    half.shutdown()


def run_shards(folder: Path, model: Path, rank: int) -> None:
    trainer = make_trainer(model, SHARDED, rank=rank, world_size=2)
    for seed in range(2):
        share_step(trainer, seed)
    trainer.save(folder / "shards")
    saving = trainer.start_save(folder / "shards-beside")
    state = state_of(trainer)
    loss = share_step(trainer, 2)
    after = state_of(trainer)
    saving.result()
    if rank == 0:
        write(folder, "shards-state", state)
        write(folder, "shards-after", after, {"loss": loss})


OF = {name.removeprefix("of_"): value for name, value in globals().items() if name.startswith("of_")}
"""By the argument of the tests that names its rows."""


def rank_main(rank: int, out: Path, names: dict[str, list[str]]) -> None:
    with recorded_warnings(out / f"warnings-{rank}"):
        for argument, run in OF.items():
            for name in names[argument]:
                run(out, name, rank)
        run_shards(out, out / "untied", rank)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What FSDP2 does in one process with each model, and the folder of all."""
    folder = tmp_path_factory.mktemp("runs")
    save_random(folder / "odd", "Qwen3", VOCABULARY, 33, 47, 2, 3, 1, head_dim=10, tie_word_embeddings=False)
    make_model(folder / "tied")
    make_model(folder / "untied", tied=False)
    found: dict[str, Any] = {"folder": folder}
    for kind in ("odd", "tied"):
        trainer, metrics, scores = started(folder / kind, ALONE), [], []
        for step in range(3):
            batch = make_batch(seed=step)
            scores.append(trainer.logprobs(batch).logprobs_T)
            metrics.append(trainer.train_step(batch, policy_loss))
            if step == 1:
                trainer.save(folder / f"alone-{kind}")
        found[kind] = {"metrics": metrics, "scores": scores, "final": exported(trainer)}
    return found


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest, alone: dict[str, Any]) -> Path:
    names = {argument: [name for name in wanted(request, argument) if installed(ENGINES[name])] for argument in OF}
    run_ranks(rank_main, 2, alone["folder"], names)
    return Path(alone["folder"])


@pytest.fixture(autouse=True)
def engine_is_there(request: pytest.FixtureRequest) -> None:
    for argument in {*OF} & {*request.fixturenames}:
        needs(ENGINES[request.getfixturevalue(argument)])


def both(folder: Path, name: str, key: str) -> Tensor:
    """A tensor of which the ranks have a part each."""
    return torch.cat([tensors_of(folder, f"{name}-{rank}")[key] for rank in range(2)])


@pytest.mark.parametrize("case", slow_but(QUICK, CASES))
def test_steps_with_uneven_shares_and_l2_are_those_of_one_process(two_ranks, alone, case):
    near, alone = NEAR[kind_of(case)], alone[kind_of(case)]
    for step, expected in enumerate(alone["metrics"]):
        for rank in range(2):
            found = metrics_of(two_ranks, f"{case}-step{step}-{rank}")
            for key in ("loss", "grad_norm", "num_tokens", "lr", "entropy", "logprob"):
                assert found[f"actor/{key}"] == pytest.approx(expected[f"actor/{key}"], rel=2e-6, abs=2e-6), key
            if "zero" in case and case != "zero0":  # DeepSpeed reports no norm there
                assert found["engine_norm"] == pytest.approx(found["actor/grad_norm"], rel=1e-5)
        scores_T = both(two_ranks, f"{case}-scores{step}", "logprobs")
        torch.testing.assert_close(scores_T, alone["scores"][step], rtol=0, atol=5e-6)
    assert_near(tensors_of(two_ranks, f"{case}-final-0"), alone["final"], near)
    assert not tensors_of(two_ranks, f"{case}-final-1"), "only rank 0 receives buckets"


@pytest.mark.parametrize("case", slow_but(QUICK, CASES))
def test_a_step_that_fails_and_a_nan_in_one_micro_batch_change_nothing(two_ranks, case):
    """The step after them, of a run without them, is the same."""
    assert_near(tensors_of(two_ranks, f"{case}-resumed-0"), tensors_of(two_ranks, f"{case}-final-0"), 0.0)
    for rank in range(2):
        metrics = metrics_of(two_ranks, f"{case}-nan-{rank}")
        assert metrics["actor/skipped_steps"] == 1
        assert "actor/loss" not in metrics and all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("case", slow_but(QUICK, CASES))
def test_a_save_beside_training_is_of_its_step_and_a_run_that_resumes_or_goes_back_equals_the_whole_one(
    two_ranks, case
):
    assert_same_files(two_ranks / f"{case}-beside", two_ranks / f"{case}-checkpoint")
    for how in ("resumed", "went_back"):
        assert_near(tensors_of(two_ranks, f"{case}-{how}-0"), tensors_of(two_ranks, f"{case}-final-0"), 0.0)


@pytest.mark.parametrize("case", slow_but(QUICK, CASES))
def test_a_checkpoint_of_two_ranks_continues_with_fsdp2_on_one_and_the_other_way_round(two_ranks, alone, case):
    """And states come back as they left."""
    expected, trainer = alone[kind_of(case)]["final"], started(two_ranks / kind_of(case), ALONE)
    trainer.load(two_ranks / f"{case}-checkpoint")
    trainer.train_step(make_batch(seed=2), policy_loss)
    assert_near(exported(trainer), expected, NEAR[kind_of(case)])
    assert_near(tensors_of(two_ranks, f"{case}-moved-0"), expected, NEAR[kind_of(case)])


@pytest.mark.parametrize("kl", slow_but(QUICK[:-1], ["full", "replica", "zero1", "zero3", "tp", "pp"]))
def test_steps_with_kl_over_the_vocabulary_are_those_of_one_process(two_ranks, kl):
    trainer, near = started(two_ranks / kind_of(kl), ALONE, needs=(*BASIC, KlToReference())), NEAR[kind_of(kl)]
    for step in range(2):
        batch = with_reference(make_batch(seed=step), step, 33 if kind_of(kl) == "odd" else 32)
        expected = trainer.logprobs(batch).kl_T
        torch.testing.assert_close(both(two_ranks, f"kl-{kl}-{step}", "kl"), expected, rtol=1e-5, atol=near)
        metrics = trainer.train_step(batch, build_policy_loss(ALGORITHM))
        for rank in range(2):
            file = f"kl-{kl}-stepped{step}-{rank}"
            found = metrics_of(two_ranks, file)
            for key in ("loss", "kl_loss", "pg_loss", "grad_norm", "num_tokens", "lr"):
                assert found[f"actor/{key}"] == pytest.approx(metrics[f"actor/{key}"], rel=2e-6, abs=2e-6), key
            if CASES[kl][0] == "fsdp2_train":
                assert_near(tensors_of(two_ranks, file), trainer.gradient, 1e-6 if step == 0 else 1e-5)
    assert_near(tensors_of(two_ranks, f"kl-{kl}-final-0"), exported(trainer), near)


@pytest.mark.parametrize("adapted", slow_but(QUICK, ["zero2-offload", "zero3"]))
def test_an_adapter_is_that_of_one_process(two_ranks, alone, adapted):
    trainer = started(two_ranks / "odd", ALONE, lora=LORA)
    metrics = [trainer.train_step(make_batch(seed=step), policy_loss) for step in range(2)][-1]
    found = metrics_of(two_ranks, f"lora-{adapted}-0")
    for key in ("actor/loss", "actor/grad_norm"):
        assert found[key] == pytest.approx(metrics[key], rel=2e-6), key
    adapter = tensors_of(two_ranks, f"lora-{adapted}-0")
    assert_near(adapter, exported_adapter(trainer), 5e-6)
    assert_near(tensors_of(two_ranks, f"lora-restored-{adapted}-0"), adapter, 0.0)
    assert_near(load_file(two_ranks / f"lora-{adapted}" / "actor_train" / "adapter_model.safetensors"), adapter, 0.0)
    assert_near(
        tensors_of(two_ranks, f"lora-base-{adapted}-0"), load_file(two_ranks / "odd" / "model.safetensors"), 0.0
    )
    scores_T = both(two_ranks, f"lora-off-{adapted}", "logprobs")
    torch.testing.assert_close(scores_T, alone["odd"]["scores"][0], rtol=0, atol=5e-6)


@pytest.mark.parametrize("critic", slow_but(QUICK_CRITICS, (*QUICK_CRITICS, "tp", "cp")))
def test_a_critic_is_the_same_on_one_process_and_a_failed_write_is_an_error_on_every_rank(two_ranks, critic):
    found = both(two_ranks, f"values-{critic}", "values")
    trained = started(two_ranks / kind_of(critic), ALONE, head="value", role="critic")
    metrics = [trained.train_step(make_batch(seed=step), policy_loss) for step in range(2)][-1]
    told = metrics_of(two_ranks, f"values-{critic}-0")
    for key in ("loss", "error", "grad_norm", "num_tokens", "lr"):
        assert told[f"critic/{key}"] == pytest.approx(metrics[f"critic/{key}"], rel=1e-5), key
    saved = started(two_ranks / f"critic-{critic}" / "critic", SCORERS["fsdp2"], head="value")
    for each in (trained, saved):
        values = each.logprobs(make_batch(seed=1)).values_T
        assert values.abs().max() > 0
        torch.testing.assert_close(values, found, rtol=0, atol=NEAR[kind_of(critic)])
    for rank, number in product(range(2), range(2)):
        assert "occupied" in (two_ranks / f"error-{critic}-{rank}-{number}").read_text()


@pytest.mark.parametrize("sharing", slow_but(["zero3", "infer"], SHARING))
def test_shared_prompts_are_computed_once(two_ranks, sharing):
    for rank in range(2):
        shared, single = (metrics_of(two_ranks, f"sharing-{sharing}-{is_on}-{rank}") for is_on in (True, False))
        assert shared["seen"] < 0.8 * single["seen"]
        for key in ("actor/loss", "actor/grad_norm") if sharing != "infer" else ():
            assert shared[key] == pytest.approx(single[key], rel=2e-6, abs=2e-6), key
        found, expected = (tensors_of(two_ranks, f"sharing-{sharing}-{is_on}-{rank}") for is_on in (True, False))
        torch.testing.assert_close(found["logprobs"], expected["logprobs"], rtol=0, atol=5e-6)


@pytest.mark.parametrize("scorer", slow_but(["fsdp2", "zero3"], SCORERS))
def test_a_bf16_reference_is_near_fp32(two_ranks, scorer):
    """Of FSDP2, rank 1 has nothing to score."""
    expected = started(two_ranks / "odd", SCORERS["fsdp2"], needs=(*BASIC, hidden_states)).logprobs(make_batch(seed=1))
    for key, tensor in (("logprobs", expected.logprobs_T), ("hidden", expected.hidden_TH)):
        torch.testing.assert_close(both(two_ranks, f"scorer-{scorer}", key), tensor, rtol=0, atol=0.1)


@pytest.mark.parametrize("half", ["zero3"])
def test_float32_weights_survive_a_checkpoint_of_a_model_in_bf16(two_ranks, half):
    master, restored = (tensors_of(two_ranks, f"half-{half}-{when}-0") for when in ("master", "restored"))
    assert_near(restored, master, 0.0)
    assert not [name for name, weight in master.items() if torch.equal(weight.bfloat16().float(), weight)]
    files = (two_ranks / f"half-{half}" / "actor_train").glob("model*.safetensors")
    stored = {f"model.{name}": weight for file in files for name, weight in load_file(file).items()}
    assert_near(stored, {name: weight.bfloat16() for name, weight in master.items()}, 0.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_said_that_a_user_cannot_change(two_ranks, rank):
    assert (two_ranks / f"warnings-{rank}").read_text() == ""


# ---- four processes, and checkpoints in shards


def four_main(rank: int, folder: Path, model: Path, names: list[str]) -> None:
    for name in names:
        config = LAYOUTS[name]
        trainer = make_trainer(model, config | SHARDED, rank=rank, world_size=4)
        trainer.load(folder / "shards")
        state = state_of(trainer)
        trainer.save(folder / f"by {name}")
        gathering = make_trainer(model, config, rank=rank, world_size=4)
        gathering.load(folder / "shards")
        saving = gathering.start_save(folder / f"gathered from {name}")
        loss = share_step(trainer, 2)
        share_step(gathering, 2)
        saving.result()
        after = state_of(trainer)
        if rank == 0:
            write(folder, f"{name}-state", state)
            write(folder, f"{name}-after", after, {"loss": loss})


@pytest.fixture(scope="module")
def four_ranks(request: pytest.FixtureRequest, two_ranks: Path) -> Path:
    """The same folder, with what four ranks have made of the shards of two."""
    run_ranks(four_main, 4, two_ranks, two_ranks / "untied", wanted(request, "layout"))
    return two_ranks


@pytest.mark.parametrize("layout", slow_but(("groups", "tensor"), LAYOUTS))
def test_shards_of_two_ranks_continue_on_four(four_ranks, layout):
    assert_near(tensors_of(four_ranks, f"{layout}-state"), tensors_of(four_ranks, "shards-state"), 0.0)
    assert_near(tensors_of(four_ranks, f"{layout}-after"), tensors_of(four_ranks, "shards-after"), 5e-6)
    losses = [metrics_of(four_ranks, f"{name}-after")["loss"] for name in (layout, "shards")]
    assert losses[0] == pytest.approx(losses[1], abs=2e-6)


@pytest.mark.parametrize("layout", slow_but(("groups", "tensor"), LAYOUTS))
def test_what_is_saved_beside_training_is_that_of_the_start(four_ranks, layout):
    """The model's tensors are whole in the files; the optimizer's lie there as the ranks had them."""
    saved = four_ranks / f"gathered from {layout}"
    optimizer = saved / "resume/actor_train/optimizer"
    resumed = StoredTensors(optimizer)
    model = {
        key: tensor for file in (saved / "actor_train").glob("*.safetensors") for key, tensor in load_file(file).items()
    }
    state = tensors_of(four_ranks, "shards-state")
    expected = {name.removeprefix("model.").removesuffix(f".{MASTER}"): tensor for name, tensor in state.items()}
    of_model = {key for key in expected if not key.endswith(ADAM_STATE)}
    assert model.keys() == of_model
    found = model | {key: resumed.get(key) for key in expected.keys() - of_model}
    assert not [key for key, tensor in expected.items() if not found[key].equal(tensor)]
    stored = [key for file in optimizer.glob("*.safetensors") for key in load_file(file)]
    assert len(list(optimizer.glob("*.safetensors"))) == 4
    assert any("@" in key for key in stored) == (layout != "whole replicas")


def test_shards_written_beside_training_are_those_of_the_start(four_ranks):
    """Tensors alone are compared: the library writes a header's metadata in an order of chance."""
    names = sorted(file.relative_to(four_ranks / "shards") for file in (four_ranks / "shards").rglob("*.safetensors"))
    assert len(names) == 3  # two of shards, and the generators' states
    for name in names:
        found, expected = load_file(four_ranks / "shards-beside" / name), load_file(four_ranks / "shards" / name)
        assert found.keys() == expected.keys()
        assert not [key for key, tensor in expected.items() if not found[key].equal(tensor)]


@pytest.mark.parametrize("source", ["shards", *slow_but(("by groups", "by tensor"), [f"by {x}" for x in LAYOUTS])])
def test_shards_of_several_ranks_continue_on_one(four_ranks, source):
    trainer = make_trainer(four_ranks / "untied")
    trainer.load(four_ranks / source)
    assert trainer.optimizer_steps == 2
    assert_near(state_of(trainer), tensors_of(four_ranks, "shards-state"), 0.0)


def test_shards_hold_no_pickle(four_ranks):
    files = [file for file in (four_ranks / "shards").rglob("*") if file.is_file()]
    assert {file.suffix for file in files} <= {".safetensors", ".json"}, files
    assert len(list((four_ranks / "shards" / SHARDS).glob("shard-*.safetensors"))) == 2
    assert [path.name for path in (four_ranks / "shards").iterdir()] == ["resume"], "others could open no model"


def test_missing_shards_are_refused(four_ranks, tmp_path):
    shutil.copytree(four_ranks / "shards", tmp_path / "copy")
    next((tmp_path / "copy" / SHARDS).glob("shard-00002*")).unlink()
    with pytest.raises(ValueError, match="expected the shards of this model"):
        make_trainer(four_ranks / "untied").load(tmp_path / "copy")
