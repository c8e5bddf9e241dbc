"""The distillation pipeline: trains on a teacher's distributions, and measures the divergence on held-out responses."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from roll.algorithms.distillation import build_distill_loss
from roll.configs.distill import DistillConfig
from roll.models.loading import load_config
from roll.pipeline.column_cache import check_writable
from roll.pipeline.offline.pipeline import OfflinePipeline, Parts, Samples, Take, load_sft_data, run_offline
from roll.pipeline.programs import DISTILL
from roll.pipeline.teachers import DatasetTeacher, require_cached


def run_distill(config: DistillConfig, started: float | None = None, take: Take = OfflinePipeline.run) -> int:
    """Runs the distillation pipeline to its end and returns the exit code, see ``run_offline``."""
    return run_offline(config, DISTILL, load_sft_data, _build, started, _check, take=take)


class DistillPipeline(OfflinePipeline):
    """Trains a policy to give a teacher's probabilities (see ``OfflinePipeline``); held-out samples bring them too."""

    area = "distill"
    shown: ClassVar = {"loss": "eval/loss", "divergence": "eval/divergence", "nll": "eval/nll"}
    words: ClassVar = {"divergence": "divergence from the teacher {:.4f}", "nll": "nll {:.4f}"}


def _check(config: DistillConfig, samples: Samples) -> None:
    """Without a teacher, what one has written is there; with one, it can be written.

    Raises:
        ValueError: it is not, or cannot.
    """
    if config.teacher is not None:
        if config.teacher_logprobs is not None:
            check_writable(config.teacher_logprobs, "teacher_logprobs")
    else:
        for batch in (samples.held_out, None if samples.train is None else samples.train.batch):
            if batch is not None:
                require_cached(config, batch)


def _build(config: DistillConfig, parts: Parts) -> DistillPipeline | None:
    vocab_size = (
        load_config(parts.model_path, trust_remote_code=config.trusts("actor_train")).get_text_config().vocab_size
    )
    teacher = DatasetTeacher(config, parts.run.roles.teacher, parts.teacher_path, vocab_size)
    if parts.held_out is not None:
        parts = replace(parts, held_out=teacher.ahead(parts.held_out))
    on_disk = config.teacher_logprobs is not None
    if parts.train is not None and on_disk:
        parts = replace(parts, train=teacher.ahead(parts.train))
    if config.precompute_only:
        parts.run.session.display.note(f"the teacher's log-probabilities are in {config.teacher_logprobs}")
        return None
    prepare = None if on_disk else lambda batch, rows: teacher.score(batch)
    return DistillPipeline(config, parts, build_distill_loss, config, prepare=prepare)
