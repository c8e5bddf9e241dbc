"""What ``roll plan`` computes, beside what PyTorch and the engines do."""

import importlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from roll.__main__ import main
from roll.configs import SHIPPED
from roll.configs.worker import WorkerConfig
from roll.data.columns import Item
from roll.data.packing import computed_tokens, worth_sharing
from roll.data.pictures import Pictures
from roll.distributed.strategy.hf_infer.slot_cache import SlotCache
from roll.extras.plan import command as planning
from roll.extras.plan import devices, memory, work
from roll.extras.plan.devices import cpu_of, parse_devices
from roll.extras.plan.memory import Surroundings, trainer_memory
from roll.extras.plan.work import Lengths, Role, Samples, rollout_time, training_time
from roll.models import scoring
from roll.models.freezing import freeze
from roll.models.lora import LoraSpec, inject_adapter
from roll.models.planned_attention import find_state_layers
from roll.models.shapes import KNOWN, ModelShape, TowerShape
from roll.models.tiny import make_tokenizer
from roll.utils.gpus import GPUS
from tests.support.batches import batch_of
from tests.support.cli import call, refused
from tests.support.families import tiny_config, tiny_model
from tests.support.known_families import KNOWN as KNOWN_FAMILIES
from tests.support.picture_models import FAMILIES, make_processor
from tests.support.processes import happens
from tests.support.sizes import sizes

SIZES: dict[str, Any] = sizes(96, 32, 48, 2, 4, 2)
SHARED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXTURE = {"num_experts": 6, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 1, "norm_topk_prob": True}
MIXTURE |= SHARED
ROUTED = {
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
} | SHARED
LATENT = {"kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
EXTRA = {"qwen2_moe": MIXTURE, "qwen3_moe": MIXTURE, "deepseek_v3": ROUTED | LATENT, "glm4_moe": ROUTED}
QWEN_7B = {"model_type": "qwen2", **sizes(152064, 3584, 18944, 28, 28, 4), "max_position_embeddings": 32768}
QWEN_7B |= {"tie_word_embeddings": False, "dtype": "bfloat16"}
PARAMETERS = ModelShape.of(QWEN_7B).parameters


def make_role(config: dict[str, Any], lora: tuple[str, ...] = (), trained: bool = True, **section: Any) -> Role:
    worker = WorkerConfig.model_validate(section)
    return Role("actor_train", worker, ModelShape.of(config), "lm", trained, (8, lora) if lora else None)


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model(kind, tied):
    config = AutoConfig.for_model(kind, **SIZES, **EXTRA.get(kind, {}), tie_word_embeddings=tied, pad_token_id=None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = ModelShape.of(config.to_dict())
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.trunk == sum(parameter.numel() for parameter in model.base_model.parameters())
    assert shape.exact and shape.active < shape.parameters
    with pytest.raises(ValueError, match="no vocab_size, hidden_size"):
        ModelShape.of({"model_type": kind, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 4})


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj")])
def test_an_adapter_has_the_parameters_of_peft(targets):
    config = AutoConfig.for_model("qwen2", **SIZES)
    model = AutoModelForCausalLM.from_config(config)
    inject_adapter(model, LoraSpec(8, 16, targets))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert ModelShape.of(config.to_dict()).adapter(8, targets) == trained


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("frozen", ["model.embed_tokens,model.layers.1", "lm_head", "model.layers"])
def test_frozen_parts_have_no_gradients_and_no_moments(frozen, tied):
    config = AutoConfig.for_model("qwen2", **SIZES, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    freeze(model, frozen.split(","))
    expected = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    role = make_role(config.to_dict(), model_args={"freeze_module_prefix": frozen})
    assert role.updated == expected
    assert trainer_memory(role, AROUND).resident["moments"] == 8 * expected


def kept_by_autograd(model: torch.nn.Module, forward: Callable[..., Any], **inputs: Any) -> int:
    """Memory that autograd keeps of a forward pass, beside parameters; copies of weights in autocast included."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, torch.UntypedStorage] = {}  # held, so that no other takes its place

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward(**inputs)
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize(
    ("kind", "dtype", "autocast", "lora"),
    [
        *((kind, dtype, False, ()) for kind in ("qwen2", "qwen3") for dtype in ("fp32", "bf16")),
        ("qwen2", "bf16", True, ()),
        *(
            ("qwen2", dtype, False, lora)
            for dtype in ("fp32", "bf16")
            for lora in (("all-linear",), ("q_proj", "v_proj"))
        ),
    ],
)
def test_activations_are_what_autograd_keeps(kind, dtype, autocast, lora):
    ids, kept = torch.zeros(4, 128, dtype=torch.int64), []
    for layers in (2, 3):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | {"num_hidden_layers": layers}))
        model = model.to(torch.bfloat16 if dtype == "bf16" and not autocast else torch.float32).eval()
        if lora:
            inject_adapter(model, LoraSpec(8, 16, lora))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            kept.append(kept_by_autograd(model, model.base_model, input_ids=ids, use_cache=False))
    role = make_role(AutoConfig.for_model(kind, **SIZES).to_dict(), lora, model_args={"dtype": dtype})
    copies = 2 * role.shape.layer if autocast else 0
    expected = memory.kept_per_token(role, work.Layout(autocast=autocast))
    assert (kept[1] - kept[0] - copies) / ids.numel() == pytest.approx(expected, rel=2e-3)


def test_the_output_layer_is_cut_as_the_scorer_cuts_it():
    assert memory.CHUNK_LOGITS == scoring.MAX_CHUNK_LOGITS
    assert memory.BYTES_PER_CHUNK_LOGIT == scoring.BYTES_PER_CHUNK_LOGIT


def test_the_cache_is_as_large_as_hf_infer_makes_it():
    shape = ModelShape.of(SIZES | {"model_type": "qwen2"})
    cache = SlotCache(["full_attention"] * shape.layers)
    cache.reserve(37, 150)
    states = torch.zeros(1, shape.kv_heads, 4, shape.head_size)
    with cache.prefill(0, None):
        for layer in range(shape.layers):
            cache.update(states, states, layer)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    role = replace(make_role(SIZES | {"model_type": "qwen2"}), name="actor_infer")
    planned = memory.hf_generator_memory(role, Surroundings(0, Lengths(150, 8), max_running=37, requests=64))
    assert planned.resident["kv cache"] == held


@pytest.mark.parametrize(
    "name", ["qwen3", "deepseek_v3", "qwen3_next", "qwen3_5", "granite_hybrid", "falcon_h1", "nemotron_h"]
)
def test_keys_values_and_states_are_what_a_model_keeps(name):
    """In bf16, of two sequences."""
    known = KNOWN_FAMILIES[name]
    config = tiny_config(known.model_type, vocab_size=96, num_hidden_layers=known.layers, **known.config)
    model = tiny_model(config).bfloat16().eval()
    shape = ModelShape.of(config.to_dict())
    sizes = {}
    for tokens in (8, 16):
        with torch.no_grad():
            cache = model(torch.zeros(2, tokens, dtype=torch.int64), use_cache=True).past_key_values
        states = [part for layer in cache.layers for part in vars(layer).values()]
        parts = [each for part in states for each in (part.values() if isinstance(part, dict) else [part])]
        sizes[tokens] = sum(each.nbytes for each in parts if isinstance(each, torch.Tensor) and each.ndim > 1)
    assert (sizes[16] - sizes[8]) // 16 == shape.kv_bytes(2)
    assert sizes[8] - 16 * shape.kv_bytes(2) == 2 * shape.states.num_bytes(2)
    assert bool(find_state_layers(model)) == bool(shape.states.layers)


def test_a_batch_reads_the_experts_that_its_tokens_choose():
    config = json.loads(json.dumps(QWEN_7B)) | {"model_type": "deepseek_v3"} | ROUTED | LATENT
    shape = ModelShape.of(config)
    assert shape.kv_bytes(2) == 2 * 28 * (12 + 4)
    assert shape.touched(1) == shape.active and shape.active < shape.touched(4) < shape.touched(64)
    assert shape.touched(10_000) == pytest.approx(shape.trunk - shape.embedding)


AROUND = Surroundings(process=0, lengths=Lengths(1024, 512))


def trained(**section: Any) -> dict[str, int]:
    return trainer_memory(make_role(QWEN_7B, **section), AROUND).phases["train"]


def test_what_saves_memory_saves_it_in_its_part():
    args: dict[str, Any] = {"disable_gradient_checkpointing": True}
    plain = trained(model_args=args, world_size=4, strategy_args={"strategy_config": {"fsdp_size": 1}})
    sharded = trained(model_args=args, world_size=4)
    recomputed = trained(world_size=4)
    lora = trained(model_args=args | {"lora_target": "all-linear"}, lora=("all-linear",))
    larger = trained(model_args=args, world_size=4, training_args={"per_device_train_batch_size": 2})
    assert sharded["moments"] * 4 == plain["moments"] == 8 * PARAMETERS
    assert recomputed["activations"] < sharded["activations"] / 5 and recomputed["moments"] == sharded["moments"]
    assert lora["moments"] < plain["moments"] / 100 and lora["weights"] < plain["weights"]
    assert larger["activations"] == 2 * sharded["activations"]


def test_times_follow_from_counts_and_rates():
    role, device = make_role(QWEN_7B), replace(GPUS["H100"], efficiency=0.4)
    samples = Samples(rows=64, prompt=512, answer=512, group=8)
    train = training_time(role, samples, device, 8)
    parameters, tokens = role.shape.parameters, samples.tokens
    assert train.seconds == pytest.approx(8 * parameters * tokens / (8 * 989e12 * 0.4), rel=0.2)  # one forward more
    assert training_time(role, samples, device, 16).seconds == pytest.approx(train.seconds / 2)
    slow = rollout_time(role, samples, replace(device, bandwidth=device.bandwidth / 2), 8, 1, 128)
    fast = rollout_time(role, samples, device, 8, 1, 128)
    assert fast.seconds < slow.seconds < 2.01 * fast.seconds and "bandwidth" in fast.why
    least = 512 * 2 * (parameters - role.shape.embedding) / (0.6 * 3350e9)  # every token reads all weights
    assert least < fast.seconds < 1.8 * least  # and around each layer something else
    near, far = (rollout_time(role, samples, device, 1, each, 128).seconds for each in (8, 16))
    assert near < far  # sums between machines cost more than the bandwidth that they bring


def test_times_by_width_stages_and_network():
    shape, device, samples = ModelShape.of(QWEN_7B), GPUS["H100"], Samples(64, 512, 512)
    narrow = replace(shape, hidden=shape.hidden // 4, inner=shape.inner // 4)
    assert 0.05 < work.matrix_share(narrow, device) < work.matrix_share(shape, device) / 2 < 0.2
    assert work.matrix_share(narrow, replace(device, efficiency=0.3)) == 0.3

    def seconds(stages: int) -> float:
        options = {"pipeline_model_parallel_size": stages}
        strategy = {"strategy_name": "megatron_train", "strategy_config": options}
        training = {"gradient_accumulation_steps": 4}
        role = make_role(QWEN_7B, world_size=4, strategy_args=strategy, training_args=training)
        return training_time(role, samples, device, 4).seconds

    assert seconds(4) == pytest.approx(seconds(1) * (1 + 3 / 4))
    role = make_role(QWEN_7B, model_args={"dtype": "bf16"})
    assert work.sync_time(role, device, nodes=2).seconds == pytest.approx(2 * role.parameters / 20e9)


def test_the_page_of_published_speeds_is_up_to_date_and_most_forecasts_are_near(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[4] / "scripts")
    script = importlib.import_module("generate_forecast_docs")
    assert script.FILE.read_text(encoding="utf-8") == script.page(script.FILE.read_text()), "run `make docs`"
    others = [row for row in script.ROWS if not row.calibrates and row.source != script.OWN]
    assert len(others) >= len(script.ROWS) / 2
    assert all(1 / 1.5 < script.forecast(row) / row.tokens_per_s < 1.5 for row in others)


@pytest.mark.parametrize(
    "text",
    ["H100,memory", "H100,memory=-1", "H100,memory=inf", "H100,link=nan", "H100,tflops=1e400", "H100,colour=3", "X9"],
)
def test_devices_that_cannot_be_understood_are_named(text):
    with pytest.raises(ValueError, match=r"--devices: got .*, expected"):
        parse_devices(text)
    assert parse_devices("h100,memory=94,efficiency=0.5").memory == 94 * 2**30


@pytest.fixture
def seven_billion(tmp_path: Path) -> str:
    """A folder with a configuration and a tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B | {"architectures": ["Qwen2ForCausalLM"]}))
    make_tokenizer().save_pretrained(tmp_path)
    return f"pretrain={tmp_path}"


@pytest.fixture
def planned(capsys) -> Callable[..., dict[str, Any]]:
    """What a plan says as JSON; ``code`` is how the command ended."""

    def plan(*words: str) -> dict[str, Any]:
        code, told = main(["plan", *words, "--json"]), capsys.readouterr()
        assert code in (0, 1), told.err
        return {**json.loads(told.out), "code": code}

    return plan


def needed(plan: dict[str, Any]) -> dict[str, int]:
    """By place."""
    return {place["name"]: place["needed"] for place in plan["places"]}


BF16 = "actor_train.model_args.dtype=bf16"


def test_a_plan_that_fits(seven_billion, capsys):
    told, _ = call(capsys, "plan", "rlvr_math", seven_billion, BF16, "--devices", "H200")
    assert "it fits" in told and "GPU 0 and 1 like it" in told and "512 samples" in told and "GiB" in told


@pytest.mark.parametrize(
    ("engine", "each", "devices", "kept"),
    [
        ("hf_infer", 1, "[1,2]", (1, 0)),
        ("vllm", 1, "[1,2]", (1, 1)),
        ("vllm", 2, "[2,1]", (1, 1)),
        ("vllm", 2, "[1,2]", (0, 0)),
    ],
)
def test_the_update_that_deltas_start_from_counts_where_it_is_kept(engine, each, devices, kept, seven_billion, planned):
    words = ["rlvr_math", seven_billion, BF16, "--devices", "CPU,tflops=1,bandwidth=50,memory=400", "num_nodes=2"]
    words += ["num_gpus_per_node=2", "actor_train.device_mapping=[0,1]", f"actor_infer.device_mapping={devices}"]
    words += [f"actor_infer.num_gpus_per_worker={each}", f"actor_infer.strategy_args.strategy_name={engine}"]
    whole, deltas = (needed(planned(*words, f"weight_update_deltas={sent}")) for sent in ("false", "true"))
    assert [deltas[place] - whole[place] for place in whole] == [count * 2 * PARAMETERS for count in kept]


def test_models_of_rewards_count(seven_billion, tmp_path, planned):
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text(json.dumps(QWEN_7B | {"num_hidden_layers": 4, "num_labels": 1}))
    other = seven_billion.partition("=")[2]
    scorer = {"name": "reward_model", "args": {"model_path": str(small), "batch_size": 8, "max_length": 512}}
    args = {"judge_model_type": "inference", "judge_model_name": other, "judge_prompt": "{{ response }}"}
    judge = {"name": "judge", "args": args}
    served = {"name": "reward_model", "args": {**scorer["args"], "remote": {"url": "http://10.0.0.5:8000"}}}
    file = tmp_path / "mine.yaml"
    shipped = yaml.safe_load((SHIPPED / "rlvr_math.yaml").read_text())

    def rewarded(*verifiers: dict[str, Any], devices: Sequence[int] = (1,)) -> dict[str, Any]:
        domain = {"tag_included": ["arithmetic"], "verifiers": list(verifiers), "device_mapping": list(devices)}
        file.write_text(yaml.safe_dump({**shipped, "rewards": {"arithmetic": domain}}))
        return planned(str(file), seven_billion, BF16, "--devices", "H200")

    plain, scored, both = rewarded(served), rewarded(scorer), rewarded(scorer, judge)
    assert "reward_arithmetic" not in plain["memory_bytes"]
    shape = ModelShape.of(QWEN_7B | {"num_hidden_layers": 4})
    held = 2 * (shape.trunk + QWEN_7B["hidden_size"] + 1)
    assert scored["memory_bytes"]["reward_arithmetic"]["load"]["weights"] == held
    half = rewarded(scorer | {"args": scorer["args"] | {"tensor_parallel_size": 2}}, devices=[0, 1])
    layers = 4 * shape.layer
    assert half["memory_bytes"]["reward_arithmetic"]["load"]["weights"] == held - 2 * layers + layers
    own = both["memory_bytes"]["reward_arithmetic"]
    assert own["load"]["weights"] == held + 2 * PARAMETERS and own["rollout"]["kv cache"] > 0
    assert own["rollout"]["process"] == scored["memory_bytes"]["reward_arithmetic"]["rollout"]["process"]
    assert set(own) == {"load", "rollout"} and needed(both)["GPU 1"] > needed(plain)["GPU 1"]
    assert needed(both)["GPU 0"] == needed(plain)["GPU 0"]
    with pytest.raises(AssertionError, match=r"rewards\.arithmetic\.verifiers\.0\.args\.judge_model_name"):
        rewarded(judge | {"args": args | {"judge_model_name": "nobody/nothing"}})


TYPES = [f"{role}.model_args.dtype=bf16" for role in ("actor_train", "actor_infer")]
TAUGHT = ["teacher.device_mapping=[1]", "teacher.model_args.dtype=bf16", "--devices", "H200"]


@pytest.mark.parametrize("strategy", ["hf_infer", "vllm"])
def test_a_teacher_works_beside_the_roles_that_score(strategy, seven_billion, planned):
    teacher = [f"teacher_{seven_billion}", f"teacher.strategy_args.strategy_name={strategy}"]
    told = planned("rlvr_distill", seven_billion, *teacher, *TYPES, *TAUGHT)
    own = told["memory_bytes"]["teacher"]
    assert set(own) == {"load", "logprobs"} and own["load"]["weights"] == own["logprobs"]["weights"] == 2 * PARAMETERS
    assert (own["logprobs"].get("kv cache", 0) > 0) == (strategy == "vllm")
    assert told["seconds"]["logprobs of teacher"] > 0


def test_several_teachers_are_planned(seven_billion, planned):
    folder = seven_billion.partition("=")[2]
    rest = f"pretrain: '{folder}', strategy_args: {{strategy_name: hf_infer}}, model_args: {{dtype: bf16}}"
    words = ["teacher=null", "teacher_pretrain=null", "rewards.arithmetic.tag_included=[arithmetic,other]"]
    words += [f"+teachers.a={{tag_included: [arithmetic], device_mapping: [0], {rest}}}"]
    words += [f"+teachers.b={{tag_included: [other], device_mapping: [1], {rest}}}", "--devices", "H200"]
    told, held = planned("rlvr_distill", seven_billion, *TYPES, *words), 2 * PARAMETERS
    for name in ("teachers.a", "teachers.b"):
        own = told["memory_bytes"][name]
        assert set(own) == {"load", "logprobs"} and own["logprobs"]["weights"] == held
        assert told["seconds"][f"logprobs of {name}"] > 0
    assert needed(told)["GPU 1"] > held
    one = [seven_billion, f"teacher_{seven_billion}", *TAUGHT, "teacher.infer_batch_size=1", "sequence_length=4096"]
    plans = planned("rlvr_distill", *one), planned("rlvr_distill", *one, "teacher_prompt='{prompt} {answer}'")
    short, long = (plan["seconds"]["logprobs of teacher"] for plan in plans)
    assert long > 10 * short, "it reads what fits into sequence_length"
    assert told["seconds"]["logprobs of teachers.a"] == pytest.approx(short / 2, rel=0.05), "half of the rows"


def test_roles_that_wait_for_each_other_are_put_on_the_same_slots(planned, capsys):
    apart = ["actor_train.device_mapping=[0]", "actor_infer.device_mapping=[1]"]
    apart += ["actor_train.training_args.gradient_accumulation_steps=8"]
    rates = ["rlvr_math", "--devices", "CPU,memory=64,tflops=0.1,bandwidth=30"]
    told = planned(*rates, *apart)
    again = planned(*rates, *apart, *told["faster"]["overrides"])
    assert told["faster"]["step_seconds"] == pytest.approx(again["step_seconds"], rel=0.01)  # memory's rate is measured
    assert again["step_seconds"] < 0.9 * told["step_seconds"]
    assert again["placement"] == planned(*rates)["placement"] and again["faster"] is None
    overlapping = ["async_generation_ratio=1", "train_infer_correction.is_weight.enabled=true"]
    assert planned(*rates, *apart, *overlapping)["faster"] is None, "they work at the same time"
    assert " ".join(told["faster"]["overrides"]) in call(capsys, "plan", *rates, *apart)[0]


def test_a_trainer_on_several_cpu_slots_is_told_to_keep_whole_weights(tmp_path, planned):
    small = {"model_type": "qwen2", **sizes(49152, 576, 1536, 30, 9, 3), "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(small))
    key = "actor_train.strategy_args.strategy_config.fsdp_size"
    words = [f"pretrain={tmp_path}", "actor_train.device_mapping=[0,1]", "actor_infer.device_mapping=[0,1]"]
    words += ["actor_train.training_args={per_device_train_batch_size: 16, gradient_accumulation_steps: 4}"]
    words += ["num_gpus_per_node=2"]

    def on(device: str, *more: str) -> dict[str, Any]:
        return planned("rlvr_math", "--devices", device, *words, *more)

    cpu = "CPU,memory=64,tflops=1,bandwidth=20"
    sharded, whole = on(cpu, f"{key}=-1"), on(cpu, f"{key}=1")
    assert sharded["faster"]["overrides"] == [f"{key}=1"] and "all weights on each slot" in sharded["faster"]["why"]
    assert sharded["faster"]["step_seconds"] == pytest.approx(whole["step_seconds"], rel=0.01)
    assert whole["faster"] is None
    gain = sharded["seconds"]["train actor_train"] - whole["seconds"]["train actor_train"]
    each = 4 * ModelShape.of(small).parameters  # four steps, a micro-batch each: weights gathered twice, gradients once
    assert gain == pytest.approx(4 * each * (3 / work.GATHERED_BYTES - 1 / work.SUMMED_BYTES), rel=0.01)
    kept = on(cpu, f"{key}=-1", f"{key.rpartition('.')[0]}.reshard_after_forward=false")
    assert whole["step_seconds"] < kept["step_seconds"] < sharded["step_seconds"]
    for device in ("H100", "CPU,memory=6,tflops=1,bandwidth=20"):
        assert on(device, f"{key}=-1")["faster"] is None, device


def test_advice_is_what_the_plan_with_it_says(planned):
    words = ["rlvr_math", "--devices", "A100,memory=1.5"]
    told = planned(*words)
    assert not told["fits"] and told["code"] == 1
    last = told["advice"][-1]
    again = planned(*words, *last["overrides"])
    assert max(needed(again).values()) == last["needed"]
    assert again["code"] == int(not last["fits"])


LONG = ["actor_train.model_args={lora_target: all-linear, dtype: bf16}", "actor_infer.model_args.dtype=bf16"]
LONG += [f"actor_train.max_tokens_per_microbatch_in_{what}=5120" for what in ("train", "infer")]
LONG += ["prompt_length=1024", "response_length=4096", "sequence_length=5120"]


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["rlvr_math", "--devices", "H100"], {"disable_gradient_checkpointing", "max_tokens_per_microbatch_in_train"}),
        (["rlvr_math_qwen2.5_0.5b", "--devices", "L40S"],
         {"tensor_model_parallel_size", "gradient_accumulation_steps"}),
        (["rlvr_math", *LONG, "--devices", "H100"], {"max_running_requests"}),
    ],
    ids=["two changes", "tensor parallel", "fewer requests"],
)  # fmt: skip
def test_the_smallest_change_that_makes_it_fit_is_named_and_does(words, changed, seven_billion, capsys):
    command = ["plan", words[0], seven_billion, *words[1:]]
    told, _ = call(capsys, *command, code=1)
    (line,) = [line for line in told.splitlines() if "the smallest change" in line]
    overrides = line.partition("fit: ")[2].split(" ")
    assert {word.partition("=")[0].rpartition(".")[2] for word in overrides} == changed
    assert main([*command, *overrides]) == 0


def test_the_run_has_a_start_evaluations_and_checkpoints(seven_billion, planned):
    words = ["rlvr_math", seven_billion, BF16, "max_steps=100", "--devices", "H200"]
    told = planned(*words, "eval_steps=30", "save_steps=40")
    beside = told["beside_seconds"]
    assert beside["checkpoints"] == pytest.approx(3 * 12 * PARAMETERS / 1e9)  # after 40, 80 and 100 steps
    assert beside["start"] == pytest.approx(90 + 2 * PARAMETERS / 1e9)
    assert told["run_seconds"] == pytest.approx(100 * told["step_seconds"] + sum(beside.values()))
    once = planned(*words, "eval_steps=0", "val_after_train=false", "save_steps=null")["beside_seconds"]
    assert beside["evaluations"] == pytest.approx(5 * once["evaluations"]) and "checkpoints" not in once


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("rlvr_math --devices X9", "expected one of CPU"),
        ("rlvr_math -o file", "--write"),
        ("rlvr_math max_stepz=3", "did you mean max_steps?"),
        ("rlvr_math pretrain=nobody/nothing --devices H100", "a folder with nothing but its config.json"),
        ("rlvr_math --devices A100 --write slurm -o /no/x", "roll plan: -o /no/x: No such file or directory"),
    ],
)
def test_a_wrong_command_line_is_told(words, expected, capsys):
    assert expected in refused(capsys, "plan", *words.split())


def test_a_silent_hub_is_asked_once_and_its_cache_counts(monkeypatch, capsys):
    asked: list[str] = []
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("roll.preflight.inputs.ask_hub", lambda what, seconds: asked.append(what))
    planning._hub_answers.cache_clear()
    said = refused(capsys, "plan", "rlvr_math_qwen2.5_0.5b", "pretrain=nobody/has-it", "--devices", "H100")
    planning._hub_answers.cache_clear()
    assert len(asked) == 1 and "1 problem" in said and "nothing but its config.json" in said


def test_the_rates_of_a_busy_machine_are_the_best_of_several_tries_and_it_is_said_to_be_busy():
    quiet = cpu_of([(60e9, 9e9), (67e9, 10e9), (66e9, 8e9)], load=0.2, count=2)
    assert (quiet.flops, quiet.bandwidth) == (67e9, 10e9) and "60 to 67 GFLOP/s" in quiet.tried
    assert "load" not in quiet.tried
    assert "load 9.1 on 2 cores" in cpu_of([(60e9, 9e9), (67e9, 10e9)], load=9.1, count=2).tried
    assert "the machine is busy" in cpu_of([(8e9, 9e9), (67e9, 10e9)], load=0.2, count=2).tried


def test_tries_are_timed_by_the_processor_and_not_by_the_clock(monkeypatch):
    monkeypatch.setattr(devices, "SECONDS", 0.01)
    tries = devices.rates()
    monkeypatch.setattr(devices.time, "perf_counter", lambda: pytest.fail("the clock"))
    assert len(tries) == len(devices.rates()) == devices.TRIES
    assert all(flops > 1e8 and bandwidth > 1e7 for flops, bandwidth in tries)


@pytest.mark.parametrize(("rows", "group"), [(8, 8), (16, 8), (4, 8), (8, 1), (6, 4)])
def test_operations_of_shared_prompts_are_those_of_the_rows_that_trainers_make(rows, group):
    role = make_role(QWEN_7B, training_args={"per_device_train_batch_size": rows})
    samples = Samples(64, 200, 56, group)
    own = torch.arange(rows * 56).view(rows, 56) + 1000
    prompts = torch.arange(rows).div(group, rounding_mode="floor")[:, None].expand(-1, 200)
    batch = batch_of(torch.cat([prompts, own], dim=1), prompts=200)
    shared = worth_sharing(batch)
    computed = computed_tokens([batch], sharing=True)
    share = work.shared_share(role, samples)
    assert (share < 1) == shared and computed_tokens([batch], sharing=False) == rows * 256
    # Of a large model nearly all operations are products of single tokens; the output layer counts for loss tokens.
    assert share == pytest.approx(computed / (rows * 256), abs=0.02)
    assert work.shared_share(make_role(QWEN_7B, share_prompts=False), samples) == 1


def test_a_time_that_nobody_waits_for_is_said_with_what_takes_it(seven_billion, capsys):
    told, _ = call(capsys, "plan", "rlvr_math", seven_billion, "--devices", "CPU,memory=4000,tflops=0.01")
    last = told.splitlines()[-1]
    assert last.startswith("it fits, but its time is not reasonable: a step takes") and "train actor_train" in last


SCHEMA = Path(__file__).parents[3] / "support" / "schemas" / "rayjob.json"
NODES = {"one": ("1", "[0,1]"), "two": ("2", "[0,1,2,3]")}
PROGRAMS = {
    # What a run does when it is told to stop: it saves, and says so by its code.
    "roll": 'echo "roll $*" >> calls; trap "sleep 0.3; echo saved >> calls; exit 143" TERM; '
    "touch started; for _ in $(seq 200); do sleep 0.05; [ -e finish ] && exit $(cat finish); done",
    "srun": 'echo "srun $*" >> calls; exec sleep 60',
    "ray": 'echo "ray $*" >> calls',
    "python": "cat > /dev/null",
    "scontrol": 'echo "scontrol $*" >> calls',
    "hostname": "echo 10.0.0.1",
}
"""By name, lines of shell."""


def written(kind: str, tmp_path: Path, nodes: str, *more: str) -> Path:
    count, devices = NODES[nodes]
    layout = [f"num_nodes={count}", f"actor_train.device_mapping={devices}", f"actor_infer.device_mapping={devices}"]
    sizes = ["actor_train.training_args.per_device_train_batch_size=32"] if nodes == "two" else []
    file = tmp_path / kind
    command = ["plan", "rlvr_math", *layout, *sizes, *more, "--devices", "A100", "--write", kind, "-o", str(file)]
    assert main(command) == 0
    return file


def start(file: Path) -> subprocess.Popen[str]:
    """The batch file under way, its run having begun."""
    folder = file.parent
    programs = folder / "bin"
    programs.mkdir()
    for name, lines in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{lines}\n")
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    process = subprocess.Popen(["bash", str(file)], cwd=folder, env=environment, text=True, start_new_session=True)
    assert happens((folder / "started").exists, 30), "the run did not start"
    return process


@pytest.mark.parametrize("nodes", NODES)
def test_a_batch_file_is_sound_shell_passes_the_signal_on_and_goes_on_later(nodes, tmp_path):
    file = written("slurm", tmp_path, nodes)
    text = file.read_text()
    assert "#SBATCH --signal=B:TERM@600" in text and f"#SBATCH --nodes={NODES[nodes][0]}\n" in text
    assert "#SBATCH --gpus-per-node=2\n" in text and ("ray start" in text) == (nodes == "two")
    if (checker := shutil.which("shellcheck")) is not None:
        assert subprocess.run([checker, str(file)], check=False).returncode == 0
    process = start(file)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [line for line in calls if line in ("saved", "scontrol requeue 7")] == ["saved", "scontrol requeue 7"]
    run = next(line for line in calls if line.startswith("roll "))
    assert run.startswith("roll train rlvr_math num_nodes=") and run.endswith(" resume_from_checkpoint=true")
    assert sum("ray start" in line for line in calls) == (2 if nodes == "two" else 0)


def test_a_batch_file_ends_with_the_code_of_the_run(tmp_path):
    process = start(written("slurm", tmp_path, "one"))
    (tmp_path / "finish").write_text("3")
    assert process.wait(timeout=30) == 3
    assert "requeue" not in (tmp_path / "calls").read_text()


@pytest.mark.parametrize("nodes", NODES)
def test_a_manifest_follows_the_schema(nodes, tmp_path):
    manifest: dict[str, Any] = yaml.safe_load(written("kuberay", tmp_path, nodes, "exp_name=My_Run").read_text())
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator(schema).validate(manifest)
    assert manifest["metadata"]["name"] == "my-run"
    cluster = manifest["spec"]["rayClusterSpec"]
    assert len(cluster.get("workerGroupSpecs", ())) == (1 if nodes == "two" else 0)
    resources = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == "2"
    manifest["spec"]["entryPoint"] = "x"
    with pytest.raises(jsonschema.ValidationError, match="entryPoint"):
        jsonschema.Draft202012Validator(schema).validate(manifest)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_vision_tower_is_counted_as_pytorch_counts_it(family, tmp_path):
    folder = make_processor(tmp_path, family)
    config, pictures = AutoConfig.from_pretrained(folder), Pictures(folder)
    shape = TowerShape.of(config.to_dict())
    assert shape is not None
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").base_model
    text = {id(parameter) for parameter in model.language_model.parameters()}
    beside = [parameter for parameter in model.parameters() if id(parameter) not in text]
    assert shape.parameters == sum(parameter.numel() for parameter in beside)
    high, wide = pictures._size(112, 168)
    item, pixels = Item(np.zeros((high, wide, 3), np.uint8)), high * wide
    inputs = {name: torch.from_numpy(array) for name, array in pictures.inputs([item]).items()}
    assert shape.input_bytes(pixels) == inputs["pixel_values"].nbytes
    assert shape.tokens(pixels) == pictures.ids(item).count(config.image_token_id)
    size = json.loads((folder / "preprocessor_config.json").read_text())["size"]
    most, _ = pictures._size(9000, 9000)
    assert shape.bound(size) == most**2 or family == "mistral3"  # its tower is made for 56 pixels here
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.get_image_features(**inputs)
    least = 0.6 if family == "qwen2_5_vl" else 0.9  # most of its layers look at windows
    assert least * shape.operations(pixels) < counter.get_total_flops() < 1.15 * shape.operations(pixels)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_vision_tower_keeps_what_autograd_keeps(family, tmp_path):
    """Of each layer within two in a hundred; the whole with the projector, which is small, within a fifth."""
    folder = make_processor(tmp_path, family)
    config, pictures = AutoConfig.from_pretrained(folder), Pictures(folder)
    item = Item(np.zeros((*pictures._size(112, 112), 3), np.uint8))
    inputs = {name: torch.from_numpy(array) for name, array in pictures.inputs([item]).items()}
    pixels, patches = item.data.size // 3, item.data.size // 3 // 14**2
    depth, shapes, kept = "depth" if "depth" in config.vision_config.to_dict() else "num_hidden_layers", [], []
    for layers in (3, 6):
        setattr(config.vision_config, depth, layers)
        shapes.append(TowerShape.of(config.to_dict()))
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").base_model
        kept.append(kept_by_autograd(model, model.get_image_features, **inputs))
    each = 17 / 16 if family == "llava" else 1  # a class token beside sixteen patches
    assert (kept[1] - kept[0]) / 3 == pytest.approx(4 * patches * each * shapes[0].kept, rel=0.02)
    assert shapes[1].kept_bytes(pixels, 4, recomputes=False) == pytest.approx(kept[1], rel=0.2)
    once = shapes[1].kept_bytes(pixels, 4, recomputes=True) - shapes[0].kept_bytes(pixels, 4, recomputes=True)
    assert once == 3 * 4 * patches * shapes[0].hidden


def test_a_plan_says_what_pictures_take(planned, capsys):
    plain, told = planned("rlvr_shapes", "--pictures", "0"), planned("rlvr_shapes")
    found = told["pictures"]
    assert plain["pictures"] is None and found["per_sample"] == 1
    assert found["max_pixels"] == found["tokens"] * 256 and found["input_bytes"] == found["max_pixels"] * 24
    assert main(["plan", "rlvr_shapes", "actor_train.model_args.freeze_module_prefix=model.visual"]) in (0, 1)
    assert f"the vision tower: {found['tower_parameters']:,} parameters" in capsys.readouterr().out
    states = [plan["memory_bytes"]["actor_train"]["train"] for plan in (plain, told)]
    assert states[1]["moments"] - states[0]["moments"] == 8 * found["tower_parameters"] // 2, "two ranks"
    assert states[1]["activations"] > states[0]["activations"]
    assert plain["seconds"]["train actor_train"] < told["seconds"]["train actor_train"]
    assert plain["places"][0]["needed"] < told["places"][0]["needed"]
    assert planned("rlvr_math")["pictures"] is None
    assert "--pictures" in refused(capsys, "plan", "rlvr_math", "--pictures", "2")


def test_a_verdict_counts_the_pictures(tmp_path, planned):
    """A tower of GLM's with pictures that are too many for a device, which a bound of pixels makes fit."""
    folder = make_processor(tmp_path, "glm4v")
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= {"depth": 24, "hidden_size": 1536, "out_hidden_size": 4096, "intermediate_size": 13696}
    (folder / "config.json").write_text(json.dumps(config))
    size = {"shortest_edge": 12544, "longest_edge": 2 * 2**20}
    prepared = json.loads((folder / "preprocessor_config.json").read_text()) | {"size": size}
    (folder / "preprocessor_config.json").write_text(json.dumps(prepared))
    words = ("rlvr_math", f"pretrain={folder}", "sequence_length=2560", "prompt_length=2048", "num_gpus_per_node=2")
    words += ("actor_train.share_prompts=false", "--devices", "H100,memory=40")
    without, told = planned(*words, "--pictures", "0"), planned(*words)
    assert without["fits"] and not told["fits"] and told["pictures"]["max_pixels"] <= 2**20
    bound = "actor_train.max_pixels_per_microbatch_in_train"
    (less,) = (one for one in told["advice"] if one["overrides"][0].startswith(bound))
    assert less["fits"] and planned(*words, *less["overrides"])["fits"]
