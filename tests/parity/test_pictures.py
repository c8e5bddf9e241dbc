"""Models that see, in every trainer and generator that takes pictures: equal to plain Hugging Face on each row alone.

CI runs a row of each family and each kind; ``-m "slow or not slow"`` runs all.
"""

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from roll.configs.engines.fsdp2 import SHARED_ROWS
from roll.configs.engines.megatron import CARD as MEGATRON
from roll.configs.engines.sglang import CARD as SGLANG
from roll.configs.engines.vllm import CARD
from roll.configs.pipeline import PipelineConfig
from roll.data.batch import Batch
from roll.data.requests import GenerateRequest, SamplingParams
from roll.distributed.strategy.generation.engine_process import EngineStoppedError
from roll.distributed.strategy.hf_infer.continuous_batching import ContinuousBatching, RunningSequence
from roll.distributed.weights.receiver import WeightUpdate
from roll.models.loading import load_causal_lm
from roll.models.lora import PREFIX, matrix_shapes
from roll.models.pictures import FAMILIES, VIDEO_FAMILIES, tower_of
from roll.preflight.models import pictures_refused
from tests.parity.test_families import BOUNDS, FOUR, RECOMPUTED, TP_SP, TRAINERS, by_tokens, record_row
from tests.support import contract
from tests.support.batches import batch_of
from tests.support.contract import OPTIONS, buckets_of, burst, needs_seeing, weights_of
from tests.support.harness import (
    ALL_ADAPTED,
    TEMPERATURE,
    Figures,
    Layout,
    as_row,
    check,
    measure,
    measure_here,
    policy_loss,
    started,
)
from tests.support.picture_models import make_picture_model, make_processor
from tests.support.pictured import make_pictured, make_rows, picture, plain_logprobs, unmodified, video
from tests.support.ranks import exported
from tests.support.trainers import make_trainer

TWO_OF_SOME = {"max_tokens_per_microbatch_in": 60, "max_pixels_per_microbatch_in": 6000}  # pictures
CUT = {"worker": by_tokens(**TWO_OF_SOME), "model_args": RECOMPUTED}
PACKED = {"worker": {"use_sequence_packing": True}, "training_args": FOUR}
VARIANTS = {
    "whole": {},
    "cut": CUT,
    "packed": PACKED,
    "shared": {"task": "pictured-groups", "training_args": FOUR}
    | {"worker": {"max_pixels_per_microbatch_in_train": 4000}},
    "lora": {"lora": ALL_ADAPTED},
    "routed": {"task": "routed-pictured"},
    "filmed": {"task": "filmed", **PACKED},
    "filmed-cut": {"task": "filmed", **CUT},
    "filmed-lora": {"task": "filmed", "lora": ALL_ADAPTED},
}
"""As in ``test_families``; an adapter leaves the tower alone."""
WIDER = {"qwen3_5": 10, "glm4v": 2}
"""A state gathers the rounding of all tokens; GLM's layers have twice as many norms."""
ROWS = [
    (family, trainer, variant)
    for family in FAMILIES
    for trainer in TRAINERS
    for variant in VARIANTS
    if (variant != "routed" or family.endswith("moe"))
    and (trainer != "megatron_train" or family in MEGATRON.pictured)
    and (not variant.startswith("filmed") or (family in VIDEO_FAMILIES and trainer == "fsdp2_train"))
]
SEEDS = {"glm4v": 3}
"""Of models that rounding changes less than others of their family."""
CHOICE = {
    ("qwen2_5_vl", "deepspeed_train", "cut"),
    ("qwen3_vl", "fsdp2_train", "shared"),
    ("qwen3_5", "fsdp2_train", "packed"),
    ("qwen3_vl_moe", "fsdp2_train", "routed"),
    ("qwen3_vl", "fsdp2_train", "filmed"),
    ("llava", "deepspeed_train", "whole"),
    ("glm4v", "deepspeed_train", "lora"),
    ("gemma3", "fsdp2_train", "packed"),
    ("qwen3_vl", "megatron_train", "cut"),
}


def row(family: str, trainer: str, variant: str, **changed: Any) -> Layout:
    bounds = {name: bound * WIDER.get(family, 1) for name, bound in BOUNDS.items()}
    options = {"task": "pictured", "saved": True, "bounds": bounds} | VARIANTS[variant]
    options["task"] = f"{options['task']} {family}"
    common = {"name": f"{family}-{variant}", "world_size": 1, "strategy_config": TRAINERS[trainer], "model": family}
    return Layout(strategy=trainer, **common | options | changed)


serving = partial(contract.started, pictures=True, sequence_length=512)
two = partial(row, world_size=2, saved=False)
"""A row of two processes."""


def make_model(path: Path, family: str, **changed: Any) -> Path:
    """What it says depends on all that it sees; no two parameters are equal, biases and norms included."""
    make_picture_model(path, family, **{"seed": SEEDS.get(family, 0)} | changed)
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["rms_norm_eps"] = 1e-3  # states begin near zero, where smaller ones would show rounding alone
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(2)
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator)
        # Experts that score alike would be chosen by rounding.
        # Gemma multiplies its embeddings by 8, beside which nothing else would show.
        own = {"mlp.gate.": 10.0, "embed_tokens": 0.3 if family == "gemma3" else 2.0}
        scale = next((factor for part, factor in own.items() if part in name), 2.0)
        tensor.add_(0.1 * noise) if tensor.ndim == 1 else tensor.mul_(scale)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


pytestmark = pytest.mark.usefixtures("one_rank")


def folder_of(models: Path, family: str) -> Path:
    return models / family if (models / family).exists() else make_model(models / family, family)


@pytest.mark.parametrize(
    ("family", "trainer", "variant"),
    [pytest.param(*each, marks=[] if each in CHOICE else [pytest.mark.slow]) for each in ROWS],
)
def test_a_trainer_takes_the_same_steps(models, tmp_path, family, trainer, variant):
    layout = row(family, trainer, variant)
    folder_of(models, family)
    figures = measure_here(layout, models, tmp_path)
    if not variant.startswith("filmed"):  # docs/pictures.md has these
        record_row(f"{family} pictures", trainer, variant, **as_row(figures))
    check(layout, figures)


@pytest.mark.slow  # two processes
@pytest.mark.parametrize("trainer", ["fsdp2_train", "deepspeed_train"])
def test_ranks_without_pictures_wait_for_nobody(tmp_path, trainer):
    """Every rank enters as many collectives of the tower's layers, whatever its micro-batches show."""
    fsdp = trainer == "fsdp2_train"
    third, copies = ({}, {"fsdp_size": 1}) if fsdp else ({"zero_optimization": {"stage": 3}}, {})
    layouts = [
        two("qwen3_vl", trainer, "cut", strategy_config=third),
        two("qwen3_vl", trainer, "packed", strategy_config=third, model_args=RECOMPUTED),
        two("qwen3_vl", trainer, "shared", strategy_config=third),
        two("qwen3_vl", trainer, "whole", strategy_config=third, model_args={"freeze_module_prefix": "model.visual"}),
        two("qwen3_vl", trainer, "whole", name="copies", strategy_config=copies),
    ]
    of_ranks(layouts, tmp_path)


@pytest.mark.slow  # two processes
@pytest.mark.parametrize("trainer", ["fsdp2_train", "deepspeed_train"])
def test_a_rank_without_a_picture_meets_one_with_pictures(tmp_path, trainer):
    """Of every family: one row at a time, and some of text beside some with pictures."""
    batch = make_pictured(0)
    dealt = [[bool(batch.items_I[row]) for row in part.tolist()] for part in batch.split(2)]
    assert any(one != other for one, other in zip(*dealt, strict=False))
    third = {"zero_optimization": {"stage": 3}} if trainer == "deepspeed_train" else {}
    alone = {"strategy_config": third, "training_args": {"per_device_train_batch_size": 1}}
    of_ranks([two(family, trainer, "whole", **alone) for family in FAMILIES if family != "qwen3_vl"], tmp_path)


@pytest.mark.slow  # two processes
def test_ranks_split_layers_below_pictures(tmp_path):
    """The tower is whole on each, and its gradients are equal."""
    layouts = [two(family, "fsdp2_train", "cut", strategy_config={"tensor_parallel_size": 2}) for family in FAMILIES]
    for layout, figures in of_ranks(layouts, tmp_path):
        record_row(f"{layout.model} pictures", layout.strategy, "tensor parallel", **as_row(figures))


@pytest.mark.slow  # two processes
def test_ranks_share_rows_with_pictures(tmp_path):
    """The tower is whole on each; gradients of the features in its own columns add up. Pictures are cut, too."""
    layouts = [two(family, "fsdp2_train", "packed", model_args={"ulysses_size": 2}) for family in SHARED_ROWS]
    layouts += [
        two("qwen3_vl", "fsdp2_train", "shared", model_args={"ulysses_size": 2}),
        two("qwen3_vl", "fsdp2_train", "cut", model_args={"ulysses_size": 2} | RECOMPUTED),
    ]
    of_ranks(layouts, tmp_path)


@pytest.mark.slow  # two processes
def test_ranks_take_videos_as_pictures(tmp_path):
    """Rows apart, layers that are split, and rows that are shared."""
    layouts = [
        two("qwen3_vl", "fsdp2_train", "filmed-cut"),
        two("qwen3_vl", "fsdp2_train", "filmed", name="layers", strategy_config={"tensor_parallel_size": 2}),
        two("qwen3_vl", "fsdp2_train", "filmed", name="rows", model_args={"ulysses_size": 2}),
    ]
    of_ranks(layouts, tmp_path)


def of_ranks(layouts: list[Layout], folder: Path) -> list[tuple[Layout, Figures]]:
    """Measures and checks layouts of several processes."""
    for family in {layout.model for layout in layouts} - {"deep"}:
        make_model(folder / family, family)
    measured = measure(layouts, folder)
    for layout in layouts:
        check(layout, measured[layout.id])
    return [(layout, measured[layout.id]) for layout in layouts]


@pytest.mark.slow  # two processes
def test_ranks_of_megatron_compute_with_one_tower(tmp_path):
    """Its gradients are summed over copies of the model alone; it may be frozen where all else is computed again."""
    parts = {"freeze_module_prefix": "model.visual.blocks,model.language_model.embed_tokens"}
    whole_optimizer = {"use_distributed_optimizer": False, "overlap_grad_reduce": True}
    qwen3_vl = partial(two, "qwen3_vl", "megatron_train")
    stages = {"model": "deep", "strategy_config": {"pipeline_model_parallel_size": 2}}
    layouts = [
        qwen3_vl("cut"),
        qwen3_vl("packed", name="frozen", model_args=RECOMPUTED | parts),
        qwen3_vl("shared", name="copies", strategy_config=whole_optimizer),
        qwen3_vl("shared", name="tp2", strategy_config={"tensor_model_parallel_size": 2}),
        qwen3_vl("packed", name="sp", strategy_config=TP_SP, model_args=RECOMPUTED),
        qwen3_vl("lora", name="sp-lora", strategy_config=TP_SP),
        qwen3_vl("packed", name="pp2", model_args=RECOMPUTED, **stages),
        qwen3_vl("shared", name="pp2-shared", **stages),
    ]
    make_model(tmp_path / "deep", "qwen3_vl", layers=4)
    of_ranks(layouts, tmp_path)


@pytest.mark.slow  # two processes
def test_ranks_of_megatron_share_layers_and_experts_below_pictures(tmp_path):
    sharing = [
        two(family, "megatron_train", "shared", strategy_config=TP_SP)
        for family in ("qwen3_vl_moe", "llava", "mistral3")
    ]
    experts = two("qwen3_vl_moe", "megatron_train", "cut", strategy_config={"expert_model_parallel_size": 2})
    of_ranks([*sharing, experts], tmp_path)


@pytest.mark.parametrize(
    ("family", "engine"),
    [
        pytest.param(family, engine, marks=[] if family == "qwen2_5_vl" else pytest.mark.slow)
        for family in FAMILIES
        for engine in ("fsdp2_train", "megatron_train")
        if engine == "fsdp2_train" or family in MEGATRON.pictured
    ],
)
def test_what_is_trained_is_sent_saved_and_read_again(models, tmp_path, family, engine):
    """With its tower, in the layout and with the picture processor that were published; by another engine too."""
    folder = folder_of(models, family)
    trainer = started(row(family, engine, "packed"), folder)
    trainer.train_step(make_pictured(0, family), policy_loss)
    trainer.save_model(tmp_path / "saved")
    sent = exported(trainer)
    saved, before = (load_file(path / "model.safetensors") for path in (tmp_path / "saved", folder))
    assert sent.keys() == saved.keys() == before.keys() and all(torch.equal(sent[n], saved[n]) for n in sent)
    assert all(sent[name].shape == before[name].shape for name in sent)
    moved = [name for name in sent if not torch.equal(sent[name], before[name])]
    for part in ("patch_(embed|conv)", "merger|projector"):
        assert any(re.search(part, name) for name in moved), part
    for file in [*folder.glob("*processor_config.json"), folder / "config.json", folder / "tokenizer.json"]:
        assert (tmp_path / "saved" / file.name).read_bytes() == file.read_bytes()
    receiver, batch = load_causal_lm(str(folder), pictures=True), make_pictured(0, family)
    WeightUpdate(receiver, sent).apply(sent)
    said_T = trainer.logprobs(batch).logprobs_T
    for model in (receiver, AutoModelForImageTextToText.from_pretrained(tmp_path / "saved").eval()):
        assert float((plain_logprobs(model, batch, TEMPERATURE).detach() - said_T).abs().max()) < 1e-4
    if family not in MEGATRON.pictured:
        return
    trainer.save(tmp_path / "checkpoint")
    other = started(row(family, "fsdp2_train" if engine == "megatron_train" else "megatron_train", "packed"), folder)
    other.load(tmp_path / "checkpoint")
    for each in (trainer, other):
        each.train_step(make_pictured(1, family), policy_loss)
    one, two = exported(trainer), exported(other)
    assert max(float((one[name] - two[name]).abs().max()) for name in sent) < 1e-5
    assert not torch.equal(one[moved[0]], sent[moved[0]])


@pytest.mark.parametrize(
    ("role", "engine", "variant", "family"),
    [
        (*each, family)
        for card, each in (
            (CARD, ("infer", "vllm", "greedy")),
            (SGLANG, ("infer", "sglang", "greedy")),
            (MEGATRON, ("train", "megatron_train", "whole")),
        )
        for family in FAMILIES
        if family not in card.pictured
    ],
)
def test_engines_refuse_families_that_they_were_not_compared_on(tmp_path, family, role, engine, variant):
    sections = {"actor_infer": {"world_size": 1}, f"actor_{role}": {"strategy_args": {"strategy_name": engine}}}
    whole = {"pretrain": str(make_processor(tmp_path, family))} | sections
    reason = pictures_refused(PipelineConfig.model_validate(whole))
    assert reason.startswith(f"actor_{role}'s {engine} was not compared on {family}, but on qwen2_5_vl, ")
    if engine != "vllm":
        said = "has not been compared with plain Transformers on pictures"
        record_row(f"{family} pictures", engine, variant, refused=said)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="it is vLLM that says so")
def test_vllms_attention_on_a_cpu_does_not_see_both_ways():
    """It is not asked there: it would compute as if a picture's tokens did not see those behind them."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    options = {"head_size": 32, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": 32}
    asked = ("use_mla", "has_sink", "use_sparse", "use_mm_prefix", "use_per_head_quant_scales")
    options |= dict.fromkeys(asked, False) | {"device_capability": None, "attn_type": "decoder"}
    (reason,) = CPUAttentionBackend.validate_configuration(**options | {"use_mm_prefix": True})
    assert not CPUAttentionBackend.validate_configuration(**options)
    record_row("gemma3 pictures", "vllm", "greedy", refused=f"on a CPU: {reason}")


def make_prompts(family: str) -> Batch:
    """The third differs from the first in a picture alone, the fourth in nothing."""
    a, b, c = (picture(*each, family) for each in ((1, 2, 3), (2, 3, 2), (3, 2, 3)))
    first = [3, a, 2, b, 4]
    return make_rows([first, [7], [3, c, 2, b, 4], first, [a, 2, a, 1]], 3, family)


def make_filmed_prompts(family: str) -> Batch:
    """Likewise: in a frame of a video, and in nothing; two lengths, and beside a picture."""
    a, (b, c, d) = picture(1, 2, 3), (video(seed, 5, 1, 2) for seed in (2, 3, 4))
    c = replace(b, items=(*b.items[:2], c.items[2]))
    first = [3, b, 2, a, 4]
    return make_rows([first, [7], [3, c, 2, a, 4], first, [2, d, 1, video(5, 2, 2, 2)]], 3, family)


def batching_of(folder: Path, model: Any = None, most: int = 100) -> ContinuousBatching:
    model = model or load_causal_lm(str(folder), pictures=True)
    options = {"stop_ids": (), "stop_strings": None, "max_running": 8, "max_prefill_tokens": most}
    return ContinuousBatching(model, **options, tower=tower_of(model, str(folder), apart=True))


def sequences_of(tokens: int, family: str, make: Callable[[str], Batch] = make_prompts) -> list[RunningSequence]:
    rows = make(family)
    params = SamplingParams(max_new_tokens=tokens, temperature=0.0)
    prompts = np.split(rows.tokens_T.numpy(), np.cumsum(rows.lengths_B.numpy())[:-1])
    return [
        RunningSequence(GenerateRequest(str(n), prompt, params, items=items), n, tokens)
        for n, (prompt, items) in enumerate(zip(prompts, rows.items_I, strict=True))
    ]


def finish(batching: ContinuousBatching, sequences: list[RunningSequence]) -> None:
    for sequence in sequences:
        batching.add(sequence)
    while batching.has_work:
        batching.step()


@pytest.mark.parametrize(
    ("family", "make"),
    [*((family, make_prompts) for family in FAMILIES), *((family, make_filmed_prompts) for family in VIDEO_FAMILIES)],
)
def test_hf_infer_generates_as_the_unmodified_model(models, family, make):
    """What it says of its tokens is what a trainer computes of them."""
    folder = folder_of(models, family)
    batching, sequences = batching_of(folder, most=200), sequences_of(12, family, make)
    finish(batching, sequences)
    exact = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    exact.generation_config.eos_token_id = None
    for number, sequence in enumerate(sequences):
        arguments = unmodified(make(family).select([number]), family)
        output = exact.generate(**arguments, do_sample=False, max_new_tokens=12)
        assert sequence.tokens == output[0, -12:].tolist()
    assert sequences[0].logprobs == sequences[3].logprobs and sequences[0].tokens != sequences[2].tokens
    assert batching.counters.shared_tokens == sequences[0].length - 13
    histories, items = zip(*[(sequence.history, sequence.request.items) for sequence in sequences], strict=True)
    batch = batch_of(histories, [len(history) - 12 for history in histories], items_I=items)
    trainer = make_trainer(folder, "fsdp2_train", pictures=True, temperature=1.0)
    said = torch.tensor([logprob for sequence in sequences for logprob in sequence.logprobs])
    difference = float((trainer.logprobs(batch).logprobs_T[batch.loss_mask_T] - said).abs().max())
    if make is make_prompts:
        record_row(f"{family} pictures", "hf_infer", "greedy", logprobs=difference)
    assert difference <= row(family, "fsdp2_train", "whole").bound("logprobs")


@pytest.mark.parametrize("family", ["qwen3_5"])
def test_sequences_with_pictures_are_the_same_alone_and_after_they_are_computed_again(models, family):
    folder = folder_of(models, family)
    together, alone, again = (sequences_of(9, family) for _ in range(3))
    batching = batching_of(folder)
    finish(batching, together)
    for sequence in alone:
        finish(batching, [sequence])
    assert [s.logprobs for s in together] == [s.logprobs for s in alone]
    for sequence in again:
        batching.add(sequence)
    for _ in range(4):
        batching.step()
    batching.preempt()
    finish(batching, [])
    assert [s.tokens for s in again] == [s.tokens for s in together]


def make_model_for_vllm(path: Path, family: str, **changed: Any) -> Path:
    """``make_model``; Mistral's with the only number that vLLM has for a norm of the projector, and a file that vLLM
    takes for a model in Mistral's own format, which published folders have beside."""
    file = make_model(path, family, **changed) / "config.json"
    if family == "mistral3":
        config = json.loads(file.read_text())
        config["text_config"]["rms_norm_eps"] = 1e-5
        file.write_text(json.dumps(config))
        shutil.copy(path / "model.safetensors", path / "consolidated.safetensors")
    return path


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's towers need it: tests/support/torchvision_alone")
@pytest.mark.parametrize(
    ("family", "entry", "value"), [("mistral3", "rms_norm_eps", 1e-3), ("glm4v", "attention_bias", None)]
)
def test_vllm_refuses_models_that_it_would_compute_otherwise(tmp_path, family, entry, value):
    file = make_picture_model(tmp_path, family) / "config.json"
    config = json.loads(file.read_text())
    config["text_config"] |= {entry: value}
    file.write_text(json.dumps(config))
    refused = pytest.raises(ValueError, match=f"got text_config.{entry} {value}, expected")
    with refused, serving("vllm", tmp_path):
        pass


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's towers need it: tests/support/torchvision_alone")
@pytest.mark.parametrize("family", ["qwen3_vl", "mistral3"])
def test_vllm_sees_with_an_adapter_as_the_merged_model(tmp_path, family):
    """An adapter is in the language model alone; each replaces the one before, and no cache of that is used."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    folder = make_model_for_vllm(tmp_path / family, family)
    with serving("vllm", folder, lora=ALL_ADAPTED) as engine:
        for version in range(3):
            model = load_causal_lm(str(folder), pictures=True)
            if version:
                shapes, generator = matrix_shapes(model, ALL_ADAPTED), torch.Generator().manual_seed(version)
                tensors = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
                assert all("language_model" in name for name in tensors)
                asyncio.run(engine.update_adapter(buckets_of(tensors), version))
                layers = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors}
                adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=layers))
                assert not set_peft_model_state_dict(adapted, tensors).unexpected_keys
                model = adapted.merge_and_unload()
            assert unlike_hf_infer(engine, folder, model, family) <= 1e-4


VLLM_REFUSES = {"qwen3_5": "CPU GDN attention requires BF16"}
"""On a CPU, in float32."""
SGLANG_SIZES = {"tower": {"intermediate_size": 64}}
"""On a CPU it pads what is no multiple of 32, which most of its towers cannot load."""
ENGINES = [("vllm", family) for family in CARD.pictured] + [("sglang", family) for family in SGLANG.pictured]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "family"), ENGINES)
def test_an_engine_generates_and_scores_as_hf_infer(models, engine, family):
    """Before and after an update that changes the tower alone: neither features nor keys of the old one are found."""
    needs_seeing(engine)
    sizes = SGLANG_SIZES if engine == "sglang" else {}
    if not (folder := models / f"{family} {engine}").exists():
        (make_model_for_vllm if engine == "vllm" else make_model)(folder, family, **sizes)
    worst, batch = 0.0, make_pictured(0, family)
    told = partial(record_row, f"{family} pictures", engine, "greedy")
    with serving(engine, folder) as engine:
        model = load_causal_lm(str(folder), pictures=True)
        for version in range(2):
            if reason := VLLM_REFUSES.get(family):
                with pytest.raises(EngineStoppedError, match=reason):
                    unlike_hf_infer(engine, folder, model, family)
                return told(refused=f"on a CPU, in float32: {reason}")
            worst = max(worst, unlike_hf_infer(engine, folder, model, family))
            scored_T = engine.logprobs(batch).logprobs_T
            worst = max(worst, float((plain_logprobs(model, batch).detach() - scored_T).abs().max()))
            for name, parameter in model.named_parameters():
                if "visual" in name or "vision_tower" in name:
                    parameter.data += 0.05 * torch.randn_like(parameter)
            asyncio.run(engine.update_weights(buckets_of(weights_of(model)), version + 1))
        blind = replace(sequences_of(12, family)[0].request, request_id="blind", items=())
        with pytest.raises(ValueError, match="content of none of the row's 0 items"):
            asyncio.run(engine.generate(blind))
    told(logprobs=worst)
    assert worst <= row(family, "fsdp2_train", "whole").bound("logprobs")


def unlike_hf_infer(engine: Any, folder: Path, model: Any, family: str) -> float:
    """The largest difference between the log-probs of greedy completions, which are equal, by an engine and ours."""
    expected = sequences_of(12, family)
    finish(batching_of(folder, model), expected)
    requests = [replace(s.request, params=replace(s.request.params, ignore_eos=True)) for s in expected]
    completions = asyncio.run(burst(engine, requests))
    assert [c.token_ids.tolist() for c in completions] == [s.tokens for s in expected]
    said, wanted = (np.concatenate([each.logprobs for each in rows]) for rows in (completions, expected))
    return float(np.abs(said - wanted).max())


@pytest.mark.slow
def test_a_picture_may_be_cut_by_sglangs_prefill(models):
    needs_seeing("sglang")
    folder = models / "qwen3_vl cut"
    make_model(folder, "qwen3_vl", **SGLANG_SIZES)
    assert max(len(sequence.request.prompt_ids) for sequence in sequences_of(12, "qwen3_vl")) > 16
    with serving("sglang", folder, OPTIONS["sglang"] | {"chunked_prefill_size": 16}) as engine:
        assert unlike_hf_infer(engine, folder, load_causal_lm(str(folder), pictures=True), "qwen3_vl") <= 1e-4
