"""What the importers do not know is told by name, and so are pictures: neither goes for harmless."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from roll.extras.importers import SYSTEMS
from roll.extras.importers.convert import annotate, convert, report
from roll.extras.importers.draft import Draft, Kind
from roll.extras.importers.reading import Given
from roll.extras.importers.recognise import pictures_in
from roll.extras.importers.table import fill, rows, spread
from roll.preflight.choices import CHECKS
from tests.unit.extras.importers.test_rows import GIVEN

NAMES = {"<role>": "actor_train", "<domain>": "sums", "<tag>": "Boxes", "<name>": "x"}
RECORDING = ("profiler", "trace", "prometheus", "profile", "hydra", "runtime_env", "transfer_queue", "ray_init")
OPEN = {
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
    keys = [fill(row.key, NAMES).split(".") for row in rows(system) if ":" not in row.key]
    return sorted({".".join(parts[:count]) for parts in keys for count in range(1, len(parts))})


def is_open(system: str, section: str) -> bool:
    parts = section.split(".")
    return any(part in OPEN[system].split() for part in parts) or any(
        word in part for part in parts for word in RECORDING
    )


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_key_that_no_rule_knows_is_told_in_every_section(system: str) -> None:
    values: dict[str, Any] = {}
    closed = [section for section in sections(system) if not is_open(system, section)]
    for section in closed:
        node = values
        for part in section.split("."):
            node = node.setdefault(part, {})
        node["key_of_nobody"] = 7
    draft = Draft(system, Given(values, values, frozenset()))
    draft.take_all()
    told = {each.key for each in draft.outcomes if each.kind == Kind.IMPOSSIBLE} | {key for key, _ in draft.unknown}
    assert len(closed) > 10
    assert [section for section in closed if f"{section}.key_of_nobody" not in told] == []


def unknown(system: str, *words: str) -> set[str]:
    imported = convert(system, [GIVEN[system]], words, CHECKS)
    found = {each.key for each in imported.outcomes if each.kind == Kind.UNKNOWN}
    assert imported.exit_code == int(bool(found or imported.problems))
    return found


def test_a_link_makes_harmless_only_what_it_reads() -> None:
    words = ["+texts.known=1", "+texts.other=2", "+texts.more.a=3", "max_steps=${texts.known}"]
    assert unknown("roll", *words) == {"texts.other", "texts.more.a"}
    assert unknown("roll", *words, "+nested={b: '${.c}', c: 1}") == {"texts.other", "texts.more.a", "nested.b"}
    assert unknown("roll", *words, "+which=more", "eval_steps=${texts.${which}.a}") == {"texts.other"}
    assert unknown("roll", *words, "eval_steps=${oc.select:texts.other,3}") == {"texts.more.a"}


@pytest.mark.parametrize("key", ["some_template", "_private_", "action_pattern", "my_penalty"])
def test_a_name_makes_no_key_harmless(key: str) -> None:
    assert unknown("roll", f"+{key}=text") == {key}


def test_an_argument_that_no_engine_has_is_unknown_and_braces_stand_for_several_keys() -> None:
    engine = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    megatron = "actor_rollout_ref.actor.megatron.override_transformer_config"
    words = [f"{engine}.max-modle-len=3", f"{engine}.max-model-len=4096", f"{megatron}.apply_rope_fusion=true"]
    words += [f"{megatron}.key_of_nobody=1", "actor_rollout_ref.actor.strategy=megatron"]
    imported = convert("verl", [GIVEN["verl"]], words, CHECKS)
    found = {each.key for each in imported.outcomes if each.kind == Kind.UNKNOWN}
    assert found == {f"{engine}.max-modle-len", f"{megatron}.key_of_nobody"} and imported.exit_code == 1
    assert "max_model_len: 4096" in imported.text
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
    {"actor_train": {"model_args": {"freeze_module_prefix": "vision_model"}}},
]
TEXT = [
    {"pretrain": "Qwen/Qwen2.5-7B-Instruct", "data": {"image_key": None}},
    {"pretrain": "/models/evolve/Qwen3-8B", "actor": {"freeze_vision_tower": False}},
    {"model": {"lora": {"freeze_vision_model": True}}, "rollout": {"limit_images": None}},
    {"data": {"train_files": ["/data/Omni-MATH.parquet", "deepmath_103k.jsonl"]}},
    {"rewards": {"x": {"worker_cls": "roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker"}}},
    {"rollout": {"tokenization_sanity_check_mode": "off", "load_format": "auto", "layered_summon": True}},
]


@pytest.mark.parametrize("values", PICTURES, ids=str)
def test_what_asks_for_pictures_video_or_sound_is_seen(values: dict[str, Any]) -> None:
    assert list(pictures_in(values))


@pytest.mark.parametrize("values", TEXT, ids=str)
def test_text_is_no_picture(values: dict[str, Any]) -> None:
    assert list(pictures_in(values)) == []


@pytest.mark.parametrize(
    ("system", "word"),
    [
        ("roll", "pretrain=Qwen/Qwen2.5-VL-7B-Instruct"),
        ("roll", "+actor_train.data_args.image_max_pixels=1000"),
        ("verl", "data.image_key=pictures"),
        ("verl", "data.val_files=/data/geo3k/test.parquet"),
        ("verl_sft", "model.partial_pretrain=Qwen/Qwen3-VL-8B-Instruct"),
        ("chatlearn", "models.policy.load=/models/Qwen2.5-VL-7B-Instruct"),
        ("mindspeed", "generate_config.limit_mm_image_per_prompt=2"),
    ],
)
def test_pictures_are_refused_by_name(system: str, word: str) -> None:
    imported = convert(system, [GIVEN[system]], [word])
    told = {each.key for each in imported.outcomes if "pictures" in each.note and each.kind == Kind.IMPOSSIBLE}
    assert word.partition("=")[0].lstrip("+") in told and imported.exit_code == 1


def test_a_default_that_is_written_out_asks_for_no_pictures() -> None:
    words = ["data.image_key=images", "data.return_multi_modal_inputs=true", "+data.video_key=videos"]
    imported = convert("verl", [GIVEN["verl"]], words)
    assert imported.exit_code == 0
    assert {each.key for each in imported.outcomes if each.kind == Kind.DROPPED} >= {"data.image_key", "data.video_key"}
    model = "actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct"
    assert convert("verl", [GIVEN["verl"]], [*words, model]).exit_code == 1
    assert convert("roll", [GIVEN["roll"]], ["+actor_train.data_args.video_fps=2.0"]).exit_code == 0
    assert convert("roll", [GIVEN["roll"]], ["+actor_train.data_args.video_fps=4.0"]).exit_code == 1


def test_the_report_begins_with_what_a_user_must_look_at() -> None:
    words = ["+key_of_nobody=1", "actor_train.mtp_training_mode=joint"]
    imported = convert("roll", [GIVEN["roll"]], words, CHECKS)
    text = report(imported)
    order = [text.index(f"\n{kind} (") for kind in (Kind.UNKNOWN, Kind.TO_DO, Kind.DERIVED, Kind.DROPPED)]
    assert text.startswith(f"{Kind.IMPOSSIBLE} (1)") and order == sorted(order)
    assert "\nkept (" not in text and "\nkept (" in report(imported, everything=True)


def test_what_is_lost_stands_above_its_place_in_the_result() -> None:
    words = ["+actor_train.training_args.rate_of_nobody=1", "+key_of_nobody=1"]
    imported = convert("roll", [GIVEN["roll"]], words, CHECKS)
    lines = imported.text.splitlines()
    place = lines.index("  # lost: actor_train.training_args.rate_of_nobody: unknown to the importer")
    assert lines[place + 1] == "  training_args:"
    assert lines[1] == "# lost: key_of_nobody: unknown to the importer"
    assert "# TODO: rewards.talk.judge_prompt" in imported.text
    plain = [line for line in lines if not line.lstrip().startswith("#")]
    assert yaml.safe_load("\n".join(plain)) == yaml.safe_load(imported.text)


def test_comments_keep_values_as_they_are() -> None:
    text = "# head\na: 1\nb:\n  text: |\n    c: 2\n    # no comment\n  flow: {c: 1}\n"
    said = annotate(text, [("b.text.c", "lost: one"), ("b.flow.c", "TODO: two"), ("z", "lost: three")])
    assert yaml.safe_load(said) == yaml.safe_load(text)
    assert said.splitlines()[:2] == ["# head", "# lost: three"] and "  # TODO: two\n  flow: {c: 1}" in said
