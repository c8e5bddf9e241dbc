"""The rules about teachers, in RL runs and in distillations, and tokenizers that must agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.configs.distill import DistillConfig
from roll.configs.loader import validate
from roll.configs.problems import ConfigErrors
from roll.configs.rlvr import RLVRConfig
from roll.models.tiny import make_tokenizer
from roll.models.tokenizer import check_same_ids
from roll.preflight.choices import check_engine_options, check_strategies

ROLE = {"strategy_args": {"strategy_name": "hf_infer"}}
RLVR = {
    "pretrain": "org/student",
    "adv_estimator": "grpo",
    "rollout_batch_size": 8,
    "rewards": {"maths": {"tag_included": ["maths"], "verifiers": [{"name": "gsm8k"}]}},
    "actor_train": {
        "training_args": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
        "data_args": {"file_name": "train.jsonl", "prompt": "q"},
        "strategy_args": {"strategy_name": "fsdp2_train"},
    },
}
DISTILL = {
    "pretrain": "org/student",
    "actor_train": {
        "data_args": {"file_name": "train.jsonl", "prompt": "q", "response": "a"},
        "strategy_args": {"strategy_name": "fsdp2_train"},
    },
}
VLLM, SGLANG = ({"strategy_args": {"strategy_name": name}} for name in ("vllm", "sglang"))
TAUGHT = {"teacher": ROLE, "teacher_pretrain": "org/teacher"}
MATHS, CODE = (ROLE | {"pretrain": f"org/{tag}", "tag_included": [tag]} for tag in ("maths", "code"))
TWO_TAGS = {"rewards": {"both": {"tag_included": ["maths", "code"], "verifiers": [{"name": "gsm8k"}]}}}


def wrong(schema: type, values: dict) -> set[str]:
    try:
        validate(schema, values, (check_strategies, check_engine_options))
    except ConfigErrors as errors:
        return {problem.path for problem in errors.problems}
    return set()


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        (TAUGHT, set()),
        (TAUGHT | {"is_pure_opd": True, "adv_estimator": "gae"}, set()),  # no critic is needed
        (TAUGHT | {"opd_form": "loss", "kd_objective": "js_divergence", "jsd_beta": 0.2, "logits_topk": 8}, set()),
        (TAUGHT | {"opd_form": "loss", "kd_temperature": 2.0, "logits_topk": 8}, set()),
        (TAUGHT | {"kd_temperature": 2.0}, {"kd_temperature"}),
        ({"teacher": ROLE}, {"teacher_pretrain"}),
        ({"teacher_pretrain": "org/teacher"}, {"teacher"}),
        (TAUGHT | {"distill_on_prompt": True}, {"distill_on_prompt"}),
        ({"is_pure_opd": True, "opd_kl_coef": 0.5}, {"is_pure_opd", "opd_kl_coef"}),
        (TAUGHT | {"kd_objective": "reverse_kl", "logits_topk": 8}, {"kd_objective", "logits_topk"}),
        (TAUGHT | {"opd_form": "reward", "is_pure_opd": True, "adv_estimator": "gae"}, {"critic"}),
        (TAUGHT | {"teacher_pretrain": "tiny"}, {"teacher_warm_start.file_name"}),
        (
            TAUGHT | {"teacher": ROLE | {"training_args": {"learning_rate": 1}, "model_update_frequency": 2}},
            {"teacher.training_args", "teacher.model_update_frequency"},
        ),
        (TAUGHT | {"teacher_prompt": "{prompt} ({solution})", "opd_form": "loss", "logits_topk": 8}, set()),
        ({"teacher_prompt": "{prompt}"}, {"teacher_prompt"}),
        (
            TAUGHT | {"teacher_prompt": "{prompt}", "tools": {"use": {"calculator": {"tool": "calculator"}}}},
            {"teacher_prompt"},
        ),
        (TAUGHT | {"teacher_prompt": "{prompt}", "rollout_replay_dir": "dumped"}, {"teacher_prompt"}),
        (TAUGHT | {"teacher_prompt": "{prompt}", "user": {"path": "mine:User"}}, {"teacher_prompt"}),
        (TAUGHT | {"align_tokenizers": "text", "opd_form": "reward"}, set()),
        (TAUGHT | {"teacher_column_length": 9}, {"teacher_column_length"}),
        (TAUGHT | {"opd_token_kld_clip": 0.5, "opd_form": "loss"}, {"opd_token_kld_clip"}),
        ({"opd_token_kld_clip": 0.5, "opd_logprob_min": -10}, {"opd_token_kld_clip", "opd_logprob_min"}),
        (TAUGHT | {"align_tokenizers": "text", "opd_form": "loss"}, {"align_tokenizers"}),
        ({"align_tokenizers": "text"}, {"align_tokenizers"}),
        (TAUGHT | {"teacher": VLLM}, set()),  # log-probabilities of the sampled tokens are all that is asked
        (TAUGHT | {"teacher": SGLANG, "opd_form": "loss", "logits_topk": 8}, set()),
        (TAUGHT | {"teacher": SGLANG, "opd_form": "loss"}, {"logits_topk"}),
        ({"reference": VLLM, "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_penalty": "full"}, {"kl_penalty"}),
        (TAUGHT | {"teacher": VLLM | {"infer_batch_size": 2}}, {"teacher.infer_batch_size"}),
    ],
)
def test_a_teacher_of_an_rl_run(given: dict, keys: set[str]) -> None:
    assert wrong(RLVRConfig, RLVR | given) == keys


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ({"m": MATHS, "c": CODE}, set()),
        ({"m": MATHS}, {"teachers"}),
        ({"m": MATHS, "c": CODE, "n": MATHS | {"opd_kl_coef": 0.3}}, set()),
        ({"m": MATHS, "c": CODE | {"opd_kl_coef": 0}}, {"teachers.c.opd_kl_coef"}),
        ({"m": MATHS | {"tag_included": ["maths", "maths"]}, "c": CODE}, {"teachers.m.tag_included"}),
        ({"m": MATHS | {"tag_included": ["maths", "mathz"]}, "c": CODE}, {"teachers.m.tag_included"}),
        ({"m": MATHS | {"tag_included": []}}, set()),
        ({"m": MATHS | {"pretrain": "tiny"}, "c": CODE}, {"teachers.m.pretrain"}),
        (
            {"m": MATHS | {"strategy_args": {"strategy_name": "fsdp2_infr"}}, "c": CODE},
            {"teachers.m.strategy_args.strategy_name"},
        ),
        (
            {"m": MATHS | {"training_args": {"learning_rate": 1}, "model_update_frequency": 2}, "c": CODE},
            {"teachers.m.training_args", "teachers.m.model_update_frequency"},
        ),
        ({"m": MATHS, "c": CODE | VLLM | {"infer_batch_size": 2}}, {"teachers.c.infer_batch_size"}),
        ({"m": MATHS, "c": CODE | {"pretrane": "org/x"}}, {"teachers.c.pretrane"}),
    ],
)
def test_several_teachers_have_tags_of_their_own(given: dict, keys: set[str]) -> None:
    assert wrong(RLVRConfig, RLVR | TWO_TAGS | {"teachers": given}) == keys


def test_several_teachers_take_the_place_of_one() -> None:
    several = RLVR | TWO_TAGS | {"teachers": {"m": MATHS, "c": CODE}}
    assert wrong(RLVRConfig, several | TAUGHT) == {"teachers"}
    assert wrong(RLVRConfig, several | {"teacher_prompt": "{prompt}"}) == {"teacher_prompt"}
    assert wrong(RLVRConfig, several | {"opd_form": "loss"}) == {"opd_form"}
    shared = several["teachers"] | {"g": CODE | {"tag_included": [], "opd_kl_coef": 0.3}}
    assert wrong(RLVRConfig, several | {"teachers": shared, "align_tokenizers": "text"}) == {"align_tokenizers"}
    config = validate(RLVRConfig, several | {"teachers": shared, "opd_kl_coef": 0.5})
    assert dict(zip(config.tags, config.teacher_coefficients, strict=True)) == {"maths": 0.8, "code": 0.8}
    assert wrong(RLVRConfig, several | {"opd_form": "reward", "align_tokenizers": "text", "opd_kl_coef": 0.5}) == set()
    config = validate(
        RLVRConfig, several | {"num_nodes": None, "teachers": {"m": MATHS | {"device_mapping": [9]}, "c": CODE}}
    )
    assert list(config.roles) == ["actor_train", "actor_infer", "teachers.m", "teachers.c"] and config.num_nodes == 2
    assert [config.model_of(f"teachers.{name}") for name in "mc"] == ["org/maths", "org/code"]


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        (TAUGHT, set()),
        ({"teacher_logprobs": "kept", "logits_topk": 8}, set()),
        ({}, {"teacher"}),
        ({"teacher_logprobs": "kept"}, {"logits_topk"}),
        (TAUGHT | {"precompute_only": True}, {"teacher_logprobs"}),
        ({"teacher_logprobs": "kept", "logits_topk": 8, "precompute_only": True}, {"precompute_only"}),
        (TAUGHT | {"skew_lambda": 0.3}, {"skew_lambda"}),
        (TAUGHT | {"distill_on_prompt": True}, set()),
        (TAUGHT | {"distill_on_prompt": True, "train_on": "last"}, {"train_on"}),
        (TAUGHT | {"warm_start": {"file_name": "x.jsonl"}}, {"warm_start.file_name"}),
        (TAUGHT | {"align_tokenizers": "text"}, {"align_tokenizers"}),  # an unknown key
        (TAUGHT | {"teacher": VLLM}, {"logits_topk"}),
        (TAUGHT | {"teacher": VLLM, "logits_topk": 8}, set()),
        (
            TAUGHT | {"teacher": {"strategy_args": {"strategy_name": "sglang", "strategy_config": {"tp": 2}}}},
            {"logits_topk", "teacher.strategy_args.strategy_config.tp"},
        ),
    ],
)
def test_a_teacher_of_a_distillation(given: dict, keys: set[str]) -> None:
    assert wrong(DistillConfig, DISTILL | given) == keys


def test_an_id_stands_for_one_token(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "larger"):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text('{"model_type": "qwen2"}')
    make_tokenizer().save_pretrained(tmp_path)
    check_same_ids("tiny", str(tmp_path))
    larger = make_tokenizer()
    larger.add_tokens(["another"])
    larger.save_pretrained(tmp_path / "larger")
    check_same_ids("tiny", str(tmp_path / "larger"))
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["!"], vocabulary['"'] = vocabulary['"'], vocabulary["!"]
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"2 of \d+ ids differ, the first is \d+"):
        check_same_ids("tiny", str(tmp_path))
