"""The tables of other systems' keys: where each leads, and that none is forgotten."""

import copy
import csv
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from roll.configs.agentic import AgenticConfig
from roll.configs.distill import DistillConfig
from roll.configs.engines import cards
from roll.configs.offline import SFTConfig
from roll.configs.preference import DPOConfig
from roll.configs.problems import NOTHING
from roll.configs.rlvr import RLVRConfig
from roll.configs.schema import ROLES, locate
from roll.extras.importers import SYSTEMS, table
from roll.extras.importers.common import leaves
from roll.extras.importers.convert import DERIVE, annotate, convert, report
from roll.extras.importers.draft import Draft, Kind, value_at
from roll.extras.importers.reading import Given, read
from roll.extras.importers.recognise import picture_family, pictures_in
from roll.extras.importers.table import DROP, FOLDER, SECTION, TRANSFORMS, Row, fill, find, rows, spread, usual
from roll.models.pictures import FAMILIES
from roll.preflight.choices import CHECKS
from tests.support.configs import put
from tests.unit.extras.importers.imported import DROPPED, GIVEN, IMPOSSIBLE, LOST, ROLL, TO_DO, UNKNOWN, imported

DOCUMENTED = [
    (system, key)
    for system, _, keys in (line.partition(" ") for line in Path(__file__).with_name("documented.txt").open())
    for key in spread(keys.strip())
]
OPTIONS = "strategy_args.strategy_config."
ENGINE = ("actor_rollout_ref", "rollout", "engine_kwargs", "vllm")
OPEN = ("actor_train.data_args.chat_template_kwargs.", "tracker_kwargs.", "system_envs.", "pf_ppo.")
"""Sections whose keys are others' to check, or any."""


PASSED_ON = ("max_num_batched_tokens", "enable_chunked_prefill", "swap_space", "enable_expert_parallel",
             "attention_backend")  # fmt: skip
"""Arguments that engines take beside the options of their cards."""
SCHEMAS = (RLVRConfig, AgenticConfig, DistillConfig, DPOConfig, SFTConfig)


def field_of(key: str) -> tuple[Any, Any] | None:
    """Annotation and metadata of a key of ours; of those of a strategy in the options of some engine."""
    _, options, rest = key.partition(OPTIONS)
    places = [card.options for card in cards()] if options else SCHEMAS
    parts = (rest if options else key.removesuffix(".**")).split(".")
    return next((found for place in places if (found := locate(place, parts))), None)


def known(path: str) -> bool:
    return path.partition(OPTIONS)[2] in ("**", *PASSED_ON) or field_of(path) is not None


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_row_leads_to_a_key_that_exists(system):
    lost = []
    for row in rows(system):
        for key in (row.ours, *(setting.key for setting in row.beside)):
            for role in ROLES if "<role>" in key else ("",):
                path = key.replace("<role>", role)
                if path and not path.startswith(OPEN) and "env_config" not in path and not known(path):
                    lost.append((row.key, path))
    assert lost == []


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_key_has_one_row_that_says_what_becomes_of_it_and_is_not_judged_where_its_own_keys_are(system):
    all_rows = list(rows(system))
    assert [key for key, count in Counter(row.key for row in all_rows).items() if count > 1] == []
    assert [row.key for row in all_rows if row.how in (DROP, IMPOSSIBLE) and not row.note] == []
    inner = [row.key for row in all_rows if not row.key.endswith("**")]
    judged = {row.key for row in all_rows if row.how == IMPOSSIBLE}
    assert [key for key in judged if any(other.startswith(f"{key}.") for other in inner)] == []


def test_every_documented_key_has_a_row():
    assert len(DOCUMENTED) > 800
    assert {system for system, _ in DOCUMENTED} == set(SYSTEMS)
    assert [(system, key) for system, key in DOCUMENTED if find(system, key.split(".")) is None] == []


def test_the_closest_row_is_taken():
    row, found = find("roll", ["critic", "model_args", "flash_attn"]) or pytest.fail("no row")
    assert (row.ours, found) == ("<role>.model_args.attn_implementation", {"<role>": "critic"})
    assert find("roll", ["somebody", "model_args", "flash_attn"]) is None
    row, found = find("verl", [*ENGINE, "a", "b"]) or pytest.fail("no row")
    assert found["**"] == "a.b"
    row, _ = find("roll", ["actor_train", "training_args", "learning_rate"]) or pytest.fail("no row")
    assert row.default == 5e-5


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("clip_ratio", "use pg_clip"),
        ("actor_train.lr", "use training_args.learning_rate of the role"),
        ("actor_infer.offload_nccl", "remove it: roles that share devices are offloaded between their turns"),
        ("actor_train.model_args.flash_attn", "use model_args.attn_implementation of the role"),
        ("clip_ratio_high", "use pg_clip_high with use_pg_clip_range: true; read with use_pg_clip_range"),
        ("rollout_backend", "use actor_infer.strategy_args.strategy_name"),
        ("nobodys_key", None),
    ],
)
def test_hints_are_made_from_the_tables(path, hint):
    assert table.advice(path.split(".")) == hint


def test_values_are_carried_over():
    assert TRANSFORMS["opposite"](True) is False
    assert TRANSFORMS["commas"](["q_proj", "v_proj"]) == "q_proj,v_proj"
    assert TRANSFORMS["never"](-1) is None and TRANSFORMS["never"](20) == 20
    assert TRANSFORMS["attention"]("disabled") == "eager"
    assert TRANSFORMS["trackers"](["console", "tensorboard"]) == ["stdout", "tensorboard"]
    assert TRANSFORMS["schedule"]("inverse-square-root") == "inverse_sqrt"
    with pytest.raises(table.Untranslatable, match="polynomial has no counterpart"):
        TRANSFORMS["schedule"]("polynomial")
    with pytest.raises(table.Omitted, match="no tracker clearml"):
        TRANSFORMS["trackers"]("clearml")
    with pytest.raises(table.Partial, match="no tracker clearml") as some:
        TRANSFORMS["trackers"](["console", "clearml"])
    assert some.value.value == "stdout"


NAMES = {"<role>": "actor_train", "<domain>": "sums", "<tag>": "Boxes", "**": "a"}
SAMPLES: dict[str, Any] = {
    "opposite": True, "commas": ["q_proj", "v_proj"], "bf16-or-fp32": True, "unless-true": False, "positive": 20,
    "never": 20, "period": 20, "all": 20, "first": ["one"], "parts": ["model", "extra"], "trackers": ["console"],
    "attention": "flash_attention_2", "schedule": "cosine", "optimizer": "Muon", "replay": "R2", "wsd-fall": "1-sqrt",
    "resume": "auto", "dtype": "bfloat16", "trainer": "megatron", "generator": "vllm", "estimator": "group_norm",
    "env-manager": "StepEnvManager", "grouping": "tags", "divergence": "reverse_kl", "normalisation": "mean_std",
    "listed": "moe, mlp", "policy-loss": "geo_mean", "cut": "right", "unbounded": 2, "truncation": "left",
    "text-none": "batch",
}  # fmt: skip
"""Values that mean something to each transformation."""


def value_of(row: Row, ours: str) -> Any:
    """What a user may write there: a value of the kind that the key here takes, where nothing is known."""
    if row.how and row.how != "above-zero":
        return SAMPLES[row.how]
    field = field_of(ours)
    if field is None:
        return "text"
    annotation, metadata = field
    kinds = [annotation, *get_args(annotation)]
    choices = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    adapter = TypeAdapter(Annotated[annotation, *metadata] if metadata else annotation)
    for value in [row.default, *choices, True, 3, 1, 0.5, 0, -0.5, "text", ["text"], [3], {"a": 1}, {"a": "1"}]:
        with suppress(ValidationError):
            if value is not NOTHING and value is not None and (value or not row.how):
                adapter.validate_python(value, strict=True)
                return value
    return {}


TRANSLATED = [
    pytest.param(system, row, id=f"{system}:{row.key}")
    for system in SYSTEMS
    for row in rows(system)
    if row.how not in (SECTION, table.DERIVE, DROP, IMPOSSIBLE)
]


def test_every_transformation_has_a_sample():
    assert SAMPLES.keys() | {"above-zero"} == TRANSFORMS.keys()


@pytest.mark.parametrize(("system", "row"), TRANSLATED)
def test_a_key_there_becomes_the_key_here(system, row):
    key = fill(row.key, NAMES)
    ours = fill(row.ours, NAMES) or key
    value = value_of(row, ours)
    expected = TRANSFORMS[row.how](value) if row.how else value
    values: dict[str, Any] = {}
    put(values, key, value)
    draft = Draft(system, Given(values, values, frozenset()))
    draft.take_all()
    assert draft.get(ours, "nothing") == expected
    for setting in row.beside:
        assert draft.get(fill(setting.key, NAMES)) == setting.value
    (outcome,) = (each for each in draft.outcomes if each.key == key)
    assert outcome.kind in (Kind.KEPT, Kind.RENAMED, Kind.TRANSLATED) and outcome.ours == ours
    field = field_of(ours)
    if field is not None and expected != {}:
        annotation, metadata = field
        TypeAdapter(Annotated[annotation, *metadata] if metadata else annotation).validate_python(expected)


@pytest.mark.parametrize("system", SYSTEMS)
def test_of_what_is_read_together_nothing_goes_without_a_word(system):
    """Each derived key beside a whole run of its system: told of, and the derivation takes it or says why not."""
    silent, whole = [], read(system, [GIVEN[system]], [])
    for row in rows(system):
        if row.how != table.DERIVE or "<" in row.key or row.key.endswith("**") or ":" in row.key:
            continue
        given = copy.deepcopy(whole)
        value = given.values
        *above, last = row.key.split(".")
        for part in above:
            value = value.setdefault(part, {}) if isinstance(value.get(part, {}), dict) else {}
        if last not in value and row.default is NOTHING:
            continue  # nothing says what a user would write there
        value.setdefault(last, row.default)
        draft = Draft(system, given)
        draft.take_all()
        DERIVE[system](draft)
        draft.tell_unused()
        told = {name for outcome in draft.outcomes for name in outcome.key.split(", ")}
        above_or_below = (f"{row.key}.".startswith(f"{name}.") or name.startswith(f"{row.key}.") for name in told)
        if not any(above_or_below):
            silent.append(row.key)
    assert silent == []


RELEASES = {"verl": ("0.6.1", "0.7.0", "0.8.0", "0.9.1"), "roll": ("0.3.0",)}
SPEED = ("preprocessing_num_workers", "max_num_batched_tokens", "max_running_requests", "model_update_buffer_size_mb",
         "rollout_workers", "rpc_timeout", "tokenization_sanity_check", "enable_chunked_prefill", "share_prompts",
         "use_sequence_packing", "infer_batch_size", "max_tokens_per_microbatch_in_infer", "sequence_length_round",
         "logging_dir")  # fmt: skip
"""Parts of keys that change no result, or where something is written."""
OLDER = ("actor_rollout_ref.actor.optim.warmup_style", "algorithm.rollout_is_level", "algorithm.rollout_is_mode")
"""Keys with a default that none of these releases has, or that has been null since."""
MANDATORY = ("actor_rollout_ref.rollout.name",)


def lines(system: str) -> list[dict[str, str]]:
    with (FOLDER / f"{system}_defaults.tsv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def written_out(system: str, release: str, megatron: bool) -> dict[str, Any]:
    """All defaults of a release as a tree."""
    values: dict[str, Any] = {}
    for line in lines(system):
        key = line["key"]
        others = "experimental" in line["source"] or ("megatron" in line["source"] and not megatron)
        if release not in line["releases"].split() or "<" in key or others:
            continue
        *above, last = key.split(".")
        node = values
        for part in above:
            inside = node.setdefault(part, {})
            node = inside if isinstance(inside, dict) else node.setdefault(part, {})
        node[last] = line["link"] or yaml.safe_load(line["value"])
    return values


CRITIC = ("algorithm.adv_estimator=gae", "critic.model.path=a", "critic.ppo_micro_batch_size_per_gpu=2")
PENALTY = ("algorithm.use_kl_in_reward=true", "actor_rollout_ref.actor.use_kl_loss=false")


@pytest.mark.parametrize(
    ("release", "words"), [*((release, CRITIC) for release in RELEASES["verl"]), ("0.7.0", PENALTY), ("0.9.1", ())]
)
def test_a_file_with_all_defaults_of_verl_is_the_file_without(release, words, tmp_path):
    file = tmp_path / "defaults.yaml"
    file.write_text(yaml.safe_dump(written_out("verl", release, megatron=False)))
    alone, whole = (convert("verl", [*files, GIVEN["verl"]], words, CHECKS) for files in ([], [file]))
    assert not [each.key for each in whole.outcomes if each.kind in LOST] and not whole.problems
    texts = [dict(leaves(yaml.safe_load(each.text))) for each in (alone, whole)]
    changed = {key for key in texts[0].keys() | texts[1].keys() if texts[0].get(key) != texts[1].get(key)}
    assert {key for key in changed if not any(part in key for part in SPEED)} == set()


@pytest.mark.parametrize("system", ["verl", "verl_sft", "roll"])
def test_what_a_row_says_of_a_default_is_what_the_releases_have(system):
    given = {row.key: row.default for row in rows(system) if row.default is not NOTHING and row.key not in OLDER}
    known = {key: usual(system, key).values for key in given if key not in MANDATORY}
    assert len(known) > 4
    wrong = {key: (given[key], values) for key, values in known.items() if given[key] not in values}
    assert wrong == {}


@pytest.mark.parametrize("system", ["verl", "verl_sft", "roll"])
def test_every_default_has_its_source_and_releases(system):
    found = lines(system)
    assert len(found) > 100 and len({(line["key"], line["value"], line["link"]) for line in found}) == len(found)
    suffix = ".py" if system == "roll" else ".yaml"
    assert all(line["source"].endswith(suffix) and line["releases"] for line in found)
    assert value_at(written_out(system, found[0]["releases"].split()[0], True), "x") is NOTHING


UNKNOWN_NAMES = {"<role>": "actor_train", "<domain>": "sums", "<tag>": "Boxes", "<name>": "x"}
RECORDING = ("profiler", "trace", "prometheus", "profile", "hydra", "runtime_env", "transfer_queue", "ray_init")
OPEN_SECTIONS = {
    "roll": """system_envs tag_to_template tracker_kwargs custom_env custom_envs tool_wrapper model_config_kwargs
        model_args domain_interleave_probs strategy_config router_config backend_config student_train student_infer
        student sft_train reward_model reward_manager_config response_filter_config filters generating_args rewards
        llm_proxy env_config deepspeed_zero deepspeed_zero1 deepspeed_zero2 deepspeed_zero3
        deepspeed_zero3_cpuoffload""",
    "verl": """engine_kwargs override_config model_config moe_config quantization override_transformer_config
        reward_kwargs overlong_buffer_cfg""",
    "verl_sft": "apply_chat_template_kwargs override_config override_transformer_config",
    "chatlearn": "",
    "mindspeed": "defaults model limit_mm_image_per_prompt",
}
"""Sections whose keys are anybody's, are told as a whole, or are judged where the values lead (options of engines)."""


def sections(system: str) -> list[str]:
    """Every section that a row of the table lies in."""
    keys = [fill(row.key, UNKNOWN_NAMES).split(".") for row in rows(system) if ":" not in row.key]
    return sorted({".".join(parts[:count]) for parts in keys for count in range(1, len(parts))})


def is_open(system: str, section: str) -> bool:
    parts = section.split(".")
    return any(part in OPEN_SECTIONS[system].split() for part in parts) or any(
        word in part for part in parts for word in RECORDING
    )


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_key_that_no_rule_knows_is_told_in_every_section(system):
    values: dict[str, Any] = {}
    closed = [section for section in sections(system) if not is_open(system, section)]
    for section in closed:
        put(values, f"{section}.key_of_nobody", 7)
    draft = Draft(system, Given(values, values, frozenset()))
    draft.take_all()
    told = {each.key for each in draft.outcomes if each.kind == Kind.IMPOSSIBLE} | {key for key, _ in draft.unknown}
    assert len(closed) > 10
    assert [section for section in closed if f"{section}.key_of_nobody" not in told] == []


def unknown(*words: str) -> set[str]:
    found = imported("roll", *words)
    assert found.exit_code == int(bool(found.lost or found.result.problems))
    return {key for key, kind in found.kinds if kind == UNKNOWN}


def test_a_link_makes_harmless_only_what_it_reads():
    words = ["+texts.known=1", "+texts.other=2", "+texts.more.a=3", "max_steps=${texts.known}"]
    assert unknown(*words) == {"texts.other", "texts.more.a"}
    assert unknown(*words, "+nested={b: '${.c}', c: 1}") == {"texts.other", "texts.more.a", "nested.b"}
    assert unknown(*words, "+which=more", "eval_steps=${texts.${which}.a}") == {"texts.other"}
    assert unknown(*words, "eval_steps=${oc.select:texts.other,3}") == {"texts.more.a"}


def test_links_to_variables_stay_unless_they_are_numbers(monkeypatch):
    monkeypatch.delenv("NOBODY_SETS_THIS", raising=False)
    words = ("pretrain=${oc.env:NOBODY_SETS_THIS}", "+actor_train.model_args.model_name_or_path=${pretrain}")
    found = imported("roll", *words, "prompt_length=${oc.decode:${oc.env:NOBODY_SETS_THIS,96}}")
    assert found.written["pretrain"] == "${oc.env:NOBODY_SETS_THIS}" and found.written["prompt_length"] == 96
    assert "actor_train.model_args.model_name_or_path" not in found.lost and "prompt_length is 96 now" in found.remarks


@pytest.mark.parametrize("key", ["some_template", "_private_", "action_pattern", "my_penalty"])
def test_a_name_makes_no_key_harmless(key):
    assert unknown(f"+{key}=text") == {key}


def test_an_argument_that_no_engine_has_is_unknown_and_braces_stand_for_several_keys():
    engine = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    megatron = "actor_rollout_ref.actor.megatron.override_transformer_config"
    words = [f"{engine}.max-modle-len=3", f"{engine}.max-model-len=4096", f"{megatron}.apply_rope_fusion=true"]
    words += [f"{megatron}.key_of_nobody=1", "actor_rollout_ref.actor.strategy=megatron"]
    found = imported("verl", *words, lost={f"{engine}.max-modle-len", f"{megatron}.key_of_nobody"})
    assert "max_model_len: 4096" in found.text
    assert spread("a.{b,c}.{d,e.f}") == ["a.b.d", "a.b.e.f", "a.c.d", "a.c.e.f"]
    assert spread("a.<role>.b") == ["a.<role>.b"]


PICTURES = [
    {"pretrain": "Qwen/Qwen2.5-VL-7B-Instruct"},
    {"pretrain": "OpenGVLab/InternVL3-8B"},
    {"model": {"path": "${oc.env:MODELS}/Qwen3-Omni-30B-A3B"}},
    {"model": {"partial_pretrain": "Qwen/Qwen2-Audio-7B"}},
    {"models": {"policy": {"load": "/models/GLM-4.1V-9B"}}},
    {"model": {"processor": "x"}},
    {"megatron_training": {"tokenizer_name_or_path": "./Qwen2.5-VL-3B"}},
    {"megatron_training": {"dataset_additional_keys": ["labels", "image"]}},
    {"data": {"train_files": ["/data/geo3k/train.parquet"]}},
    {"data": {"image_key": "images"}},
    {"data": {"video_key": "clips"}},
    {"data": {"return_multi_modal_inputs": False, "image_key": "images"}},
    {"rewards": {"x": {"tag_included": ["mm_math"]}}},
    {"rewards": {"x": {"worker_cls": "roll.pipeline.rlvr.rewards.detection_reward_worker.DetectionRewardWorker"}}},
    {"custom_envs": {"x": {"env_manager_cls": "roll.pipeline.agentic.env_manager.vl_traj_env_manager.Manager"}}},
    {"custom_envs": {"x": {"env_config": {"render_mode": "rgb_array"}}}},
    {"actor_infer": {"strategy_args": {"strategy_config": {"limit_mm_per_prompt": {"image": 4}}}}},
    {"actor_train": {"data_args": {"audio_folder": "/sounds"}}},
    {"actor_train": {"data_args": {"custom_data_kwargs_func": "roll.datasets.vlm_dataset_utils.video_r1"}}},
]
TEXT = [
    {"actor_train": {"model_args": {"freeze_module_prefix": "vision_model"}}},
    {"actor_train": {"strategy_args": {"strategy_config": {"moe_use_grouped_mm": True}}}},
    {"pretrain": "Qwen/Qwen2.5-7B-Instruct", "data": {"image_key": None}},
    {"pretrain": "/models/evolve/Qwen3-8B", "actor": {"freeze_vision_tower": False}},
    {"model": {"lora": {"freeze_vision_model": True}}, "rollout": {"limit_images": None}},
    {"data": {"train_files": ["/data/Omni-MATH.parquet", "deepmath_103k.jsonl"]}},
    {"rewards": {"x": {"worker_cls": "roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker"}}},
    {"rollout": {"tokenization_sanity_check_mode": "off", "load_format": "auto", "layered_summon": True}},
]


@pytest.mark.parametrize("values", PICTURES + TEXT, ids=str)
def test_what_asks_for_pictures_video_or_sound_is_seen_and_text_is_no_picture(values):
    assert bool(list(pictures_in(values))) == (values in PICTURES)


@pytest.mark.parametrize(
    ("system", "word"),
    [
        ("roll", "pretrain=OpenGVLab/InternVL3-8B"),
        ("roll", "+actor_train.data_args.audio_folder=/sounds"),
        ("roll", "+actor_train.data_args.custom_data_kwargs_func=a.audio_test_get_data_kwargs"),
        ("verl", "actor_rollout_ref.model.path=lmms-lab/llava-onevision-qwen2-7b-ov"),
        ("verl_sft", "model.partial_pretrain=Qwen/Qwen2-VL-2B-Instruct"),
        ("chatlearn", "models.policy.load=/models/Qwen2.5-VL-7B-Instruct"),
        ("mindspeed", "generate_config.limit_mm_image_per_prompt=2"),
    ],
)
def test_pictures_are_refused_by_name(system, word):
    found, key = imported(system, word), word.partition("=")[0].lstrip("+")
    assert key in found.lost and found.exit_code == 1
    assert any("pictures" in each.note for each in found.outcomes if each.key == key and each.kind == IMPOSSIBLE)


NAMES_OF_MODELS = (
    "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3.5-9B", "Qwen/Qwen3-VL-30B-A3B-Instruct",
    "llava-hf/llava-1.5-7b-hf", "zai-org/GLM-4.1V-9B-Thinking", "google/gemma-3-4b-it",
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
)  # fmt: skip
WORKER = "roll.pipeline.rlvr.rewards.detection_reward_worker.DetectionRewardWorker"


def test_questions_about_pictures_have_their_verifiers():
    written = imported("roll", f"rewards.cv.worker_cls={WORKER}", lost=set()).written
    assert written["rewards"]["cv"]["verifiers"] == [{"name": "boxes"}]
    found = imported("verl", "data.image_key=shots", "data.val_files=geo3k.parquet", lost=set())
    assert [each.weight for each in found["rewards.geo3k.verifiers"]] == [0.9, 0.1]


def data(**values: Any) -> dict[str, Any]:
    return {f"actor_train.data_args.{key}": value for key, value in values.items()}


def added(values: dict[str, Any]) -> list[str]:
    return [f"+{key}={value}" for key, value in values.items()]


def model(name: str) -> str:
    return f"actor_rollout_ref.model.path={name}"


QWEN, *_, GEMMA, MISTRAL = NAMES_OF_MODELS
QWEN3 = "pretrain=Qwen/Qwen3-VL-4B-Instruct"
IMAGES = data(image_max_pixels=4096, image_folder="/data")
VIDEOS = data(video_fps=4.0, video_total_pixels=4096, video_folder="/data")
FREEZE, FROZEN = "actor_rollout_ref.actor.freeze_vision_tower", "actor_train.model_args.freeze_module_prefix"
TOWER, OWN = f"+{FROZEN}=vision_model", "actor_train.data_args.custom_data_kwargs_func"
UTILS = f"+{OWN}=roll.datasets.vlm_dataset_utils"
SGLANG = "actor_rollout_ref.rollout.name=sglang"
SHARING = ("model_engine=megatron", "actor_rollout_ref.actor.megatron.context_parallel_size=2")
WRITTEN_OUT = ("data.image_key=images", "data.return_multi_modal_inputs=true", "+data.video_key=videos")
TRAINER, GENERATOR, REFERENCE = map(
    "{}.strategy_args.strategy_name".format, ("actor_train", "actor_infer", "reference")
)
PLAIN = (f"{TRAINER}=fsdp2_train", f"{GENERATOR}=hf_infer", f"{REFERENCE}=hf_infer")
OF_OTHER_ENGINES = [f"actor_infer.{OPTIONS}{key}" for key in ("gpu_memory_utilization", "block_size")]
OF_OTHER_ENGINES += [f"actor_train.{OPTIONS}tensor_model_parallel_size"]
ROLLS = data(messages="prompt", response="reward_model.ground_truth", tag="data_source", image="images")
# What is said: the system, words, keys of the result, kinds of their keys with all that are lost, all that is refused.
SEEN = {
    "bounds and a folder": ("roll", [f"pretrain={QWEN}", *added(IMAGES)], IMAGES, {}, {}),
    "a column and a bound": ("verl", ["data.image_key=shots", "+data.mm_processor_kwargs={max_pixels: 4096}"],
        data(image_max_pixels=4096, image="shots"), {}, {}),
    "columns and bounds of ROLL's pipeline of several domains": ("roll", [f"pretrain={QWEN}",
        f"{TOWER}.blocks,model.lm_head"], ROLLS | data(image_max_pixels=4096**2, image_min_pixels=56**2) | {
        FROZEN: "model.visual.blocks,model.lm_head"}, {}, {}),
    "those of one domain": ("roll", [f"pretrain={QWEN}", "~actor_train.data_args.domain_interleave_probs"],
        data(messages=None, prompt="problem", response="solution", image="image", image_max_pixels=768**2), {}, {}),
    "defaults that are written out": ("verl", WRITTEN_OUT, {},
        {"data.image_key": DROPPED, "data.video_key": DROPPED}, {}),
    "defaults that are written out, and pictures": ("verl", [*WRITTEN_OUT, model(QWEN)], {}, {}, {}),
    "videos": ("roll", [QWEN3, *added(VIDEOS), *PLAIN], VIDEOS | data(video="video", video_max_frames=128),
        dict.fromkeys(OF_OTHER_ENGINES, IMPOSSIBLE), {}),
    "videos for a family that was not compared": ("verl", ["+data.video_key=clips", model(QWEN)], data(video="clips"),
        {}, {"actor_train.data_args.video": "null: videos are for qwen3_vl alone, not for qwen2_5_vl",
             GENERATOR: "such as hf_infer (vllm has not been compared"}),
    "data named after videos": ("verl", ["data.train_files=/data/tinyllava-video-r1/train.parquet",
        model("Qwen/Qwen3.5-9B")], {}, {}, {"actor_train.data_args.video": "", GENERATOR: ""}),
    "a function that reads the rows has its columns": ("roll", [QWEN3,
        f"{UTILS}.video_r1_get_data_kwargs", *added(data(video_fps=2.0))],
        data(prompt="problem", messages=None, response="solution", tag="modality_type", video="video"),
        {"actor_train.data_args.prompt": TO_DO}, {}),
    "or is refused": ("roll", [QWEN3, f"{UTILS}.mine"], {}, {OWN: IMPOSSIBLE}, {}),
    "a tower that is frozen": ("verl", [model(QWEN), "data.image_key=shown", f"{FREEZE}=true"],
        {FROZEN: "model.visual"}, {}, {}),
    "a tower of another name": ("verl", [model(MISTRAL), "data.image_key=shown", f"{FREEZE}=true"], {FROZEN: None}, {},
        {}),
    "a frozen tower without pictures": ("verl", [f"{FREEZE}=true"], {FROZEN: None}, {}, {}),
    "a frozen tower of ROLL's without pictures": ("roll", [TOWER], {FROZEN: None}, {FROZEN: DROPPED}, {}),
    "pictures for every engine": ("verl", [model(QWEN)], {}, {}, {}),
    "a layout that takes no pictures": ("verl", [model(QWEN), *SHARING, SGLANG], {}, {},
        {TRAINER: "such as fsdp2_train (megatron_train takes no pictures with context", REFERENCE: "fsdp2_infer"}),
    "a family that vLLM was not compared on": ("verl", [model(GEMMA), "data.train_files=/data/geo3k/train.parquet"],
        {}, {}, {GENERATOR: "such as hf_infer (vllm was not compared on gemma3, but on qwen2_5_vl"}),
    "a family that SGLang was not compared on": ("verl", [model("Qwen/Qwen3.5-9B"), SGLANG, "data.image_key=shown"],
        {}, {}, {GENERATOR: "such as vllm (sglang was not compared on qwen3_5, but on qwen2_5_vl, qwen3_vl)"}),
    "a mixture of experts": ("verl", [model("Qwen/Qwen3.5-35B-A3B"), "data.train_files=/data/geo3k.parquet"], {}, {},
        {"actor_train.data_args.image": ""}),
    "a mixture of experts without pictures": ("verl", [model("Qwen/Qwen3.5-35B-A3B")], {}, {}, {}),
}  # fmt: skip


@pytest.mark.parametrize("what", SEEN)
def test_pictures_and_videos_become_keys_of_ours_or_are_refused(what):
    system, words, expected, kinds, refused = SEEN[what]
    found = imported(system, *words)
    found.check(expected, kinds)
    assert found.lost == {key for key, kind in kinds.items() if kind in LOST}
    problems = {each.path: each.expected for each in found.result.problems}
    assert problems.keys() == refused.keys() and all(words in problems[path] for path, words in refused.items())


def test_a_student_that_sees_has_the_columns_of_pictures():
    found = imported("roll", "student_pretrain=Qwen/Qwen2.5-VL-3B-Instruct", file=ROLL["distill"], lost=set())
    found.check(data(prompt="problem", response="solution", image="image"), {"actor_train.data_args.prompt": TO_DO})


def test_every_family_with_pictures_is_known_by_the_name_of_a_model():
    assert tuple(map(picture_family, NAMES_OF_MODELS)) == FAMILIES
    assert picture_family("google/gemma-3n-E4B-it") is None and picture_family("Qwen/Qwen3.5-35B-A3B") is None


def test_an_environment_that_is_seen_has_its_picture_between_the_templates(tmp_path):
    manager = "roll.pipeline.agentic.env_manager.vl_traj_env_manager.VLTrajEnvManager"
    tag = {"env_type": "sokoban", "env_manager_cls": manager, "env_config": {"render_mode": "rgb_array"}}
    tag |= {"pre_step_template": "Turn {turn_idx}:\n", "next_step_template": "{actions_left} left."}
    file = tmp_path / "seen.yaml"
    file.write_text(yaml.safe_dump({"custom_envs": {"Seen": tag}, "train_env_manager": {"tags": ["Seen"]}}))
    made = yaml.safe_load(convert("roll", [file]).text)["custom_envs"]["Seen"]
    assert made["env_manager_cls"] == "traj" and made["env_config"] == {"render_mode": "rgb_array"}
    assert made["agent_template"] == "Turn {turn_idx}:\n{observation}{actions_left} left."


def test_the_report_begins_with_what_a_user_must_look_at():
    words = ["+key_of_nobody=1", "actor_train.mtp_training_mode=joint"]
    found = imported("roll", *words).result
    text = report(found)
    order = [text.index(f"\n{kind} (") for kind in (Kind.UNKNOWN, Kind.TO_DO, Kind.DERIVED, Kind.DROPPED)]
    assert text.startswith(f"{Kind.IMPOSSIBLE} (1)") and order == sorted(order)
    assert "\nkept (" not in text and "\nkept (" in report(found, everything=True)


def test_what_is_lost_stands_above_its_place_in_the_result():
    words = ["+actor_train.training_args.rate_of_nobody=1", "+key_of_nobody=1"]
    found = imported("roll", *words)
    lines = found.text.splitlines()
    place = lines.index("  # lost: actor_train.training_args.rate_of_nobody: unknown to the importer")
    assert lines[place + 1] == "  training_args:"
    assert lines[1] == "# lost: key_of_nobody: unknown to the importer"
    assert "# TODO: rewards.talk.judge_prompt" in found.text
    plain = [line for line in lines if not line.lstrip().startswith("#")]
    assert yaml.safe_load("\n".join(plain)) == found.written


def test_comments_keep_values_as_they_are():
    text = "# head\na: 1\nb:\n  text: |\n    c: 2\n    # no comment\n  flow: {c: 1}\n"
    said = annotate(text, [("b.text.c", "lost: one"), ("b.flow.c", "TODO: two"), ("z", "lost: three")])
    assert yaml.safe_load(said) == yaml.safe_load(text)
    assert said.splitlines()[:2] == ["# head", "# lost: three"] and "  # TODO: two\n  flow: {c: 1}" in said
