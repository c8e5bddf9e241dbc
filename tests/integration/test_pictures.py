"""Whole runs over prompts with pictures and without."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, Qwen2VLImageProcessorPil

from roll.__main__ import main
from tests.integration.conftest import rows
from tests.integration.test_agents import LOGGED, assert_trained_is_what_was_sampled
from tests.integration.test_async_runs import OVERLAP, repeated
from tests.support.contract import OPTIONS, needs_seeing
from tests.support.judges import Summing
from tests.support.lines import read_lines, write_lines
from tests.support.picture_models import IMAGE, PROCESSOR, greedy_words, make_picture_model, make_tokenizer

pytestmark = pytest.mark.slow


def pictured(path: Path) -> list[np.ndarray]:
    """Rows with one or two pictures, the second so large that it has a block of its own, and one without.

    Returns:
        The pictures.
    """
    draw = np.random.default_rng(0)
    sizes = ((56, 84), (196, 196), (56, 84), (56, 84))
    noise = [draw.integers(0, 256, (*size, 3), np.uint8) for size in sizes]
    for number, pixels in enumerate(noise):
        Image.fromarray(pixels).save(path / f"{number}.png")
    one, two, both, none = rows("t", [""] * 4)
    shown = [one | {"images": ["0.png"]}, two | {"images": ["1.png"]}, both | {"images": ["2.png", "3.png"]}, none]
    write_lines(
        path / "train.jsonl", [line | {"prompt": f"{'<image>' * len(line.get('images', 'x'))}?"} for line in shown]
    )
    write_lines(path / "val.jsonl", [one | {"prompt": "which <image>?", "images": ["0.png"]}])
    return noise


LENGTHS = ("prompt_length=96", "sequence_length=102", "val_batch_size=1", "max_steps=1")


@pytest.mark.parametrize("engine", ["hf_infer", "sglang"])
def test_generator_and_trainer_agree_on_prompts_with_pictures(rlvr, tmp_path, monkeypatch, engine):
    needs_seeing(engine)
    model = make_picture_model(tmp_path / "model", "qwen3_vl", tower={"intermediate_size": 64})
    pictured(tmp_path)
    strategy = json.dumps({"strategy_name": engine, "strategy_config": OPTIONS.get(engine)})
    keys = (*LENGTHS[:3], f"actor_infer.strategy_args={strategy}", "max_steps=2")
    run = rlvr(f"pretrain={model}", *keys).ended()
    for step in (1, 2):
        assert run.metrics[step]["mismatch/logprob_diff_max"] < 1e-4
        assert run.metrics[step]["rollout/dropped"] == 0
    assert (run.checkpoint(2) / "actor_train" / "preprocessor_config.json").is_file()
    figures = {name: value for name, value in run.metrics[2].items() if name.startswith("eval/mean")}
    monkeypatch.chdir(tmp_path)
    assert main(["eval", str(run.path)]) == 0 and figures
    again = read_lines(run.path.with_name("run_eval_2") / "metrics.jsonl")[-1]
    assert {name: again[name] for name in figures} == figures


def filmed(path: Path) -> None:
    """Rows with a list of frames, with an animation and a picture, with a picture alone, and with nothing."""
    draw = np.random.default_rng(1)
    images = [Image.fromarray(draw.integers(0, 256, (28, 56, 3), np.uint8)) for _ in range(7)]
    for number, image in enumerate(images[:4]):
        image.save(path / f"{number}.png")
    images[4].save(path / "a.webp", save_all=True, append_images=images[5:], duration=400, lossless=True)
    one, two, three, none = rows("t", [""] * 4)
    shown = [
        one | {"videos": [["0.png", "1.png", "2.png"]], "prompt": "<video>?"},
        two | {"videos": ["a.webp"], "images": ["3.png"], "prompt": "<image> and <video>?"},
        three | {"images": ["3.png"], "prompt": "<image>?"},
        none | {"prompt": "<video>?"},
    ]
    write_lines(path / "train.jsonl", shown)
    write_lines(path / "val.jsonl", shown[:1])


def test_generator_and_trainer_agree_on_prompts_with_videos(rlvr, tmp_path):
    model = make_picture_model(tmp_path / "model", "qwen3_vl")
    filmed(tmp_path)
    dump = f"rollout_dump_dir={tmp_path / 'episodes'}"
    lengths = ("prompt_length=160", "sequence_length=166", "val_batch_size=1", "max_steps=2")
    run = rlvr(f"pretrain={model}", *lengths, dump).ended()
    assert all(run.metrics[step]["mismatch/logprob_diff_max"] < 1e-4 for step in (1, 2))
    played = [each for file in (tmp_path / "episodes").glob("*/episodes.jsonl") for each in read_lines(file)]
    asked = {each["turns"][0]["observation"] for each in played}
    assert asked == {"<video>?", "<image> and <video>?", "<image>?"}
    refused = rlvr(
        f"pretrain={model}", *lengths, "actor_train.strategy_args.strategy_name=deepspeed_train", output="refused"
    )
    said = refused.ended(2).output
    assert "train.jsonl:1: 1 videos, but actor_train's deepspeed_train has not been compared" in said


def test_a_judge_of_the_run_sees_what_the_policy_sees(rlvr, tmp_path):
    policy, judge = (str(make_picture_model(tmp_path / name, seed=seed)) for seed, name in enumerate(("p", "j")))
    noise = pictured(tmp_path)
    judging = f"judge_model_type: inference, judge_model_name: {judge}, pictures: true, max_tokens: 4"
    judging = f"{judging}, judge_prompt: '{{{{ prompt }}}}={{{{ response }}}}'"
    run = rlvr(
        f"pretrain={policy}",
        *LENGTHS,
        "validation=null",
        f"rewards.letters.verifiers=[{{name: 'tests.support.judges:Summing', args: {{{judging}}}}}]",
        f"rollout_dump_dir={tmp_path / 'episodes'}",
    ).ended()
    lines = (tmp_path / "episodes" / "step-00001" / "episodes.jsonl").read_text().splitlines()
    shown = {"t0": noise[:1], "t1": noise[1:2], "t2": noise[2:], "t3": ()}
    for episode in map(json.loads, lines):
        (turn,) = episode["turns"]
        words = f"{turn['observation']}={turn['text']}"
        expected = Summing.number(greedy_words(judge, words, shown[episode["info"]["prompt_id"]], 4))
        assert turn["task_reward"] == pytest.approx(expected / 10)
    assert len({json.loads(line)["info"]["prompt_id"] for line in lines}) > 1 and run.metrics[1]["rollout/dropped"] == 0


def test_groups_that_wait_with_their_pictures_outlive_the_run_and_its_steps_are_repeated(rlvr, replay, tmp_path):
    model = make_picture_model(tmp_path / "model", "qwen3_vl")
    pictured(tmp_path)
    keys = (f"pretrain={model}", *LENGTHS[:3], *OVERLAP, "max_steps=3", f"rollout_dump_dir={tmp_path / 'kept'}")
    first = rlvr(*keys, orders=("hold-actor_train-0-train-3",))
    first.pid_at("actor_train-0-train-3")
    first.kill()
    waiting = json.loads((first.checkpoint(2) / "resume" / "rollouts.json").read_text())
    turns = [turn for group in waiting["groups"] for each in group["trajectories"] for turn in each["turns"]]
    assert any(turn["items"] for turn in turns)
    run = rlvr(*keys, "resume_from_checkpoint=true").ended()
    repeated(rlvr, run, *keys[:-1])
    replay(run, 3)


def test_what_a_program_shows_is_trained_as_the_engine_saw_it(rlvr, tmp_path):
    model = make_picture_model(tmp_path / "model", "qwen3_vl")
    pictured(tmp_path)
    write_lines(tmp_path / "train.jsonl", read_lines(tmp_path / "train.jsonl")[:3])
    run = rlvr(
        f"pretrain={model}",
        *LENGTHS[:1],
        "sequence_length=260",
        "max_steps=1",
        "validation=null",
        "agent={type: python, path: 'tests.support.agents:looking', pictures: true}",
        *LOGGED,
    ).ended()
    answers = assert_trained_is_what_was_sampled(run)
    assert sorted(set(answers.values())) == [1, 2], "the grey picture is a row of its own"
    metrics = run.metrics[1]
    assert metrics["rollout/agent/rewritten_pictures"] == 1 and metrics["rollout/agent/refused"] == 0
    assert metrics["mismatch/logprob_diff_max"] < 1e-4
    assert min(min(row["ids"]) for row in run.logged("trained.jsonl")) < 0


def test_a_teacher_who_sees_is_imitated(offline, tmp_path):
    student, teacher = (
        make_picture_model(tmp_path / name, "qwen3_vl", seed=seed) for seed, name in enumerate(("student", "teacher"))
    )
    noise = np.random.default_rng(0).integers(0, 256, (14, 56, 84, 3), np.uint8)
    for number, pixels in enumerate(noise):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")

    def row(number: int) -> str:
        shown = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": f"{number}?"}]
        talk = [{"role": "user", "content": shown}, {"role": "assistant", "content": "ab"}]
        return json.dumps({"messages": talk}) + "\n"

    start = offline("distill", row, f"pretrain={student}", f"teacher_pretrain={teacher}")
    run = start("prompt_length=48", "sequence_length=64", "max_steps=2").ended()
    told, own = (
        torch.cat([said(loaded, f"{n}?", noise[n]) for n in range(10, 14)]) / 1.25
        for loaded in (AutoModelForImageTextToText.from_pretrained(path).double() for path in (teacher, student))
    )
    expected = (told.softmax(-1) * (told.log_softmax(-1) - own.log_softmax(-1))).sum(-1).mean().item()
    assert run.metrics[0]["eval/divergence"] == pytest.approx(expected, rel=1e-3)
    assert run.metrics[2]["eval/divergence"] < 0.99 * expected


@torch.no_grad()
def said(model: Any, words: str, pixels: np.ndarray) -> torch.Tensor:
    """Logits in front of the three tokens of the answer, by the model's own forward and picture processor."""
    tokenizer = make_tokenizer()
    text = f"<|im_start|>user\n<|vision_start|>{IMAGE * 6}<|vision_end|>{words}<|im_end|>\n<|im_start|>assistant\nab"
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    seen = Qwen2VLImageProcessorPil(**PROCESSOR)([Image.fromarray(pixels)], do_resize=False, return_tensors="pt")
    kinds = (ids == tokenizer.convert_tokens_to_ids(IMAGE)).int()
    seen["pixel_values"] = seen["pixel_values"].double()
    return model(input_ids=ids, mm_token_type_ids=kinds, **seen).logits[0, -3:]
