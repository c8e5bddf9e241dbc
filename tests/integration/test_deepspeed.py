"""The configuration of ``deepspeed_train``: what is refused, what is left out, and the examples' files.

What it computes is in ``tests/parity`` and in ``test_several_ranks.py``.
"""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from roll.configs.agentic import AgenticConfig
from roll.configs.engines.deepspeed import CARD, DeepSpeedConfig
from roll.configs.loader import load_config
from roll.distributed.strategy.deepspeed.strategy import DeepSpeedTrain
from tests.support.trainers import make_context

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "zero_optimization.overlap_com: .*overlap_comm"),
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation: .*did you mean zero_optimization"),
        ({"zero_optimization": {"offload_param": {"devise": "cpu"}}}, "offload_param.devise: .*did you mean device"),
        ({"bf16": {"enable": True}}, "bf16.enable: .*did you mean enabled"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_one(model, options, message):
    with pytest.raises(ValueError, match=message):
        DeepSpeedTrain(make_context(model, "deepspeed_train", options))


def test_keys_of_every_section_and_second_names_are_known():
    zero = {"stage": 3, "stage3_max_live_parameters": 1, "max_live_parameters": 1, "offload_optimizer": {"ratio": 0.5}}
    assert not list(
        CARD.option_problems({"zero_optimization": zero, "bf16": {"enabled": "auto"}, "steps_per_print": 5})
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_clipping": 1.0}, "gradient_clipping: got 1.0, expected max_grad_norm"),
        ({"optimizer": {"type": "Lamb"}}, 'optimizer.type: got "Lamb", expected AdamW'),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, "optimizer.params.lr: got 1e-05"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, 'offload_param.device: got "nvme"'),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "one of the two"),
        ({"sequence_parallel_size": 2}, "model_args.ulysses_size"),
    ],
)
def test_what_is_decided_elsewhere_is_refused(options, message):
    assert any(message in str(problem) for problem in DeepSpeedConfig.model_validate(options).problems())


def test_auto_means_left_out():
    options = {"train_batch_size": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"}}
    options |= {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": False}}, "scheduler": "auto"}
    config = DeepSpeedConfig.model_validate(options | {"zero_optimization": {"stage": "auto"}})
    assert not list(config.problems())
    assert (config.stage, config.precision, config.torch_adam) == (0, None, False)


def test_training_in_fp16_is_refused(model):
    trainer = DeepSpeedTrain(make_context(model, "deepspeed_train", {"fp16": {"enabled": True}}))
    with pytest.raises(ValueError, match="fp16 needs loss scaling"):
        trainer.setup()


@pytest.mark.parametrize("name", ["zero", "zero2", "zero3", "zero3_cpuoffload"])
def test_examples_are_used_as_documented(tmp_path, name):
    folder = tmp_path / "config"
    shutil.copytree(Path(__file__).parents[2] / "examples" / "config", folder)
    (folder / "mine.yaml").write_text(
        f"defaults: [agentic_sokoban, config/deepspeed_{name}@_here_, _self_]\n"
        "actor_train:\n"
        "  strategy_args:\n"
        "    strategy_name: deepspeed_train\n"
        f"    strategy_config: ${{deepspeed_{name}}}\n"
    )
    options = load_config(AgenticConfig, "mine", folder).actor_train.strategy_args.strategy_config
    assert not list(CARD.option_problems(options))
    assert DeepSpeedConfig.model_validate(options).stage == (int(name[4]) if name != "zero" else 0)
