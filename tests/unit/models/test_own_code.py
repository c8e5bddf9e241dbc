"""Models that come with code of their own: nothing of it runs unless ``trust_remote_code`` says so."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from roll.__main__ import main
from roll.configs.worker import ModelArguments, WorkerConfig
from roll.data.requests import GenerateRequest, SamplingParams
from roll.distributed.strategy.base import StrategyContext
from roll.distributed.strategy.generation.alone import local_generator
from roll.distributed.strategy.generation.model_outline import ModelOutline
from roll.distributed.strategy.vllm.arguments import engine_arguments
from roll.models.heads import load_output_layer
from roll.models.loading import load_causal_lm, load_config
from roll.models.tokenizer import check_same_ids, load_tokenizer
from roll.preflight.models import trusted_code
from roll.rewards.classifiers import RewardModelConfig
from roll.rewards.reward_model import RewardModelVerifier
from roll.rewards.types import Sample
from roll.tracking.checkpointer import Checkpointer
from tests.support.contract import forward_logprobs, greedy_oracle
from tests.support.own_code import make_model
from tests.support.trainers import make_batch, make_trainer, policy_loss
from tests.unit.models import conftest

KEY = "trust_remote_code: true"
TRUSTING = {"trust_remote_code": True}
EVERYONE = ("actor_train", "actor_infer", "reference")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import dynamic_module_utils

    cache = tmp_path_factory.mktemp("modules")
    patch = pytest.MonkeyPatch()
    patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(cache))
    patch.syspath_prepend(str(cache))
    yield str(make_model(tmp_path_factory.mktemp("own") / "own_policy"))
    patch.undo()


def own_modules() -> list[str]:
    return [name for name in sys.modules if name.endswith(("modeling_own", "tokenization_own"))]


def test_nothing_runs_unless_asked(own):
    """First in the file: nothing has loaded the modules yet."""
    for load in (load_config, load_causal_lm, load_tokenizer, lambda path: check_same_ids("tiny", path)):
        with pytest.raises(ValueError, match=KEY):
            load(own)
    with pytest.raises(ValueError, match=KEY):
        load_output_layer(own, torch.float32)
    assert not own_modules()


def test_asked_it_is_the_models_own_code_that_runs(own):
    model = load_causal_lm(own, trust_remote_code=True)
    assert type(model).__name__ == "OwnForCausalLM" and type(model.config).__name__ == "OwnConfig"
    tokenizer = load_tokenizer(own, trust_remote_code=True)
    assert type(tokenizer).__name__ == "OwnTokenizer" and tokenizer.decode(tokenizer.encode("12+3")) == "12+3"
    check_same_ids("tiny", own, trust_other=True)
    layer = load_output_layer(own, torch.float32, trust_remote_code=True)
    assert layer.weight_VH.equal(model.get_output_embeddings().weight)


def test_commands_that_read_its_tokenizer_ask_too(own, capsys):
    doctor = ["doctor", "--json", "--model", own]
    for command in (["template", "check", own], doctor):
        assert main(command) in (1, 2)
        told = capsys.readouterr()
        assert KEY in told.out + told.err
    assert main(["template", "check", own, "--trust-remote-code"]) in (0, 1)
    assert KEY not in (told := capsys.readouterr()).out + told.err and told.out


def test_logits_that_only_its_own_code_knows_are_those_that_are_trained(own, tmp_path):
    """Also where they are compared: in the first micro-batch."""
    folder = make_model(tmp_path / "own_head", logit_factor=0.5)
    trainer = make_trainer(folder, "fsdp2_train", model_args=TRUSTING, temperature=1.0)
    batch = make_batch()
    found = trainer.logprobs(batch).logprobs_T
    assert trainer.own_forward.compared == {"padded"}
    model, tokens = load_causal_lm(str(folder), trust_remote_code=True), batch.token_index([0])
    row = batch.tokens_T[tokens]
    wanted = forward_logprobs(model, row[:1].numpy(), row[1:].numpy(), 1.0)
    mask = batch.loss_mask_T[tokens][1:]
    assert found[tokens][1:][mask].tolist() == pytest.approx(torch.tensor(wanted)[mask].tolist(), abs=1e-5)


def test_its_sequences_stand_in_rows_of_their_own(own):
    packs = {"use_sequence_packing": True}
    with pytest.raises(ValueError, match="use_sequence_packing: true, expected false: own_model_of_a_test has its own"):
        make_trainer(Path(own), "fsdp2_train", model_args=TRUSTING, worker=packs)
    assert "its own code" in refusals(own, EVERYONE, actor_train=packs)["actor_train.use_sequence_packing"]


def worker(trusts: bool, **sections: Any) -> WorkerConfig:
    return WorkerConfig.model_validate({"model_args": {"trust_remote_code": trusts}, **sections})


def test_a_generator_samples_with_it(own, caplog):
    sections = {"strategy_args": {"strategy_name": "hf_infer"}}
    options: dict[str, Any] = {"sequence_length": 64, "max_running_requests": 4, "seed": 1}
    with pytest.raises(ValueError, match=KEY), local_generator(own, worker(False, **sections), **options):
        pass
    model = load_causal_lm(own, trust_remote_code=True)
    prompt = torch.tensor([5, 9, 30, 2]).numpy()
    with local_generator(own, worker(True, **sections), **options) as engine:
        request = GenerateRequest("a", prompt, SamplingParams(temperature=0, max_new_tokens=8))
        completion = asyncio.run(engine.generate(request))
    assert completion.token_ids.tolist() == greedy_oracle(model, prompt, 8)
    assert completion.logprobs == pytest.approx(forward_logprobs(model, prompt, completion.token_ids, 1.0), abs=1e-4)
    assert f"Python files that come with {own} run" in caplog.text


def test_a_trainer_learns_with_it_and_saves_it(own, tmp_path, capsys):
    with pytest.raises(ValueError, match=KEY):
        make_trainer(Path(own), "fsdp2_train")
    trainer = make_trainer(Path(own), "fsdp2_train", model_args=TRUSTING, temperature=1.0)
    trainer.train_step(make_batch(), policy_loss)
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    saved = Checkpointer(checkpoints).save(1, lambda path: trainer.save(path) and None, {})
    folder = (saved or next(checkpoints.glob("checkpoint-*"))) / "actor_train"
    assert {"modeling_own.py", "configuration_own.py", "tokenization_own.py"} <= {f.name for f in folder.iterdir()}
    with pytest.raises(ValueError, match=KEY):
        load_causal_lm(str(folder))
    learnt = load_causal_lm(str(folder), trust_remote_code=True)
    assert type(learnt).__name__ == "OwnForCausalLM"
    trainer.load(folder.parent)
    for name, parameter in learnt.named_parameters():
        assert parameter.equal(trainer.weights.parameters[f"model.{name}"].detach().float()), name
    assert main(["export", str(folder), "-o", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "modeling_own.py").is_file()


def test_vllm_and_sglang_are_told(own):
    from roll.configs.engines.sglang import SglangConfig
    from roll.configs.engines.vllm import VllmConfig
    from roll.distributed.strategy.sglang.strategy import engine_arguments as sglang_arguments

    with pytest.raises(ValueError, match=KEY):
        ModelOutline(StrategyContext(worker(False), "actor_infer", own))
    context = StrategyContext(worker(True), "actor_infer", own)
    outline = ModelOutline(context)
    cpu, gpu = (engine_arguments(context, VllmConfig(), outline, on_cpu=on_cpu) for on_cpu in (True, False))
    assert cpu["trust_remote_code"] is gpu["trust_remote_code"] is True
    assert cpu["block_size"] == 32 and "block_size" not in gpu, "one that is given keeps vLLM from choosing"
    assert sglang_arguments(context, SglangConfig(), outline, on_cpu=True)["trust_remote_code"] is True


def test_a_reward_model_has_a_switch_of_its_own(own, tmp_path):
    folder = str(make_model(tmp_path / "own_reward", "SequenceClassification", num_labels=1))
    with pytest.raises(ValueError, match=KEY):
        RewardModelVerifier(RewardModelConfig(model_path=folder))
    verifier = RewardModelVerifier(RewardModelConfig(model_path=folder, trust_remote_code=True))
    assert type(verifier.classifier.model).__name__ == "OwnForSequenceClassification"
    sample = Sample([{"role": "user", "content": "1+1="}], "2", None, "sums")
    assert isinstance(asyncio.run(verifier.score(sample)).score, float)


def values_of(pretrain: str, trusted: tuple[str, ...], **sections: Any) -> dict[str, Any]:
    generator = {"strategy_args": {"strategy_name": "hf_infer"}}
    values = {"reference": generator, "actor_infer": generator, "pretrain": pretrain, **sections}
    return values | {role: {**values.get(role, {}), "model_args": TRUSTING} for role in trusted}


def refusals(*args: Any, **sections: Any) -> dict[str, str]:
    return conftest.refusals(**values_of(*args, **sections))


def test_a_configuration_says_it_for_every_role(own):
    assert ModelArguments().trust_remote_code is False
    key = "{}.model_args.trust_remote_code".format
    warnings = trusted_code(conftest.checked(**values_of(own, EVERYONE)))
    assert [line.partition(":")[0] for line in warnings] == [key(role) for role in EVERYONE]
    assert all(f"come with {own} run" in line for line in warnings)
    missing = refusals(own, ())
    assert list(missing) == [key("actor_train")]
    assert "configuration_own.py, modeling_own.py" in missing[key("actor_train")]
    assert list(refusals(own, ("actor_train", "reference"))) == [key("actor_infer")]
    assert list(refusals("tiny", (), reference_pretrain=own)) == [key("reference")]
    assert not trusted_code(conftest.checked(**values_of("tiny", ())))


def test_megatron_refuses_it(own):
    megatron = {"strategy_args": {"strategy_name": "megatron_train"}}
    found = refusals(own, EVERYONE, actor_train=megatron)
    assert "Megatron's own code" in found["actor_train.model_args.trust_remote_code"]


def test_transformers_still_does_not_know_the_model(own):
    """Last in the file: what was trusted above stays with those who said so."""
    with pytest.raises(ValueError):
        AutoConfig.from_pretrained(own, trust_remote_code=False)
