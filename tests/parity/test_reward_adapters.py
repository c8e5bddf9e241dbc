"""A reward model that is an adapter and a head: the base that peft and Transformers score with is a language model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from roll.distributed.strategy.training.exchange import gather
from roll.models.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE
from roll.models.lora import PREFIX, SCORE_NAME
from tests.support.harness import ADAPTER, TASKS, Layout, adapter_weights, cases, make_model, started
from tests.support.layouts_deepspeed import zero
from tests.support.ranks import assert_near, exported_adapter
from tests.support.trainers import module_gradients

TASK = "regression"
PARTS = ("adapter", "head")
ALONE = Layout("alone", "fsdp2_train", 1, task=TASK, lora=ADAPTER)
LAYOUTS = [
    ALONE,
    Layout("zero2", "deepspeed_train", 1, zero(2), task=TASK, lora=ADAPTER, slow=True),
    Layout("single", "megatron_train", 1, task=TASK, lora=ADAPTER),
]

peft = pytest.importorskip("peft", reason="peft is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base") / "model", "qwen2")


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What peft writes of a random adapter and head, whose gradients are large."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(1)
    folder = str(tmp_path_factory.mktemp("start"))
    whole = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    spec = {"r": ADAPTER.rank, "lora_alpha": ADAPTER.alpha, "target_modules": list(ADAPTER.targets)}
    made = peft.get_peft_model(whole, peft.LoraConfig(**spec, task_type="SEQ_CLS", init_lora_weights=False))
    torch.nn.init.normal_(made.get_base_model().score.modules_to_save.default.weight, std=0.1)
    made.save_pretrained(folder)
    return folder


def train(trainer: Any, *steps: int) -> dict[str, Tensor]:
    """The adapter and the head after these steps."""
    for step in steps:
        trainer.train_step(TASKS[TASK].batch(step), TASKS[TASK].loss)
    return exported_adapter(trainer)


def scores(trainer: Any) -> Tensor:
    batch = TASKS[TASK].batch(0)
    found = trainer.logprobs(batch).values_T
    return found[batch.loss_mask_T]


def loaded(base: Path, adapter: Path, *, trained: bool = False) -> Any:
    """What a user of peft has, in float64."""
    from transformers import AutoModelForSequenceClassification

    whole = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(whole, adapter, is_trainable=trained).double().eval()


def scores_of(found: Any) -> Tensor:
    """Of each loss token, read at the end of a conversation that ends in front of it."""
    batch = TASKS[TASK].batch(0)
    read = []
    for row in range(batch.num_sequences):
        one = batch.select([row])
        read += [found(one.tokens_T[None, :end]).logits[0, 0] for end in one.loss_mask_T.nonzero().flatten().tolist()]
    return torch.stack(read)


def parameters(trainer: Any) -> dict[str, Tensor]:
    """All parameters of a trainer in one process."""
    megatron = trainer.context.worker.strategy_args.strategy_name == "megatron_train"
    return dict(trainer.model.chunks[0].named_parameters()) if megatron else trainer.weights.parameters


def gradients_of(trainer: Any) -> dict[str, Tensor]:
    """Gradients before clipping, under the names of a peft folder."""
    if trainer.context.worker.strategy_args.strategy_name == "megatron_train":
        parts = {part: trainer._gatherer.pieces(part, torch.float32, lambda p: p.main_grad) for part in PARTS}
        found = gather(parts["adapter"], [0]) | {SCORE_NAME: gather(parts["head"], [0])["linear.weight"]}
        return {name: one.clone() for name, one in found.items()}
    named = module_gradients(trainer)
    named[SCORE_NAME] = named.pop("value_head.linear.weight")
    return {stored_name(f"{PREFIX}{n}" if n != SCORE_NAME else n): one.clone() for n, one in named.items()}


def stored_name(name: str) -> str:
    """Name in a peft folder of a parameter in peft's hands, or of a trunk's."""
    return name.replace(".modules_to_save", "").replace(".default", "")


@pytest.mark.parametrize("layout", cases(LAYOUTS))
def test_it_scores_and_learns_as_in_peft(layout, model, start, tmp_path):
    trainer = started(replace(layout, lora=replace(ADAPTER, start=start)), model)
    assert_near(exported_adapter(trainer), load_file(Path(start) / ADAPTER_FILE), 0.0)
    base = {name: p.detach().clone() for name, p in parameters(trainer).items() if not p.requires_grad}
    trained = train(trainer, 0, 1)
    trainer.save_model(tmp_path)

    config = json.loads((tmp_path / ADAPTER_CONFIG).read_text())
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["score"]
    assert {file.name for file in tmp_path.iterdir() if "token" not in file.name} == {ADAPTER_FILE, ADAPTER_CONFIG}
    found = loaded(model, tmp_path, trained=True)
    assert_near(adapter_weights(found), load_file(tmp_path / ADAPTER_FILE), 0.0)
    assert_near(load_file(tmp_path / ADAPTER_FILE), trained, 0.0)
    with torch.no_grad():
        torch.testing.assert_close(scores(trainer).double(), scores_of(found), rtol=0, atol=1e-5)

    loss, _ = TASKS[TASK].oracle(found, TASKS[TASK].batch(2))
    loss.backward()
    expected = {name: p.grad for name, p in found.named_parameters() if p.requires_grad}
    gradients = {}
    apply = trainer.apply_gradients

    def record(rate: float, norm: float) -> None:
        gradients.update(gradients_of(trainer))
        apply(rate, norm)

    trainer.apply_gradients = record
    train(trainer, 2)
    assert_near(gradients, {stored_name(name): one for name, one in expected.items()}, 5e-6)
    assert min(float(one.abs().max()) for one in gradients.values()) > 1e-3, "all of it learns"
    assert all(torch.equal(parameters(trainer)[name], one) for name, one in base.items()), "the base is frozen"
    if hasattr(trainer, "shutdown"):
        trainer.shutdown()


@pytest.mark.parametrize("layout", cases(LAYOUTS))
def test_a_resumed_reward_model_equals_the_uninterrupted_one_bit_for_bit(layout, model, start, tmp_path):
    trainer = started(replace(layout, lora=replace(ADAPTER, start=start)), model)
    train(trainer, 0, 1)
    trainer.save(tmp_path)
    end = train(trainer, 2)
    if hasattr(trainer, "shutdown"):
        trainer.shutdown()
    for again in (layout, ALONE):
        resumed = started(again, model)
        resumed.load(tmp_path)
        assert_near(train(resumed, 2), end, 0.0 if again == layout else 5e-6)
        if hasattr(resumed, "shutdown"):
            resumed.shutdown()


def test_beside_a_base_of_16_bits_the_adapter_and_the_head_are_float32(model, start, tmp_path):
    trainer = started(replace(ALONE, model_args={"dtype": "bf16"}, lora=replace(ADAPTER, start=start)), model)
    kinds = {name: parameter.dtype for name, parameter in trainer.weights.parameters.items()}
    trained = set(trainer.weights.trained)
    assert {kinds[name] for name in trained} == {torch.float32} and "value_head.linear.weight" in trained
    assert {kind for name, kind in kinds.items() if name not in trained} == {torch.bfloat16}
    train(trainer, 0, 1)
    trainer.save_model(tmp_path)
    assert {one.dtype for one in load_file(tmp_path / ADAPTER_FILE).values()} == {torch.float32}
    with torch.no_grad():
        expected = scores_of(loaded(model, tmp_path))
    torch.testing.assert_close(scores(trainer).double(), expected, rtol=0, atol=0.05)
