"""A checkpoint or model folder that one rank cannot read ends the call on every rank, with that rank's message.

Each trainer runs in the same two processes. FSDP2 and DeepSpeed read on rank 0 alone; with Megatron's pipeline stages
the damage is in what rank 1 reads.
"""

import importlib.util
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from roll.distributed.strategy import STRATEGIES
from roll.distributed.strategy.training import tensor_files
from tests.support.ranks import enter_rank, leave_rank, run_ranks
from tests.support.trainers import make_context

TRAINERS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp2_train": ("torch", {}),
    "deepspeed_train": ("deepspeed", {"zero_optimization": {"stage": 3}}),
    "megatron_train": ("megatron.core", {"pipeline_model_parallel_size": 2}),
}
SECONDS = 30
"""Far below a collective's timeout (30 minutes), far above what a rank needs to say so."""


def installed(package: str) -> bool:
    return importlib.util.find_spec(package.partition(".")[0]) is not None


def change(file: Path, how: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(file)
    how(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def widen(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = torch.cat([tensors[name], tensors[name]])


MODEL, RESUME = "actor_train/model.safetensors", "resume/actor_train"
STATE = f"{RESUME}/optimizer/state.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no moment": (
        lambda path: change(path / STATE, lambda t: t.pop("model.norm.weight.exp_avg_sq")),
        "no tensor 'model.norm.weight.exp_avg_sq'",
    ),
    "moment of another shape": (
        lambda path: change(path / STATE, lambda t: widen(t, "model.norm.weight.exp_avg")),
        "norm.weight: got .*shape",
    ),
    "no weight": (lambda path: change(path / MODEL, lambda t: t.pop("model.norm.weight")), "model.norm.weight"),
    "half a file": (
        lambda path: (path / STATE).write_bytes((path / STATE).read_bytes()[:-100]),
        "expected a whole safetensors file",
    ),
    "weight of another shape": (
        lambda path: change(path / MODEL, lambda t: widen(t, "model.norm.weight")),
        "norm.weight: got .*shape",
    ),
    "no counters": (lambda path: (path / RESUME / "trainer.json").unlink(), "no trainer.json"),
    "of an earlier version": (
        lambda path: (path / RESUME / "trainer.json").rename(path / "actor_train" / "trainer.json"),
        "trainer.json in actor_train: of an earlier version",
    ),
}


def make_model(path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=61, num_hidden_layers=2, tie_word_embeddings=False, **shape)
    Qwen2ForCausalLM(config).save_pretrained(path)


def failure(call: Callable[..., Any], *args: Any) -> dict[str, Any]:
    start = time.monotonic()
    try:
        call(*args)
    except (ValueError, OSError) as error:
        return {"message": str(error), "seconds": time.monotonic() - start}
    return {"message": "", "seconds": time.monotonic() - start}


def rank_main(rank: int, port: int, folder: Path) -> None:
    enter_rank(port)
    tensor_files.MIN_SHARE_BYTES = 2**20  # one file of each kind, by rank 0: the damages name it
    for name, (package, options) in TRAINERS.items():
        if not installed(package):
            continue
        context = make_context(folder / "model", name, options, rank=rank, world_size=2)
        trainer: Any = STRATEGIES.get(name)(context)
        trainer.setup()
        trainer.save(folder / name)
        found = {}
        for number, (damage, (spoil, _)) in enumerate(DAMAGES.items()):
            copy = folder / f"{name}-{number}"
            if rank == 0:
                shutil.copytree(folder / name, copy)
                spoil(copy)
            dist.barrier()
            found[damage] = failure(trainer.load, copy)
        trainer.load(folder / name)  # the ranks still agree on what comes next
        trainer.shutdown()
        context = make_context(folder / "no-weight", name, options, rank=rank, world_size=2)
        found["model folder"] = failure(STRATEGIES.get(name)(context).setup)
        (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
    leave_rank()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damaged")
    for name in ("model", "no-weight"):
        make_model(path / name)
    change(path / "no-weight" / "model.safetensors", lambda tensors: tensors.pop("model.norm.weight"))
    run_ranks(rank_main, 2, path)
    return path


@pytest.mark.parametrize("damage", [*DAMAGES, "model folder"])
@pytest.mark.parametrize("name", TRAINERS)
def test_every_rank_fails_at_once_with_the_message_of_the_one_that_did(folder, name, damage):
    if not installed(TRAINERS[name][0]):
        pytest.skip(f"the package {TRAINERS[name][0]} is not installed")
    found = [json.loads((folder / f"{name}-{rank}.json").read_text())[damage] for rank in range(2)]
    message = "model.norm.weight" if damage == "model folder" else DAMAGES[damage][1]
    for rank in range(2):
        assert found[rank]["seconds"] < SECONDS
        with pytest.raises(ValueError, match=message):
            raise ValueError(found[rank]["message"])
