"""Models with a head of their own kind, sharded over two ranks; and what happens when one rank scores them otherwise.

The oracle is the model's own forward pass, one sequence at a time, in float64.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from roll.models import ulysses
from roll.models.loading import load_causal_lm
from tests.support.choice import slow_but
from tests.support.families import tiny_config, tiny_model, with_factors
from tests.support.pictured import plain_logprobs
from tests.support.ranks import metrics_of, run_ranks, tensors_of, wanted, write
from tests.support.trainers import gain_loss, make_batch, make_trainer, shares

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed")

FAMILIES: dict[str, dict[str, Any]] = {"hyperclovax": {}, "minicpm3": {}, "roberta": {"is_decoder": True}}
"""With a factor behind the output layer, one before it, and layers before it that have weights."""
TRAINED = [*(("fsdp2_train", family) for family in FAMILIES), ("deepspeed_train", "hyperclovax")]
"""Engines and families whose steps are compared with float64."""
QUICK = (("fsdp2_train", "minicpm3"), ("deepspeed_train", "hyperclovax"))
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp2_train": {},
    "deepspeed_train": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
}
TEMPERATURE = 1.0
SPLIT: dict[str, dict[str, Any]] = {
    "tensor": {"strategy": {"tensor_parallel_size": 2}},
    "ulysses": {"model_args": {"ulysses_size": 2}},
}
"""Layouts in which ranks have parts of each layer or sequence."""


def trainer(model: Path, name: str, rank: int, **options: Any) -> Any:
    options = {"strategy": ENGINES.get(name), "temperature": TEMPERATURE, "rank": rank, "world_size": 2, **options}
    return make_trainer(model, name, **options)


def refused(call: Callable[..., Any], *args: Any, why: str = "log-probabilities of the first micro-batch") -> str:
    with pytest.raises(ValueError, match=why) as raised:
        call(*args)
    return str(raised.value)


@contextlib.contextmanager
def split_wrongly(found: Any, name: str, rank: int) -> Iterator[None]:
    """A layer whose parts do not fit together: the second of the model, or attention between the parts of a row."""
    if name == "tensor":
        part = found.weights.scorer.model.model.layers[1].mlp.act_fn
        hook = part.register_forward_hook(lambda _, __, output: output * (1.5 if rank else 1.0))
        yield
        hook.remove()
    else:
        to_columns = ulysses._to_columns
        with mock.patch.object(ulysses, "_to_columns", lambda result, group: to_columns(result, group).roll(1, 2)):
            yield


def rank_main(rank: int, folder: Path, trained: list[Any], refusals: list[Any]) -> None:
    for name, family in trained:
        found, share = trainer(folder / family, name, rank), shares(0)[rank]
        logprobs = found.logprobs(share).logprobs_T
        metrics = found.train_step(share, gain_loss)
        write(folder, f"{name}-{family}-{rank}", {"logprobs": logprobs}, metrics)
        found.shutdown()
    for name, first in refusals:
        found = trainer(folder / "hyperclovax", name, rank)
        if rank == 1:
            found.weights.scorer.head.is_plain = True  # one rank alone leaves the factor out
        call = (found.train_step, shares(0)[rank], gain_loss) if first == "train" else (found.logprobs, shares(0)[rank])
        (folder / f"{name}-refused-{first}-{rank}.json").write_text(json.dumps(refused(*call)))
        found.shutdown()
    batch = make_batch(num_sequences=2)
    for name in SPLIT:
        found = trainer(folder / "qwen3", "fsdp2_train", rank, **SPLIT[name])
        with split_wrongly(found, name, rank):
            told = refused(found.train_step, batch, gain_loss)
        found.train_step(batch, gain_loss)
        result = {"told": told, "compared": sorted(found.own_forward.compared)}
        (folder / f"{name}-{rank}.json").write_text(json.dumps(result))
        found.shutdown()


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for family, options in FAMILIES.items():
        tiny_model(with_factors(tiny_config(family, **options))).save_pretrained(folder / family)
    tiny_model(tiny_config("qwen3")).save_pretrained(folder / "qwen3")
    run_ranks(rank_main, 2, folder, wanted(request, "trained"), wanted(request, "refusal"))
    return folder


@pytest.mark.parametrize("trained", slow_but(QUICK, TRAINED))
def test_scores_and_gradient_are_those_of_the_models_own_head(two_ranks, trained):
    engine, family = trained
    model = load_causal_lm(str(two_ranks / family), dtype=torch.float64)
    batch = make_batch(seed=0)
    wanted = plain_logprobs(model, batch, TEMPERATURE)[batch.loss_mask_T]
    found = torch.cat([tensors_of(two_ranks, f"{engine}-{family}-{rank}")["logprobs"] for rank in (0, 1)])
    torch.testing.assert_close(found[batch.loss_mask_T].double(), wanted.detach(), rtol=0, atol=2e-5)
    loss = -(batch.advantages_T[batch.loss_mask_T] * wanted).sum() / len(wanted)
    loss.backward()
    squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    metrics = metrics_of(two_ranks, f"{engine}-{family}-0")
    assert metrics["actor/loss"] == pytest.approx(float(loss), abs=2e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(float(sum(squares)) ** 0.5, rel=2e-5)


@pytest.mark.parametrize(
    "refusal",
    slow_but(
        [("deepspeed_train", "train")],  # of FSDP2, layers whose parts do not fit together are refused below
        [(engine, first) for engine in ENGINES for first in ("score", "train")],
    ),
)
def test_what_one_rank_scores_otherwise_ends_all(two_ranks, refusal):
    engine, first = refusal
    told = [json.loads((two_ranks / f"{engine}-refused-{first}-{rank}.json").read_text()) for rank in (0, 1)]
    assert told[0] == told[1] and told[0].startswith("HyperCLOVAXForCausalLM: ")


@pytest.mark.parametrize("name", SPLIT)
def test_parts_that_do_not_fit_together_are_found_with_the_layer(two_ranks, name):
    """With tensor parallelism every layer is run whole too, with the weights of all ranks."""
    first, second = (json.loads((two_ranks / f"{name}-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second and first["compared"] == ["padded"]
    layer, key = {"tensor": ("1", "tensor_parallel_size: 1"), "ulysses": ("0", "ulysses_size: 1")}[name]
    assert f"they part in model.layers.{layer} (Qwen3DecoderLayer)" in first["told"] and key in first["told"]


def megatron_main(rank: int, model: Path) -> list[str]:
    """A packed row over two sequence-parallel ranks, in which sequences see each other; and another generator."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from roll.distributed.strategy.megatron.input import MegatronInput

    def as_one(one: MegatronInput) -> Any:
        if one.cumulative_lengths is None:
            return None
        bounds = one.cumulative_lengths[[0, -1]]
        return PackedSeqParams("thd", bounds, bounds, None, None, int(bounds[1]), int(bounds[1]))

    strategy = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    worker = {"use_sequence_packing": True, "share_prompts": False, "infer_batch_size": 9}
    options: dict[str, Any] = {"worker": worker, "training_args": {"per_device_train_batch_size": 9}}
    found, batch = trainer(model, "megatron_train", rank, strategy=strategy, **options), make_batch()
    with mock.patch.object(MegatronInput, "packed_seq_params", as_one):
        told = [refused(found.logprobs, batch)]
    right = found.logprobs(batch).logprobs_T
    assert right is not None and found.own_forward is not None and found.own_forward.compared == {"packed"}
    found.own_forward.compared.clear()
    wrong = batch.replace(rollout_logprobs_T=right - 0.2)
    told.append(refused(found.train_step, wrong, gain_loss, why="from those of the generator"))
    found.train_step(batch.replace(rollout_logprobs_T=right), gain_loss)
    assert found.optimizer_steps == 1
    found.own_forward.compared.clear()
    found.train_step(wrong, gain_loss)  # of weights before the step
    return told


def test_megatron_is_compared_with_itself_on_one_sequence_and_with_the_generator(tmp_path):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    tiny_model(tiny_config("qwen2", tie_word_embeddings=True)).save_pretrained(tmp_path)
    first, second = run_ranks(megatron_main, 2, tmp_path)
    assert first == second
    leak, generator = first
    assert "they part in decoder.layers.0 (TransformerLayer)" in leak and "set use_sequence_packing: false" in leak
    assert leak.startswith("Qwen2: ") and "strategy" in generator
