"""``deepspeed_train`` beside the parity matrix: skipped steps, checkpoints, uneven parts, and what is refused.

The two processes start once and leave files that the tests judge, mostly beside ``fsdp2_train`` in one process.
"""

import contextlib
import math
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from roll.algorithms.quantities import BASIC, KlToReference, hidden_states
from roll.algorithms.types import LossContext, LossOutput, TokenScores
from roll.configs.agentic import AgenticConfig
from roll.configs.engines.deepspeed import CARD, DeepSpeedConfig
from roll.configs.loader import load_config
from roll.data.batch import Batch
from roll.distributed.strategy.base import Metrics, States, StrategyContext
from roll.distributed.strategy.deepspeed.strategy import DeepSpeedInfer, DeepSpeedTrain
from roll.distributed.strategy.fsdp2.strategy import Fsdp2Infer, Fsdp2Train
from roll.distributed.strategy.training.optim import MASTER
from roll.models import scoring
from roll.models.lora import LoraSpec
from tests.support.choice import slow_but
from tests.support.harness import make_groups
from tests.support.ranks import (
    assert_near,
    assert_same_files,
    enter_rank,
    exported,
    exported_adapter,
    leave_rank,
    metrics_of,
    recorded_warnings,
    run_ranks,
    tensors_of,
    wanted,
    whole,
    write,
)
from tests.support.sizes import sizes
from tests.support.trainers import VOCABULARY, make_batch, shares
from tests.support.trainers import make_context as context_of

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed")

CPU = {"device": "cpu"}
LORA = LoraSpec(rank=3, alpha=6, targets=("q_proj", "down_proj"))
CASES: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2-offload": {"stage": 2, "offload_optimizer": CPU},
    "zero3": {"stage": 3, "stage3_param_persistence_threshold": 40},
    "zero3-offload": {
        "stage": 3,
        "offload_optimizer": CPU,
        "offload_param": CPU,
        "stage3_param_persistence_threshold": 0,
    },
}
QUICK = ("zero3",)
"""What ``make test`` runs."""

SHARING: dict[str, tuple[str, dict[str, Any]]] = {
    "zero1": ("deepspeed_train", {"zero_optimization": CASES["zero1"]}),
    "zero3": ("deepspeed_train", {"zero_optimization": CASES["zero3"]}),
    "infer": ("deepspeed_infer", {"zero_optimization": CASES["zero3"]}),
}


def make_model(path: Path) -> Path:
    """Sizes are odd, so that two ranks get parts of different sizes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        **sizes(VOCABULARY, 33, 47, 2, 3, 1), head_dim=10, tie_word_embeddings=False, initializer_range=0.1
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def loss_fn(scores: TokenScores, batch: Batch, context: LossContext) -> LossOutput:
    if scores.values_T is not None:
        return LossOutput(
            (scores.values_T - batch.advantages_T)[batch.loss_mask_T].square().sum() / context.num_tokens, {}
        )
    assert scores.logprobs_T is not None
    gain_T = batch.advantages_T * scores.logprobs_T
    if scores.kl_T is not None:
        gain_T = gain_T - scores.kl_T
    return LossOutput(-gain_T[batch.loss_mask_T].sum() / context.num_tokens, {})


def nan_loss(scores: TokenScores, batch: Batch, context: LossContext) -> LossOutput:
    """Broken in some micro-batches only: the first of a rank may be sound."""
    loss = loss_fn(scores, batch, context).loss
    return LossOutput(loss * math.nan if batch.num_sequences == 1 else loss, {})


class FailingLoss:
    """Fails in the second micro-batch of a step, when DeepSpeed has gradients of the first."""

    calls = 0

    def __call__(self, scores: TokenScores, batch: Batch, context: LossContext) -> LossOutput:
        self.calls += 1
        if self.calls == 2:
            raise ArithmeticError("no such loss")
        return loss_fn(scores, batch, context)


def make_context(model: Path, name: str, strategy: dict[str, Any] | None = None, **kwargs: Any) -> StrategyContext:
    kwargs["model_args"] = {"disable_gradient_checkpointing": False, **kwargs.get("model_args", {})}
    return context_of(model, name, strategy, training_args={"adam_epsilon": 1e-6}, **{"l2": 0.01, **kwargs})


def zero_trainer(model: Path, zero: dict[str, Any], **kwargs: Any) -> DeepSpeedTrain:
    trainer = DeepSpeedTrain(make_context(model, "deepspeed_train", {"zero_optimization": zero}, **kwargs))
    trainer.setup()
    return trainer


def fsdp_trainer(model: Path, **kwargs: Any) -> Fsdp2Train:
    trainer = Fsdp2Train(make_context(model, "fsdp2_train", **kwargs))
    trainer.setup()
    return trainer


def with_reference(batch: Batch) -> Batch:
    """Hidden states of no model: the KL to them is far from 0."""
    generator = torch.Generator().manual_seed(9)
    return batch.replace(ref_hidden_TH=torch.randn(batch.num_tokens, 33, generator=generator))


# ---- two processes: one start, many scenarios


def run_case(out: Path, model: Path, name: str, rank: int) -> None:
    options: dict[str, Any] = {"rank": rank, "world_size": 2}
    # Stage 3 also scores in chunks that are computed again in the backward pass.
    scoring.MAX_CHUNK_LOGITS = 5 * VOCABULARY if name == "zero3" else 2**25
    trainer = zero_trainer(model, CASES[name], **options)
    for step in range(3):
        write(out, f"{name}-scores{step}-{rank}", {"logprobs": trainer.logprobs(shares(step)[rank]).logprobs_T})
        metrics = trainer.train_step(shares(step)[rank], loss_fn)
        norm = trainer.weights.engine.get_global_grad_norm()
        write(out, f"{name}-step{step}-{rank}", {}, metrics | ({} if norm is None else {"engine_norm": float(norm)}))
        if step == 1:
            trainer.save(out / f"{name}-checkpoint")
            saving = trainer.start_save(out / f"{name}-beside")
    saving.result()
    write(out, f"{name}-final-{rank}", exported(trainer))
    with contextlib.suppress(ArithmeticError):
        trainer.train_step(shares(0)[rank], FailingLoss())
    metrics = trainer.train_step(shares(0)[rank], nan_loss)
    write(out, f"{name}-nan-{rank}", exported(trainer), metrics)
    trainer.load(out / f"{name}-checkpoint")
    trainer.train_step(shares(2)[rank], loss_fn)
    write(out, f"{name}-went_back-{rank}", exported(trainer))
    trainer.shutdown()
    resumed = zero_trainer(model, CASES[name], **options)
    resumed.load(out / f"{name}-checkpoint")
    resumed.train_step(shares(2)[rank], loss_fn)
    write(out, f"{name}-resumed-{rank}", exported(resumed))
    resumed.shutdown()


def run_others(out: Path, model: Path, rank: int, names: dict[str, list[str]]) -> None:
    options: dict[str, Any] = {"rank": rank, "world_size": 2}
    # The value head's bias is one number: one of the ranks has no part of it.
    critic = zero_trainer(model, CASES["zero3-offload"], head="value", role="critic", **options)
    for step in range(2):
        critic.train_step(shares(step)[rank], loss_fn)
    write(out, f"values-{rank}", {"values": critic.logprobs(shares(1)[rank]).values_T})
    critic.save(out / "critic")
    critic.shutdown()
    groups = make_groups(1)
    group_share = groups.select(groups.split(2)[rank])
    for name in names["sharing"]:
        strategy, config = SHARING[name]
        for is_on in (True, False):
            context = make_context(model, strategy, config, worker={"share_prompts": is_on}, **options)
            found = (DeepSpeedTrain if strategy == "deepspeed_train" else DeepSpeedInfer)(context)
            found.setup()
            found.own_forward = None  # what it computes would count
            seen: list[int] = []
            found.weights.scorer.model.base_model.register_forward_pre_hook(
                lambda _, args, kwargs, seen=seen: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
            )
            scored = found.logprobs(group_share).logprobs_T
            metrics = found.train_step(group_share, loss_fn) if isinstance(found, DeepSpeedTrain) else {}
            write(out, f"sharing-{name}-{is_on}-{rank}", {"logprobs": scored}, metrics | {"seen": float(sum(seen))})
            found.shutdown()
    for name in names["adapted"]:
        learner = zero_trainer(model, CASES[name], lora=LORA, **options)
        metrics = {}
        for step in range(2):
            metrics = learner.train_step(shares(step)[rank], loss_fn)
            learner.weights.leave(States.ALL)  # from a CPU to a CPU, the frozen weights too
            learner.weights.come_back(States.ALL)
        write(out, f"lora-{name}-{rank}", exported_adapter(learner), metrics)
        write(out, f"lora-base-{name}-{rank}", exported(learner))
        scores = learner.logprobs(shares(0)[rank], adapter=False)
        write(out, f"lora-off-{name}-{rank}", {"logprobs": scores.logprobs_T})
        learner.save(out / f"lora-{name}")
        learner.reset_optimizer()
        learner.load(out / f"lora-{name}")
        write(out, f"lora-restored-{name}-{rank}", exported_adapter(learner))
        learner.shutdown()
    for name in names["stage"]:
        other = zero_trainer(model, CASES[name], needs=(*BASIC, KlToReference()), **options)
        batch = with_reference(make_batch(seed=0))
        part = batch.select(torch.arange(9).tensor_split([4])[rank])
        metrics = other.train_step(part, loss_fn)
        write(out, f"kl-{name}-{rank}", exported(other), metrics)
        other.load(out / "fsdp2-checkpoint")
        other.shutdown()
        moved = zero_trainer(model, CASES[name], **options)
        moved.load(out / "fsdp2-checkpoint")
        moved.weights.leave(States.ALL)  # from a CPU to a CPU
        moved.weights.come_back(States.WEIGHTS)
        moved.weights.leave(States.WEIGHTS)
        moved.weights.come_back(States.ALL)
        moved.train_step(shares(2)[rank], loss_fn)
        write(out, f"from_fsdp2-{name}-{rank}", exported(moved))
        moved.shutdown()
    for name in names["reference"]:
        strategy = {"zero_optimization": CASES["zero3-offload"]} if name == "zero3" else {}
        half = {"model_args": {"dtype": "bf16"}, "needs": (*BASIC, hidden_states)}
        reference = DeepSpeedInfer(make_context(model, "deepspeed_infer", strategy, **half, **options))
        reference.setup()
        scores = reference.logprobs(shares(1)[rank])
        write(out, f"reference-{name}-{rank}", {"logprobs": scores.logprobs_T, "hidden": scores.hidden_TH})
        reference.shutdown()
    bf16 = zero_trainer(model, {"stage": 3}, model_args={"dtype": "bf16"}, **options)
    bf16.train_step(shares(0)[rank], loss_fn)
    bf16.save(out / "bf16-checkpoint")
    write(out, f"bf16-master-{rank}", {name: whole(bf16.weights, name, MASTER) for name in bf16.weights.trained})
    bf16.reset_optimizer()
    bf16.load(out / "bf16-checkpoint")
    write(out, f"bf16-restored-{rank}", {name: whole(bf16.weights, name, MASTER) for name in bf16.weights.trained})
    (out / "occupied").write_text("a file, not a folder")
    try:
        bf16.save(out / "occupied")
    except OSError as error:
        (out / f"error{rank}").write_text(str(error))


def rank_main(rank: int, port: int, out: Path, model: Path, names: dict[str, list[str]]) -> None:
    enter_rank(port)
    with recorded_warnings(out / f"warnings-{rank}"):
        for name in names["case"]:
            run_case(out, model, name, rank)
        run_others(out, model, rank, names)
    leave_rank()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one_process(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What FSDP2 does in one process."""
    folder = tmp_path_factory.mktemp("runs")
    trainer = fsdp_trainer(model)
    result: dict[str, Any] = {"folder": folder, "metrics": [], "scores": []}
    for step in range(3):
        batch = make_batch(seed=step)
        result["scores"].append(trainer.logprobs(batch).logprobs_T)
        result["metrics"].append(trainer.train_step(batch, loss_fn))
        if step == 1:
            trainer.save(folder / "fsdp2-checkpoint")
    return result | {"final": exported(trainer)}


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest, one_process: dict[str, Any], model: Path) -> Path:
    names = {argument: wanted(request, argument) for argument in ("case", "stage", "adapted", "sharing", "reference")}
    run_ranks(rank_main, 2, one_process["folder"], model, names)
    return Path(one_process["folder"])


@pytest.mark.parametrize("case", slow_but(QUICK, CASES))
def test_steps_with_uneven_shares_and_l2_are_those_of_one_process(two_ranks, one_process, case):
    for step, expected in enumerate(one_process["metrics"]):
        for rank in range(2):
            found = metrics_of(two_ranks, f"{case}-step{step}-{rank}")
            for key in ("actor/loss", "actor/grad_norm", "actor/num_tokens", "actor/lr"):
                assert found[key] == pytest.approx(expected[key], rel=2e-6, abs=2e-6), key
            if case != "zero0":  # DeepSpeed reports no norm there
                assert found["engine_norm"] == pytest.approx(found["actor/grad_norm"], rel=1e-5)
        parts = [tensors_of(two_ranks, f"{case}-scores{step}-{rank}")["logprobs"] for rank in range(2)]
        torch.testing.assert_close(torch.cat(parts), one_process["scores"][step], rtol=0, atol=5e-6)
    assert_near(tensors_of(two_ranks, f"{case}-final-0"), one_process["final"], 5e-6)
    assert not tensors_of(two_ranks, f"{case}-final-1")  # only rank 0 gets buckets


@pytest.mark.parametrize("case", slow_but(QUICK, CASES))
def test_nan_in_one_micro_batch_changes_nothing(two_ranks, case):
    assert_near(tensors_of(two_ranks, f"{case}-nan-0"), tensors_of(two_ranks, f"{case}-final-0"), 0.0)
    for rank in range(2):
        metrics = metrics_of(two_ranks, f"{case}-nan-{rank}")
        assert metrics["actor/skipped_steps"] == 1
        assert "actor/loss" not in metrics


@pytest.mark.parametrize("case", slow_but(QUICK, CASES))
@pytest.mark.parametrize("how", ["resumed", "went_back"])
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(two_ranks, case, how):
    assert_near(tensors_of(two_ranks, f"{case}-{how}-0"), tensors_of(two_ranks, f"{case}-final-0"), 0.0)


@pytest.mark.parametrize("case", slow_but(QUICK, CASES))
def test_checkpoint_of_two_ranks_continues_with_fsdp2_on_one(two_ranks, one_process, model, case):
    trainer = fsdp_trainer(model)
    trainer.load(two_ranks / f"{case}-checkpoint")
    trainer.train_step(make_batch(seed=2), loss_fn)
    assert_near(exported(trainer), one_process["final"], 5e-6)


@pytest.mark.parametrize("stage", slow_but(QUICK, ["zero1", "zero3"]))
def test_checkpoint_of_fsdp2_continues_and_states_come_back_as_they_left(two_ranks, one_process, stage):
    assert_near(tensors_of(two_ranks, f"from_fsdp2-{stage}-0"), one_process["final"], 5e-6)


@pytest.mark.parametrize("stage", slow_but(QUICK, ["zero1", "zero3"]))
def test_step_with_kl_over_the_vocabulary_is_that_of_one_process(two_ranks, model, stage):
    trainer = fsdp_trainer(model, needs=(*BASIC, KlToReference()))
    metrics = trainer.train_step(with_reference(make_batch(seed=0)), loss_fn)
    found = metrics_of(two_ranks, f"kl-{stage}-0")
    assert found["actor/loss"] == pytest.approx(metrics["actor/loss"], rel=2e-6)
    assert found["actor/grad_norm"] == pytest.approx(metrics["actor/grad_norm"], rel=2e-6)
    assert_near(tensors_of(two_ranks, f"kl-{stage}-0"), exported(trainer), 5e-6)


@pytest.mark.parametrize("adapted", slow_but(["zero3"], ["zero2-offload", "zero3"]))
def test_adapter_is_that_of_one_process(two_ranks, one_process, model, adapted):
    trainer = fsdp_trainer(model, lora=LORA)
    metrics: Metrics = {}
    for step in range(2):
        metrics = trainer.train_step(make_batch(seed=step), loss_fn)
    found = metrics_of(two_ranks, f"lora-{adapted}-0")
    assert found["actor/loss"] == pytest.approx(metrics["actor/loss"], rel=2e-6)
    assert found["actor/grad_norm"] == pytest.approx(metrics["actor/grad_norm"], rel=2e-6)
    adapter = tensors_of(two_ranks, f"lora-{adapted}-0")
    assert_near(adapter, exported_adapter(trainer), 5e-6)
    assert_near(tensors_of(two_ranks, f"lora-restored-{adapted}-0"), adapter, 0.0)
    assert_near(load_file(two_ranks / f"lora-{adapted}" / "actor_train" / "adapter_model.safetensors"), adapter, 0.0)
    assert_near(tensors_of(two_ranks, f"lora-base-{adapted}-0"), load_file(model / "model.safetensors"), 0.0)
    parts = [tensors_of(two_ranks, f"lora-off-{adapted}-{rank}")["logprobs"] for rank in range(2)]
    torch.testing.assert_close(torch.cat(parts), one_process["scores"][0], rtol=0, atol=5e-6)


def test_critic_is_the_same_on_one_process(two_ranks, model):
    found = torch.cat([tensors_of(two_ranks, f"values-{rank}")["values"] for rank in range(2)])
    trained = fsdp_trainer(model, head="value", role="critic")
    for step in range(2):
        trained.train_step(make_batch(seed=step), loss_fn)
    saved = Fsdp2Infer(make_context(two_ranks / "critic" / "critic", "fsdp2_infer", head="value"))
    saved.setup()
    for critic in (trained, saved):
        values = critic.logprobs(make_batch(seed=1)).values_T
        assert values.abs().max() > 0
        torch.testing.assert_close(values, found, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sharing", slow_but(["zero3", "infer"], SHARING))
@pytest.mark.parametrize("rank", [0, 1])
def test_shared_prompts_are_computed_once(two_ranks, sharing, rank):
    shared, single = (metrics_of(two_ranks, f"sharing-{sharing}-{is_on}-{rank}") for is_on in (True, False))
    assert shared["seen"] < 0.8 * single["seen"]
    for key in ("actor/loss", "actor/grad_norm") if sharing != "infer" else ():
        assert shared[key] == pytest.approx(single[key], rel=2e-6, abs=2e-6), key
    found, expected = (tensors_of(two_ranks, f"sharing-{sharing}-{is_on}-{rank}") for is_on in (True, False))
    torch.testing.assert_close(found["logprobs"], expected["logprobs"], rtol=0, atol=5e-6)


@pytest.mark.parametrize("reference", slow_but(QUICK, ["zero3", "whole"]))
def test_bf16_reference_is_near_fp32(two_ranks, model, reference):
    scorer = Fsdp2Infer(make_context(model, "fsdp2_infer", needs=(*BASIC, hidden_states)))
    scorer.setup()
    expected = scorer.logprobs(make_batch(seed=1))
    parts = [tensors_of(two_ranks, f"reference-{reference}-{rank}") for rank in range(2)]
    for key, tensor in (("logprobs", expected.logprobs_T), ("hidden", expected.hidden_TH)):
        torch.testing.assert_close(torch.cat([part[key] for part in parts]), tensor, rtol=0, atol=0.1)


@pytest.mark.parametrize("case", slow_but(QUICK, CASES))
def test_a_save_beside_training_is_of_the_step_that_it_began_at(two_ranks, case):
    assert_same_files(two_ranks / f"{case}-beside", two_ranks / f"{case}-checkpoint")


def test_float32_weights_survive_a_checkpoint_and_a_failed_write_is_an_error_on_every_rank(two_ranks, model):
    master, restored = (tensors_of(two_ranks, f"bf16-{name}-0") for name in ("master", "restored"))
    assert_near(restored, master, 0.0)
    rounded = [name for name, weight in master.items() if torch.equal(weight.bfloat16().float(), weight)]
    assert not rounded
    files = (two_ranks / "bf16-checkpoint" / "actor_train").glob("model*.safetensors")
    stored = {name: weight for file in files for name, weight in load_file(file).items()}
    assert {f"model.{name}" for name in stored} == set(master)
    for name, weight in stored.items():
        torch.testing.assert_close(weight, master[f"model.{name}"].bfloat16(), rtol=0, atol=0)
    for rank in range(2):
        assert "occupied" in (two_ranks / f"error{rank}").read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_said_that_a_user_cannot_change(two_ranks, rank):
    assert (two_ranks / f"warnings-{rank}").read_text() == ""


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "zero_optimization.overlap_com: .*overlap_comm"),
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation: .*did you mean zero_optimization"),
        ({"zero_optimization": {"offload_param": {"devise": "cpu"}}}, "offload_param.devise: .*did you mean device"),
        ({"bf16": {"enable": True}}, "bf16.enable: .*did you mean enabled"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_one(model, options, message):
    with pytest.raises(ValueError, match=message):
        DeepSpeedTrain(make_context(model, "deepspeed_train", options))


def test_keys_of_every_section_and_second_names_are_known():
    zero = {"stage": 3, "stage3_max_live_parameters": 1, "max_live_parameters": 1, "offload_optimizer": {"ratio": 0.5}}
    assert not list(
        CARD.option_problems({"zero_optimization": zero, "bf16": {"enabled": "auto"}, "steps_per_print": 5})
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_clipping": 1.0}, "gradient_clipping: got 1.0, expected max_grad_norm"),
        ({"optimizer": {"type": "Lamb"}}, 'optimizer.type: got "Lamb", expected AdamW'),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, "optimizer.params.lr: got 1e-05"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, 'offload_param.device: got "nvme"'),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "one of the two"),
        ({"sequence_parallel_size": 2}, "model_args.ulysses_size"),
    ],
)
def test_what_is_decided_elsewhere_is_refused(options, message):
    assert any(message in str(problem) for problem in DeepSpeedConfig.model_validate(options).problems())


def test_auto_means_left_out():
    options = {"train_batch_size": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"}}
    options |= {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": False}}, "scheduler": "auto"}
    config = DeepSpeedConfig.model_validate(options | {"zero_optimization": {"stage": "auto"}})
    assert not list(config.problems())
    assert (config.stage, config.precision, config.torch_adam) == (0, None, False)


def test_training_in_fp16_is_refused(model):
    trainer = DeepSpeedTrain(make_context(model, "deepspeed_train", {"fp16": {"enabled": True}}))
    with pytest.raises(ValueError, match="fp16 needs loss scaling"):
        trainer.setup()


@pytest.mark.parametrize("name", ["zero", "zero2", "zero3", "zero3_cpuoffload"])
def test_examples_are_used_as_documented(tmp_path, name):
    folder = tmp_path / "config"
    shutil.copytree(Path(__file__).parents[2] / "examples" / "config", folder)
    (folder / "mine.yaml").write_text(
        f"defaults: [agentic_sokoban, config/deepspeed_{name}@_here_, _self_]\n"
        "actor_train:\n"
        "  strategy_args:\n"
        "    strategy_name: deepspeed_train\n"
        f"    strategy_config: ${{deepspeed_{name}}}\n"
    )
    options = load_config(AgenticConfig, "mine", folder).actor_train.strategy_args.strategy_config
    assert not list(CARD.option_problems(options))
    assert DeepSpeedConfig.model_validate(options).stage == (int(name[4]) if name != "zero" else 0)
