"""What trainers save is what generators open: every model folder, and every adapter on the model that it adapts."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from roll.configs.engines import packages
from roll.distributed.strategy.training import tensor_files
from roll.distributed.strategy.training.merging import Export, export_folder
from roll.models.adapter_files import ADAPTER_FILE
from tests.support.contract import LORA, assert_greedy, buckets_of, greedy, load, prompts, started
from tests.support.harness import policy_loss, share
from tests.support.ranks import run_ranks
from tests.support.trainers import make_batch, make_trainer

TRAINERS = ("fsdp2_train", "deepspeed_train", "megatron_train")
FIRST = [pytest.param(name, marks=pytest.mark.slow if name != "megatron_train" else ()) for name in TRAINERS]
"""An engine starts for each. Folders are alike (``test_a_model_folder_holds_a_model_alone``), so one is enough: that
of the trainer whose weights have other names and shapes while they are trained."""


def save_all(rank: int, folder: Path, base: str, names: list[str]) -> None:
    """A checkpoint, the model alone (as the warm start keeps it), and a checkpoint of an adapter, by each trainer."""
    for name in names:
        for lora in (None, LORA):
            trainer = make_trainer(Path(base), name, rank=rank, world_size=2, lora=lora)
            trainer.train_step(share(trainer, make_batch()), policy_loss)
            if lora is None:
                trainer.save(folder / name)  # each rank a file of its own
                tensor_files.MIN_SHARE_BYTES = 2**20
                trainer.save_model(folder / name / "alone")
                tensor_files.MIN_SHARE_BYTES = 1
            else:
                trainer.save(folder / name / "adapter")
            trainer.shutdown()


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, model_path: Any) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    names = [name for name in TRAINERS if name not in packages() or packages()[name].installed]
    run_ranks(save_all, 2, folder, model_path("untied", 0), names)
    return folder


@pytest.fixture(params=TRAINERS)
def checkpoint(request: pytest.FixtureRequest, saved: Path) -> Path:
    if not (saved / request.param).exists():
        pytest.skip(f"{request.param}: {packages()[request.param].module} is not installed")
    return saved / request.param


@pytest.mark.parametrize("folder", ["actor_train", "alone"])
def test_a_model_folder_holds_a_model_alone(checkpoint, folder):
    names = {file.name for file in (checkpoint / folder).iterdir()}
    weights = {name for name in names if ".safetensors" in name}
    shared = {f"model-0000{rank}-of-00002.safetensors" for rank in (1, 2)} | {"model.safetensors.index.json"}
    assert weights == ({"model.safetensors"} if folder == "alone" else shared)
    others = {name for name in names - weights if "token" not in name and not name.startswith("chat_template")}
    assert others == {"config.json", "generation_config.json"}
    ends = json.loads((checkpoint / folder / "generation_config.json").read_text())["eos_token_id"]
    assert len(ends) > 30, "stated in the base model's folder alone"
    assert (checkpoint / "resume" / "actor_train" / "rng.safetensors").is_file()


def assert_opens(generator: str, folder: Path, *, as_model: Path, seed: int) -> None:
    """The generator loads a folder and decodes as Transformers does with that of ``as_model``."""
    prompt_list = prompts(3, seed=seed)
    with started(generator, folder) as engine:
        assert_greedy(greedy(engine, prompt_list, 8), load(str(as_model)), prompt_list, 8)


@pytest.mark.parametrize("checkpoint", FIRST, indirect=True)
def test_every_saved_model_opens_in_the_generator(generator, checkpoint):
    assert_opens(generator, checkpoint / "actor_train", as_model=checkpoint / "alone", seed=40)


def test_every_saved_adapter_is_taken_by_the_generator(lora_engine, checkpoint):
    from peft import PeftModel

    folder = checkpoint / "adapter" / "actor_train"
    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    prompt_list = prompts(3, seed=41)
    asyncio.run(lora_engine.update_adapter(buckets_of(load_file(folder / ADAPTER_FILE)), 1))
    merged = PeftModel.from_pretrained(load(base), str(folder)).merge_and_unload()
    assert_greedy(greedy(lora_engine, prompt_list, 8), merged, prompt_list, 8)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["", "adapter"])
def test_every_exported_folder_opens_in_the_generator(generator, checkpoint, part, tmp_path):
    source = checkpoint / part
    export = Export(source / "actor_train", source / "resume" / "actor_train", merge=bool(part))
    export_folder(export, tmp_path / "model")
    assert_opens(generator, tmp_path / "model", as_model=tmp_path / "model", seed=42)
