"""The rivals of ``stages.py``: TRL's ``DPOTrainer``, ``RewardTrainer`` and ``GKDTrainer``, in processes of their own.

``python stages_rivals.py dpo|rm|distill WORK.json`` takes a step for every line on its standard input and answers with
a line of JSON. Nothing of ROLL is imported here, so that any interpreter with torch, Transformers and TRL can run it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def make_trainer(stage: str, work: dict[str, Any], callback: Any) -> Any:
    """The trainer of a stage with the settings that were fastest for it on a CPU."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    common: dict[str, Any] = {
        "output_dir": work["output"],
        "use_cpu": True,
        "bf16": work["bf16"],
        "gradient_checkpointing": False,
        "max_steps": work["steps"],
        "per_device_train_batch_size": work["micro_batch"],
        "gradient_accumulation_steps": work["pairs_per_step"] // (work["micro_batch"] * world_size),
        "learning_rate": work["learning_rate"],
        "weight_decay": 0.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "max_length": None,
        "train_sampling_strategy": "sequential",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "disable_dropout": True,
    }
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    if stage == "rm":
        rows = [
            {key: pair["prompt"] + pair[key.removesuffix("_ids")] for key in ("chosen_ids", "rejected_ids")}
            for pair in work["pairs"]
        ]
        return RewardTrainer(
            model=AutoModelForSequenceClassification.from_pretrained(work["model"], num_labels=1, dtype=torch.float32),
            args=RewardConfig(**common),
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(rows),
            callbacks=[callback],
        )

    if stage == "distill":
        return make_distillation(work, common, tokenizer, callback)

    class Prepared(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
            return dataset  # token ids already

    return Prepared(
        model=AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32),
        args=DPOConfig(**common, beta=work["beta"], precompute_ref_log_probs=True),
        processing_class=tokenizer,
        train_dataset=shared([{f"{key}_ids": ids for key, ids in pair.items()} for pair in work["pairs"]], work),
        callbacks=[callback],
    )


def make_distillation(work: dict[str, Any], common: dict[str, Any], tokenizer: Any, callback: Any) -> Any:
    """GKD on given answers; its batches have every answer begin at the width of the longest question."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        questions, answers = (max(len(row[key]) for row in rows) for key in ("prompt", "chosen"))
        ids = torch.full((len(rows), questions + answers), tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for own_ids, own_mask, row in zip(ids, mask, rows, strict=True):
            first, end = questions - len(row["prompt"]), questions + len(row["chosen"])
            own_ids[first:end] = torch.tensor(row["prompt"] + row["chosen"])
            own_mask[first:end] = 1
        labels = torch.where(mask.bool(), ids, -100)
        labels[:, :questions] = -100
        return {"input_ids": ids, "attention_mask": mask, "labels": labels, "prompts": ids[:, :questions]}

    student, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (work["model"], work["teacher"])
    )
    return GKDTrainer(
        model=student,
        teacher_model=teacher,
        args=GKDConfig(**common, lmbda=0.0, beta=work["beta"], temperature=1.0),
        data_collator=collate,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(work["pairs"]),
        callbacks=[callback],
    )


def shared(rows: list[dict[str, Any]], work: dict[str, Any]) -> Any:
    """The rows in a folder that all ranks read: what the first finds for the reference, the others take from there."""
    from datasets import Dataset, load_from_disk

    folder, ready = Path(work["output"]) / "rows", Path(work["output"]) / "rows-ready"
    if int(os.environ.get("RANK", "0")) == 0:
        Dataset.from_list(rows).save_to_disk(folder)
        ready.touch()
    while not ready.exists():
        time.sleep(0.1)
    return load_from_disk(folder)


class Trl:
    """One of TRL's trainers, a step at a time."""

    def __init__(self, stage: str, work: dict[str, Any]) -> None:
        from transformers import TrainerCallback

        class Steps(TrainerCallback):
            def on_step_begin(callback, *args: Any, **kwargs: Any) -> None:
                self.begin()

            def on_step_end(callback, *args: Any, **kwargs: Any) -> None:
                self.end()

        self.first = int(os.environ.get("RANK", "0")) == 0
        self.losses: list[float] = []
        self.trainer = make_trainer(stage, work, Steps())
        inner = self.trainer.compute_loss

        def observed(*args: Any, **kwargs: Any) -> Any:
            found = inner(*args, **kwargs)
            self.losses.append(float((found[0] if isinstance(found, tuple) else found).detach()))
            return found

        self.trainer.compute_loss = observed

    def run(self) -> None:
        self.trainer.train()

    def begin(self) -> None:
        """Waits for the line that asks for the step."""
        if self.trainer.state.global_step == 0:
            self._say({"ready": True})
        if self.first and not sys.stdin.readline():
            os._exit(0)  # whoever asked is gone
        if dist.is_initialized():
            dist.barrier()  # the other ranks must not go ahead while another contestant is timed
        self.losses.clear()

    def end(self) -> None:
        """Tells of the step that has been taken: the mean loss of its pairs."""
        loss = torch.tensor(sum(self.losses) / len(self.losses), dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        self._say({"loss": float(loss)})

    def _say(self, message: dict[str, Any]) -> None:
        if self.first:
            print(json.dumps(message), flush=True)


def main() -> None:
    if len(sys.argv) != 3:  # `make bench` starts every script of this folder
        print(__doc__)
        return
    stage, path = sys.argv[1:]
    work = json.loads(Path(path).read_text())
    torch.set_num_threads(work["threads"])
    Trl(stage, work).run()


if __name__ == "__main__":
    main()
