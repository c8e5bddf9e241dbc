"""A whole RLVR run over prompts with pictures and without."""

import numpy as np
import pytest
from PIL import Image

from tests.integration.conftest import rows, write
from tests.support.picture_models import make_picture_model


@pytest.mark.slow
def test_generator_and_trainer_agree_on_prompts_with_pictures(rlvr, tmp_path):
    model = make_picture_model(tmp_path / "model", "qwen3_vl")
    noise = np.random.default_rng(0).integers(0, 256, (4, 56, 84, 3), np.uint8)
    for number, pixels in enumerate(noise):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    one, two, both, none = rows("t", [""] * 4)
    shown = [one | {"images": ["0.png"]}, two | {"images": ["1.png"]}, both | {"images": ["2.png", "3.png"]}, none]
    write(
        tmp_path / "train.jsonl", [line | {"prompt": f"{'<image>' * len(line.get('images', 'x'))}?"} for line in shown]
    )
    write(tmp_path / "val.jsonl", [one | {"prompt": "which <image>?", "images": ["0.png"]}])
    lengths = ("prompt_length=64", "sequence_length=70", "val_batch_size=1", "max_steps=1")
    run = rlvr(f"pretrain={model}", *lengths)
    assert run.wait() == 0, run.output
    assert run.metrics[1]["mismatch/logprob_diff_max"] < 1e-4
    assert (run.checkpoint(1) / "actor_train" / "preprocessor_config.json").is_file()
