"""Every trainer with every generator: the demonstrations with ``train=`` and ``infer=``, two steps on a tiny model."""

import itertools
import math
import os
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from roll.models.tiny import make_tokenizer
from tests.integration.conftest import LAUNCHER, RLVR_LAUNCHER, ROOT, Run
from tests.support.choice import needs
from tests.support.known_families import make_known
from tests.support.sizes import tiny_folder

EXAMPLES = ROOT / "examples" / "config"
TRAINERS = {"fsdp2": "fsdp2_train", "deepspeed": "deepspeed_train", "megatron": "megatron_train"}
GENERATORS = {"hf": "hf_infer", "vllm": "vllm", "sglang": "sglang"}
PAIRS = list(itertools.product(TRAINERS, GENERATORS))
ALWAYS = [(name, "sglang") for name in TRAINERS]
"""Pairs that always play Sokoban, where SGLang is there; all are in both with ``-m slow``. Most other runs are of
``fsdp2`` with ``hf``."""

SMALL = (
    "max_steps=2",
    "rollout_batch_size=8",
    "val_batch_size=8",
    "eval_steps=0",
    "val_before_train=false",
    "save_steps=2",
    "num_renders=0",
    "track_with=[]",
    "actor_train.training_args.per_device_train_batch_size=4",
    "actor_train.training_args.gradient_accumulation_steps=1",
    "model_update_buffer_size_mb=1",
    "enable_old_logprobs_recompute=true",
    "entropy_loss_coef=0.01",  # a gradient also where all rewards of a group are equal
    "entropy_loss_coef_end=0.01",
    "actor_train.device_mapping=[0,1]",
    "actor_infer.device_mapping=[1]",
)
AGENTIC = (
    "adv_estimator=grpo",
    "~lambd",
    "~value_loss_coef",
    "turn_level_gae=false",
    "whiten_advantages=false",
    "train_env_manager.env_groups=2",
    "train_env_manager.group_size=4",
    "val_env_manager.env_groups=8",
)
RLVR = (
    "rollout_batch_size=4",
    "num_return_sequences_in_group=4",
    "data_generator.folder=data",
    "data_generator.args={num_train: 64, num_val: 8, num_demonstrations: 64}",
)


@pytest.fixture(scope="module")
def wide_headed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained tiny model with heads that vLLM takes."""
    return tiny_folder(tmp_path_factory, seed=1, num_heads=2)


def check_run(run: Run, adapter: bool = False) -> None:
    assert run.wait() == 0, run.output
    metrics = run.metrics
    assert {1, 2} <= set(metrics)
    for step in (1, 2):
        assert metrics[step]["actor/skipped_steps"] == 0
        assert metrics[step]["actor/grad_norm"] > 0
        assert all(math.isfinite(value) for value in metrics[step].values())
        # The trainer's own opinion of what the generator sampled with the weights that it was sent.
        assert metrics[step]["mismatch/logprob_diff_max"] < 1e-4, metrics[step]
    saved = "adapter_model.safetensors" if adapter else "model.safetensors"
    assert (run.checkpoint(2) / "actor_train" / saved).is_file()
    if adapter:
        assert metrics[1]["actor/kl_loss"] == pytest.approx(0, abs=1e-7), "the adapter starts as nothing"
        assert metrics[2]["actor/kl_loss"] > 1e-7


def pairs(always: list[tuple[str, str]]) -> list[ParameterSet]:
    return [pytest.param(*pair, marks=() if pair in always else (pytest.mark.slow,)) for pair in PAIRS]


@pytest.mark.parametrize(("trainer", "generator"), pairs(ALWAYS))
def test_sokoban(launch, wide_headed, trainer, generator):
    options = (*SMALL, *AGENTIC, f"pretrain={wide_headed}", *environment(trainer, generator))
    check_run(launch(*options, config="agentic_sokoban", script=LAUNCHER, folder=EXAMPLES))


@pytest.mark.parametrize(("trainer", "generator"), pairs([]))
def test_maths(launch, wide_headed, trainer, generator):
    options = (*SMALL, *RLVR, f"pretrain={wide_headed}", *environment(trainer, generator))
    check_run(launch(*options, config="rlvr_math", script=RLVR_LAUNCHER, folder=EXAMPLES))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "gemma3"])
def test_a_model_with_states_or_windows(launch, tmp_path, family):
    tokenizer = make_tokenizer()
    folder = make_known(tmp_path / family, family, len(tokenizer), max_position_embeddings=1024)
    tokenizer.save_pretrained(folder)
    options = (*SMALL, *RLVR, f"pretrain={folder}", *environment("fsdp2", "hf"))
    check_run(launch(*options, config="rlvr_math", script=RLVR_LAUNCHER, folder=EXAMPLES))


def environment(trainer: str, generator: str) -> tuple[str, ...]:
    """Overrides that choose the engines and say where the generator is installed; skips what is not."""
    overrides = (f"train={trainer}", f"infer={generator}")
    if trainer == "megatron":
        layout = "actor_train.strategy_args.strategy_config"
        overrides += (f"{layout}.tensor_model_parallel_size=2", f"{layout}.sequence_parallel=true")
    if generator == "sglang":
        python = Path(os.environ.get("ROLL_SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
        if not python.exists():
            pytest.skip("sglang: there is no .venv-sglang (make test-sglang)")
        overrides += (f"actor_infer.strategy_args.strategy_config.python_executable={python}",)
    for strategy in {TRAINERS[trainer], GENERATORS[generator]} - {"sglang"}:
        needs(strategy)
    return overrides


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["megatron", "fsdp2"])
def test_an_adapter_is_trained_against_the_actor_without_it(launch, wide_headed, trainer):
    options = (*SMALL, *RLVR, f"pretrain={wide_headed}", *environment(trainer, "vllm"))
    lora = ("actor_train.model_args.lora_target=all-linear", "actor_train.model_args.lora_rank=4")
    # One optimizer step per rollout, of two data-parallel ranks or one: in the first, the policy is the reference.
    accumulation = f"actor_train.training_args.gradient_accumulation_steps={4 if trainer == 'megatron' else 2}"
    penalty = ("use_kl_loss=true", "kl_loss_coef=0.1", accumulation)
    run = launch(*options, *lora, *penalty, config="rlvr_math", script=RLVR_LAUNCHER, folder=EXAMPLES)
    check_run(run, adapter=True)


@pytest.mark.slow  # unit/configs/engines/test_cards.py finds it and checks its options
def test_an_engine_by_path_generates_and_takes_weights(launch):
    strategy = "{strategy_name: 'tests.support.terse.card:CARD', strategy_config: {max_answer_tokens: 2}}"
    run = launch("max_steps=2", "enable_old_logprobs_recompute=true", f"actor_infer.strategy_args={strategy}").ended()
    for step in (1, 2):
        assert 0 < run.metrics[step]["rollout/response_tokens"] <= 2
        assert run.metrics[step]["mismatch/logprob_diff_max"] < 1e-4
