"""Model families that people train, in every trainer and generator: equal to plain Hugging Face, or refused by name.

CI runs a choice: each family and each kind of row. ``-m "slow or not slow"`` runs all.
"""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from roll.distributed.strategy import STRATEGIES
from roll.distributed.strategy.generation.engine_process import EngineStoppedError
from roll.models.measured import packing_problem
from roll.models.megatron.families import FAMILIES, REFUSED
from roll.models.tiny import make_tokenizer
from roll.rewards.classifiers import RewardModelConfig, load_classifier
from tests.support.choice import one_in
from tests.support.contract import OPTIONS, burst, context_of, forward_logprobs, greedy_oracle, requests_of
from tests.support.harness import (
    ALL_ADAPTED,
    VOCABULARY,
    Figures,
    Layout,
    as_row,
    check,
    measure,
    measure_here,
    needs,
    record,
)
from tests.support.known_families import KNOWN, LONGROPE, SCORES, Known, make_known

TRAINERS = {"fsdp2_train": {}, "deepspeed_train": {"zero_optimization": {"stage": 2}}, "megatron_train": {}}
FOUR, RECOMPUTED = {"per_device_train_batch_size": 4}, {"disable_gradient_checkpointing": False}


def by_tokens(**limits: int) -> dict[str, int]:
    """Micro-batches by their tokens, in training and where nothing is trained."""
    limits = {"use_dynamic_batching_in": True, **limits}
    return {f"{key}_{where}": value for where in ("train", "infer") for key, value in limits.items()}


VARIANTS = {
    "whole": {},
    "cut": {"worker": by_tokens(max_tokens_per_microbatch_in=50), "model_args": RECOMPUTED},
    "packed": {"worker": {"use_sequence_packing": True}, "training_args": FOUR},
    "lora": {"lora": ALL_ADAPTED},
    "shared": {"task": "grouped", "training_args": FOUR},
    "routed": {"task": "routed"},
    "scores": {"task": "regression"},
}
"""Micro-batches of two rows; other cuts, recomputed; packed rows; an adapter; groups whose prompt is computed once;
experts replayed; a classifier's head, as reward models have."""

BOUNDS = {"logprobs": 1e-4, "loss": 5e-6, "grad_norm": 5e-5, "weights": 5e-5, "saved": 5e-5, "neighbour": 1e-5}
"""These models are wider than the parity table's, and each says what it says with more of its own."""
STATES = {name: 10 * bound for name, bound in BOUNDS.items()}
"""A state that every token changes gathers the rounding of all of them."""


def applies(known: Known, variant: str, trainer: str) -> bool:
    if trainer == "megatron_train" and not known.megatron:
        return False
    return {"routed": known.routed, "scores": known.scores}.get(variant, True)


def row(family: str, trainer: str, variant: str, **changed: Any) -> Layout:
    bounds = STATES if KNOWN[family].recurrent else BOUNDS
    options = {"saved": True, "bounds": bounds} | VARIANTS[variant]
    if trainer == "megatron_train" and variant == "lora" and family in ("qwen3_next", "qwen3_5_moe"):
        options["lora"] = replace(ALL_ADAPTED, excluded=("shared_expert_gate",))
    model = family + SCORES if variant == "scores" else family
    return Layout(f"{family}-{variant}", trainer, 1, TRAINERS[trainer], model=model, **options | changed)


ROWS = [
    (family, trainer, variant)
    for family, known in KNOWN.items()
    for trainer in TRAINERS
    for variant in VARIANTS
    if applies(known, variant, trainer)
]
CHOICE = {
    (family, ("fsdp2_train", "deepspeed_train")[number % 2], ("lora", "cut", "packed", "shared", "whole")[number % 5])
    for number, family in enumerate(KNOWN)
}
CHOICE |= {("qwen3_moe", "deepspeed_train", "routed"), ("llama3", "megatron_train", "packed")}
OWN = ("mistral", "phi3", "deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "qwen3_next", "qwen3_5")
CHOICE |= {(family, "megatron_train", variant) for family, _, variant in CHOICE if family in OWN[::2]}
CHOICE |= {("deepseek_v3", "megatron_train", "routed")}
CHOICE -= {("deepseek_v3", "megatron_train", "packed")}
CHOICE |= {(family, "fsdp2_train", "scores") for family in ("llama3", "gemma2")}
"""Each family once and each kind of row twice or more; in Megatron every other one that it has something of
its own for."""


pytestmark = pytest.mark.usefixtures("one_rank")


def folder_of(models: Path, name: str) -> Path:
    return models / name if (models / name).exists() else make_known(models / name, name, VOCABULARY)


def refusal(layout: Layout, family: str, variant: str, folder: Path) -> tuple[str, str]:
    """Why a trainer refuses a row, if it does, and the setting that it names."""
    if layout.strategy == "megatron_train":
        refused = KNOWN[family].model_type == "phi3" and variant == "lora"
        reason = "lora_target: got gate_up_proj, qkv_proj among the layers" if refused else ""
        return reason, "model_args.lora_target: got"
    packed = layout.worker.get("use_sequence_packing")
    reason = packing_problem(AutoConfig.from_pretrained(folder)) if packed else ""
    return reason, "use_sequence_packing: true, expected false"


def record_row(family: str, engine: str, variant: str, **told: Any) -> None:
    record("family", {"family": family, "engine": engine, "variant": variant, **told})


def record_and_check(family: str, engine: str, variant: str, layout: Layout, figures: Figures) -> None:
    record_row(family, engine, variant, **as_row(figures))
    check(layout, figures)


@pytest.mark.parametrize(
    ("family", "trainer", "variant"),
    [pytest.param(*each, marks=[] if each in CHOICE else [pytest.mark.slow]) for each in ROWS],
)
def test_a_trainer_takes_the_same_steps(models, tmp_path, caplog, family, trainer, variant):
    needs(trainer)
    layout = row(family, trainer, variant)
    folder = folder_of(models, layout.model)
    reason, said = refusal(layout, family, variant, folder)
    if reason:
        with pytest.raises(ValueError, match=said) as refused:
            measure_here(layout, models, tmp_path)
        assert reason in str(refused.value)
        record_row(family, trainer, variant, refused=reason)
        return
    record_and_check(family, trainer, variant, layout, measure_here(layout, models, tmp_path))


@pytest.mark.slow  # two processes each
@pytest.mark.parametrize("family", ["llama3", "mistral", "gemma2", "gemma3", "qwen3_moe", "glm4_moe", "qwen3_5"])
def test_two_tensor_parallel_ranks_take_the_same_steps(tmp_path, family):
    layout = replace(row(family, "fsdp2_train", "whole", saved=False), world_size=2)
    layout = replace(layout, strategy_config={"tensor_parallel_size": 2})
    make_known(tmp_path / family, family, VOCABULARY)
    record_and_check(family, "fsdp2_train", "tensor parallel", layout, measure([layout], tmp_path)[layout.id])


TP_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP, EP, ETP = "pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
MEGATRON_LAYOUTS = {
    "mistral": [("whole", TP_SP)],
    "phi3": [("whole", TP_SP)],
    "mixtral": [("whole", {EP: 2}), ("packed", TP_SP)],
    "glm4_moe": [("whole", TP_SP), ("packed", {PP: 2})],
    "deepseek_v3": [
        ("whole", TP_SP),
        ("packed", {EP: 2}),
        ("packed", {PP: 2, "num_layers_in_first_pipeline_stage": 2}),
        ("lora", TP_SP),
    ],
    "gpt_oss": [
        ("whole", TP_SP | {ETP: 1, EP: 2}),
        ("packed", TP_SP | {ETP: 1}),
        ("packed", {EP: 2}),
        ("packed", {PP: 2}),
    ],
    "qwen3_next": [("whole", {EP: 2}), ("packed", {PP: 2})],
}


@pytest.mark.slow  # two processes each
@pytest.mark.parametrize("family", MEGATRON_LAYOUTS)
def test_two_ranks_of_megatron_take_the_same_steps(tmp_path, family):
    needs("megatron_train")
    layouts = []
    for number, (variant, config) in enumerate(MEGATRON_LAYOUTS[family]):
        alone = row(family, "megatron_train", variant)
        layouts.append(replace(alone, name=f"{alone.name}-{number}", world_size=2, strategy_config=config))
    make_known(tmp_path / family, family, VOCABULARY)
    measured = measure(layouts, tmp_path)
    for layout in layouts:
        record_and_check(family, "megatron_train", "two ranks", layout, measured[layout.id])


@pytest.mark.parametrize("trainer", TRAINERS)
def test_rows_beyond_where_longrope_changes_are_refused(tmp_path, trainer):
    needs(trainer)
    layout = row("phi4_mini", trainer, "shared")
    shorter = {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 16}}
    make_known(tmp_path / "phi4_mini", "phi4_mini", VOCABULARY, **shorter, original_max_position_embeddings=16)
    with pytest.raises(ValueError, match=r"sequence_length: got 24, expected at most 16: .* phi3 \(longrope\)"):
        measure_here(layout, tmp_path, tmp_path)


def test_a_kernel_that_leaves_out_the_cap_of_attention_scores_is_refused(tmp_path):
    layout = row("gemma2", "fsdp2_train", "whole", model_args={"attn_implementation": "sdpa"})
    make_known(tmp_path / "gemma2", "gemma2", VOCABULARY)
    words = r"got sdpa, expected auto, eager or fa2: gemma2 caps attention scores at 2\.0"
    with pytest.raises(ValueError, match=words):
        measure_here(layout, tmp_path, tmp_path)


def test_a_reward_model_computes_the_cap_of_attention_scores(tmp_path):
    folder = make_known(tmp_path / "model", "gemma2_scores", VOCABULARY)
    ids = torch.arange(3, 23)[None]
    exact = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        found = load_classifier(RewardModelConfig(model_path=str(folder)))(ids).logits
        assert float((found - exact(ids).logits).abs().max()) < 1e-5


@pytest.mark.parametrize("family", [name for name, known in KNOWN.items() if not known.megatron])
def test_megatron_refuses_what_it_does_not_convert(models, tmp_path, family):
    needs("megatron_train")
    folder_of(models, family)
    with pytest.raises(ValueError) as refused:
        measure_here(row(family, "megatron_train", "whole"), models, tmp_path)
    problem, kind = str(refused.value), KNOWN[family].model_type
    if kind in FAMILIES:
        reason = problem.splitlines()[-1].strip()
        assert "Megatron-Core cannot compute this model" in problem
    else:
        assert f"(model_type '{kind}')" in problem and "cannot be converted to Megatron-Core" in problem
        lacks = f"does not compute {REFUSED[kind]}" if kind in REFUSED else ": weights of this class are not converted"
        reason = f"Megatron-Core{'' if lacks[0] == ':' else ' '}{lacks}"
    record_row(family, "megatron_train", "whole", refused=reason)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Any]:
    """Starts a generator on a family's model and stops it in the end."""
    started = []

    def start(family: str, engine: str, **changed: Any) -> tuple[Any, Path]:
        tokenizer = make_tokenizer()
        folder = make_known(tmp_path / family, family, len(tokenizer), **changed)
        tokenizer.save_pretrained(folder)
        context = context_of(engine, str(folder), OPTIONS.get(engine), sequence_length=64, max_running_requests=4)
        context.worker.model_args.dtype = "fp32"
        started.append(STRATEGIES.get(engine)(context))
        started[-1].setup()
        return started[-1], folder

    yield start
    for engine in started:
        engine.shutdown()


def generated(engine: Any, folder: Path) -> float:
    """The largest difference of a greedy token's log-probability, once the tokens are the unmodified model's."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    draw = np.random.default_rng(3)
    prompts = [draw.integers(4, VOCABULARY, size) for size in (5, 17, 30)]
    found = asyncio.run(burst(engine, requests_of(prompts, max_new_tokens=12, temperature=0.0, ignore_eos=True)))
    worst = 0.0
    for completion, prompt in zip(found, prompts, strict=True):
        assert completion.token_ids.tolist() == greedy_oracle(model, prompt, 12)
        said = forward_logprobs(model, prompt, completion.token_ids, 1.0)
        worst = max(worst, float(np.abs(completion.logprobs - said).max()))
    return worst


def check_generated(
    served: Any, family: str, engine: str, sizes: dict[str, Any], bound: float, reason: str = "", **told: str
) -> None:
    """An engine generates as the unmodified model, or refuses it on a CPU for the reason."""
    if reason:
        with pytest.raises((ValueError, EngineStoppedError), match=re.escape(reason)):
            generated(*served(family, engine, **sizes))
        record_row(family, engine, "greedy", **told, refused=f"{ON_A_CPU[engine]}: {reason}")
        return
    worst = generated(*served(family, engine, **sizes))
    record_row(family, engine, "greedy", **told, logprobs=worst)
    assert worst <= bound


ON_A_CPU = {"vllm": "on a CPU, in float32", "sglang": "on a CPU"}


@pytest.mark.parametrize("family", one_in(2, KNOWN))
def test_hf_infer_generates_as_the_unmodified_model(served, family):
    check_generated(served, family, "hf_infer", {}, (STATES if KNOWN[family].recurrent else BOUNDS)["logprobs"])


VLLM_SIZES = {
    "granite_hybrid": {"hidden_size": 128, "mamba_n_heads": 16},
    "phi4_mini": {
        "hidden_size": 128,
        "max_position_embeddings": 1024,  # vLLM's factor is this by the original 64
        "rope_parameters": LONGROPE | {name: 2 * LONGROPE[name] for name in ("short_factor", "long_factor")},
    },
    "qwen2": {"hidden_size": 128},
}
"""Its attention on a CPU takes heads of 32, which most families have by ``head_dim``."""
VLLM_REFUSES = {
    "qwen3_next": "CPU GDN attention requires BF16",
    "gpt_oss": "No Unquantized MoE backend supports the deployment configuration",
    "nemotron_h": "is_act_and_mul=False is supported only for CUDA",
}
"""On a CPU, in float32."""


VLLM_UNTRIED = ("qwen3_5", "qwen3_5_moe", "deepseek_v3")
"""vLLM imports torchvision for the first two, which is not here; its latent attention here takes published sizes."""


@pytest.mark.slow  # an engine of its own for each
@pytest.mark.parametrize("family", [name for name in KNOWN if name not in VLLM_UNTRIED])
def test_vllm_generates_as_the_unmodified_model(served, family):
    needs("vllm")
    sizes = VLLM_SIZES.get(family, {"head_dim": 32})
    check_generated(served, family, "vllm", sizes, 10 * BOUNDS["logprobs"], VLLM_REFUSES.get(family, ""))


SGLANG_SIZES = {
    "mistral": {"sliding_window": 64},
    "phi3": {"sliding_window": 64, "intermediate_size": 64},
    "phi4_mini": {"partial_rotary_factor": 0.75, "intermediate_size": 64, "max_position_embeddings": 1024},
    "smollm3": {"intermediate_size": 64},
}
"""On a CPU it pads what is no multiple of 32, which not all of its classes can load. The share of rotary dimensions is
read where published configurations have it."""
SGLANG_REFUSES = {
    "gemma2": "attention leaves out the caps of scores of gemma2",
    "gpt_oss": "attention leaves out the sinks of gpt_oss",
    "deepseek_v3": "attention does not read the latent keys of deepseek_v3",
} | {
    name: f"there are no kernels for the recurrent layers of {known.model_type}"
    for name, known in KNOWN.items()
    if known.recurrent
}
"""On a CPU."""


@pytest.mark.slow  # an engine of its own for each, in SGLang's environment
@pytest.mark.parametrize("family", KNOWN)
def test_sglang_generates_as_the_unmodified_model(served, family):
    if not OPTIONS:
        pytest.skip("ROLL_SGLANG_PYTHON names no environment (make test-sglang)")
    sizes, reason = SGLANG_SIZES.get(family, {}), SGLANG_REFUSES.get(family, "")
    check_generated(served, family, "sglang", sizes, 10 * BOUNDS["logprobs"], reason, run=sglang_run())


def sglang_run() -> str:
    """Date and version of the comparison, for the page."""
    (told,) = Path(OPTIONS["sglang"]["python_executable"]).parent.parent.glob("lib/*/site-packages/sglang-*.dist-info")
    return f"{date.today():%Y-%m-%d} with SGLang {told.name.removeprefix('sglang-').removesuffix('.dist-info')}"
