"""Folders of models whose tensors, tokens, layers or family do not fit are refused or named before anything starts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import transformers
from safetensors.torch import load_file, save_file

from roll.configs import SHIPPED
from roll.configs.agentic import AgenticConfig
from roll.configs.compose import compose_config
from roll.configs.distill import DistillConfig
from roll.configs.loader import load_composed, validate
from roll.configs.offline import SFTConfig
from roll.configs.preference import RewardTrainingConfig
from roll.configs.problems import ConfigErrors
from roll.configs.rlvr import RLVRConfig
from roll.models.adapter_files import ADAPTER_FILE
from roll.models.lora import LoraSpec, write_adapter_config
from roll.models.tiny import make_tokenizer
from roll.models.weight_files import INDEX
from roll.pipeline.start import check_rows
from roll.preflight.choices import CHECKS
from roll.preflight.models import check_formats, check_low_precision, check_tokenizer, describe_adapter, untried_models
from tests.support.configs import problems_of, words_of
from tests.support.sizes import sizes
from tests.unit.preflight.test_wrong_choices import VALUES

ROWS = len(make_tokenizer())
SIZES: dict[str, Any] = {**sizes(ROWS, 16, 24, 2, 2, 1), "tie_word_embeddings": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model that fits its tokenizer."""
    tokenizer = make_tokenizer()
    config = transformers.Qwen2Config(eos_token_id=tokenizer.eos_token_id, **SIZES)
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def settings(folder: Path, strategy: str, **model_args: Any) -> dict[str, Any]:
    data = folder.parent / "data.jsonl"
    data.write_text("")
    section = {
        "model_args": {"dtype": "fp32", **model_args},
        "data_args": {"file_name": str(data), "prompt": "prompt"},
        "strategy_args": {"strategy_name": strategy},
        "device_mapping": [0],
    }
    return {"exp_name": "run", "max_steps": 1, "pretrain": str(folder), "actor_train": section}


def told(schema: Any, values: dict[str, Any]) -> dict[str, str]:
    found = problems_of(validate, schema, values, CHECKS[schema])
    return {path: f"{problem.expected} {problem.hint}" for path, problem in found.items()}


def problems(folder: Path, strategy: str = "fsdp2_train", **model_args: Any) -> dict[str, str]:
    return told(SFTConfig, settings(folder, strategy, **model_args))


def add_output_layer(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    other = tensors["model.embed_tokens.weight"] + 1
    save_file({**tensors, "lm_head.weight": other}, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, file: str = "config.json", **entries: Any) -> None:
    known = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(known | entries))


def add_token(folder: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    tokenizer.save_pretrained(folder)


def written(file: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / file).write_text(text)


def configured(file: str = "config.json", **entries: Any) -> Callable[[Path], Any]:
    return lambda folder: configure(folder, file, **entries)


KEY = "actor_train.model_args"
UNMADE = "no model can be made of config.json"
WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "output layer": (add_output_layer, "lm_head.weight differs from model.embed_tokens.weight"),
    "layers": (configured(num_hidden_layers=1, layer_types=["full_attention"]),
        "config.json says num_hidden_layers: 1, the file has 2"),
    "quantised": (configured(quantization_config={"quant_method": "awq"}),
        "quantization_config in its config.json (awq)"),
    "token": (add_token, f"beyond the model's vocabulary (vocab_size {ROWS}): '<|new|>' ({ROWS});"),
    "configuration": (configured(num_hidden_layers=1), "(1) must be equal to the number of"),
    "activation": (configured(hidden_act="swishy"), UNMADE),
    "rotary positions": (configured(rope_parameters={"rope_type": "spiral", "factor": 2.0}), UNMADE),
    "generation": (written("generation_config.json", "[1]"), "it holds [1]"),
    "tokenizer": (written("tokenizer.json", "{}"), "its tokenizer cannot be read (KeyError: 'added_tokens')"),
    "index": (written(INDEX, json.dumps({"weight_map": {"lm_head.weight": 3}})),
        "weight_map.lm_head.weight: got 3, expected the name of a file"),
    "format": (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "no model.safetensors in it, and no model.safetensors.index.json, but pytorch_model.bin;"),
    "end": (configured("generation_config.json", eos_token_id=[1, 999]),
        "generation_config.json: eos_token_id: got [1, 999], expected below vocab_size"),
}  # fmt: skip


TRAINERS = ["fsdp2_train", "deepspeed_train", "megatron_train"]


@pytest.mark.parametrize("strategy", TRAINERS)
def test_a_whole_folder_is_valid_for_every_trainer(folder, strategy):
    assert problems(folder, strategy) == {}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_named(folder, name):
    change, reason = WRONG[name]
    change(folder)
    assert reason in problems(folder)["pretrain"]


def test_a_teacher_has_a_row_for_each_token_of_the_policy(folder):
    teacher = shutil.copytree(folder, folder.parent / "teacher")
    configure(teacher, vocab_size=40)
    values = settings(folder, "fsdp2_train") | {"teacher_pretrain": str(teacher), "sequence_length": 64}
    section = {"strategy_args": {"strategy_name": "fsdp2_infer"}, "device_mapping": [0]}
    made = validate(DistillConfig, values | {"teacher": section})
    (problem,) = check_tokenizer(made)
    assert problem.path == "pretrain" and "vocabulary of teacher_pretrain" in problem.expected
    with pytest.raises(ValueError, match=r"teacher, the model of teacher: \d+ of the tokenizer's"):
        check_rows(made)


def test_a_model_that_is_not_looked_at_before_a_run_has_a_row_for_each_token(folder):
    made = validate(SFTConfig, settings(folder, "fsdp2_train"))
    check_rows(made)
    add_token(folder)
    with pytest.raises(ValueError, match=r"the model of actor_train: 1 of the tokenizer's"):
        check_rows(made)


def test_weights_that_are_not_here_are_no_problem_before_a_run(folder):
    made = validate(SFTConfig, settings(folder, "fsdp2_train"))
    assert list(check_formats(made, needed=True)) == []
    (folder / "model.safetensors").unlink()
    assert problems(folder) == {}
    assert [problem.path for problem in check_formats(made, needed=True)] == ["pretrain"]


def test_what_all_linear_leaves_out_of_a_mixture_is_said(tmp_path):
    config = transformers.MixtralConfig(num_local_experts=4, **SIZES)
    config.save_pretrained(tmp_path / "model")
    made = validate(SFTConfig, settings(tmp_path / "model", "fsdp2_train", lora_target="all-linear"))
    (line,) = describe_adapter(made)
    assert line.startswith("warning: actor_train.model_args.lora_target: all-linear leaves without adapter: ")
    assert "mlp.experts.gate_up_proj (2 tensors, 6,144 parameters)" in line


@pytest.fixture
def adapter(folder: Path) -> Path:
    """One of rank 2 on ``q_proj`` and ``v_proj``."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, config).save_pretrained(str(folder.parent / "adapter"))
    return folder.parent / "adapter"


def started_from(adapter: Path, targets: str = "q_proj,v_proj") -> dict[str, Any]:
    return {"lora_target": targets, "lora_rank": 2, "lora_alpha": 4, "adapter_name_or_path": str(adapter)}


def test_an_adapter_to_start_from_has_the_matrices_that_are_trained(folder, adapter):
    def found(targets: str) -> str:
        return problems(folder, **started_from(adapter, targets)).get(f"{KEY}.adapter_name_or_path", "")

    assert found("q_proj,v_proj") == ""
    assert "has base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight" in found("q_proj")
    assert "lacks base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight" in found("q_proj,k_proj,v_proj")
    tensors = load_file(adapter / ADAPTER_FILE)
    name = next(name for name in tensors if ".lora_A." in name)
    save_file({**tensors, name: tensors[name][:, 1:].contiguous()}, adapter / ADAPTER_FILE)
    assert "got shape (2, 15), expected (2, 16)" in found("q_proj,v_proj")
    (adapter / ADAPTER_FILE).write_bytes(b"cut")
    assert "expected a whole safetensors file" in found("q_proj,v_proj")


def test_an_adapter_of_another_model_is_told(folder, adapter):
    made = validate(SFTConfig, settings(folder, "fsdp2_train", **started_from(adapter)))
    assert describe_adapter(made) == []
    configure(adapter, "adapter_config.json", base_model_name_or_path="org/other")
    (line,) = describe_adapter(made)
    assert f"the adapter was made for org/other, pretrain is {folder}" in line


def test_layers_of_gpt2_are_adapted_or_named(tmp_path):
    transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=8192).save_pretrained(tmp_path / "model")
    assert problems(tmp_path / "model", lora_target="all-linear") == {}
    found = problems(tmp_path / "model", lora_target="q_proj")
    assert "c_attn, c_fc, c_proj" in found[f"{KEY}.lora_target"]


NAMES = [f"layers.0.{layer}.lora_A.weight" for layer in ("q_proj", "down_proj")]


def adapter_problems(folder: Path, strategy: str = "fsdp2_train", **model_args: Any) -> dict[str, str]:
    """What is wrong with an adapter of a reward model."""
    values = settings(folder / "none", strategy, lora_target="q_proj,down_proj", **model_args)
    return told(RewardTrainingConfig, values | {"pretrain": "tiny"})


@pytest.mark.parametrize("strategy", TRAINERS)
def test_an_adapter_of_a_reward_model_is_trained(strategy, tmp_path):
    assert adapter_problems(tmp_path, strategy) == {}


def test_an_adapter_of_a_language_model_or_one_that_adds_otherwise_is_no_start(tmp_path):
    key, spec = f"{KEY}.adapter_name_or_path", LoraSpec(8, 16, ("q_proj", "down_proj"))
    write_adapter_config(tmp_path, spec, "base", NAMES)
    found = adapter_problems(tmp_path, adapter_name_or_path=str(tmp_path))
    assert "task_type SEQ_CLS task_type: CAUSAL_LM in" in found[key]
    write_adapter_config(tmp_path, spec, "base", NAMES, scores=True)
    assert adapter_problems(tmp_path, adapter_name_or_path=str(tmp_path)) == {}
    configure(tmp_path, "adapter_config.json", use_rslora=True)
    found = adapter_problems(tmp_path, adapter_name_or_path=str(tmp_path))
    assert found == {key: "an adapter without it use_rslora is True in adapter_config.json"}


@pytest.mark.parametrize(("generator", "lora"), [("vllm", ""), ("sglang", ""), ("hf_infer", ""), ("vllm", "q_proj")])
def test_a_generator_that_loads_fp8_by_itself_cannot_take_trained_weights(folder, generator, lora):
    configure(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    overrides = [f"pretrain={folder}", f"actor_infer.strategy_args.strategy_name={generator}"]
    overrides += [f"{KEY}.lora_target={lora}"] if lora else []
    made = load_composed(RLVRConfig, "rlvr_math", compose_config("rlvr_math", SHIPPED, overrides))
    found = [problem.expected for problem in check_low_precision(made)]
    assert len(found) == (generator != "hf_infer" and not lora)
    assert all(f"such as `roll export {folder} -o DIR` makes of it" in expected for expected in found)


# Families that nobody has compared, or that a kernel or a length would compute wrong

SMALL = {**sizes(160, 64, 96, 2, 4, 2), "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **FACTORS}


def run_of(folder: Path, model: Any, **actor: Any) -> AgenticConfig:
    if not folder.exists():
        transformers.AutoModelForCausalLM.from_config(model).save_pretrained(folder)
    generator = {"strategy_args": {"strategy_name": "vllm"}, "device_mapping": [0]}
    train = {**VALUES["actor_train"], "model_args": actor}
    roles = {"actor_infer": generator, "actor_train": train, "reference": train}
    return validate(AgenticConfig, {**VALUES, "pretrain": str(folder), **roles}, CHECKS[AgenticConfig])


def test_a_family_that_nobody_has_compared_is_named_once(tmp_path):
    model = transformers.MptConfig(vocab_size=160, d_model=64, n_heads=4, n_layers=2)
    (line,) = untried_models(run_of(tmp_path / "mpt", model))
    assert line.startswith("no test has compared these with plain Transformers: mpt in ") and "docs/models.md" in line
    assert line.count("fsdp2_train") == line.count("vllm") == 1
    assert untried_models(run_of(tmp_path / "qwen2", transformers.Qwen2Config(**SMALL))) == []


def test_a_kernel_that_leaves_out_a_cap_is_refused(tmp_path):
    model = transformers.Gemma2Config(**SMALL, head_dim=16)
    run_of(tmp_path / "gemma2", model)
    found = words_of(run_of, tmp_path / "gemma2", model, attn_implementation="sdpa")
    assert "gemma2 caps attention scores at 50.0" in found["actor_train.model_args.attn_implementation"]


def test_a_length_at_which_rotary_frequencies_change_is_refused(tmp_path):
    model = transformers.Phi3Config(**SMALL, rope_parameters=LONGROPE, original_max_position_embeddings=64)
    with pytest.raises(ConfigErrors, match=r"sequence_length: got 128, expected at most 64: a longer row"):
        run_of(tmp_path / "phi3", model)
