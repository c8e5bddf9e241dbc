"""The distillation pipeline's data, its teacher and its steps."""

from __future__ import annotations

from roll.algorithms.distillation import build_distill_loss
from roll.configs.distill import DistillConfig, DistillLossConfig
from roll.models.loading import load_config
from roll.pipeline.distill.pipeline import DistillPipeline
from roll.pipeline.distill.teacher import Teacher, require_kept
from roll.pipeline.offline.imitated import load_imitated
from roll.pipeline.offline.kept import check_writable
from roll.pipeline.offline.launch import Datasets, Parts, run_offline
from roll.pipeline.programs import DISTILL


def run_distill(config: DistillConfig, started: float | None = None) -> int:
    """Runs the distillation pipeline to its end and returns the exit code, see ``launch``; 2 for wrong data."""
    return run_offline(config, DISTILL, load_imitated, _build, started, _check)


def _check(config: DistillConfig, datasets: Datasets) -> None:
    """Without a teacher, what one has written is there; with one, it can be written.

    Raises:
        ValueError: it is not, or cannot.
    """
    if config.teacher is not None:
        if config.teacher_logprobs is not None:
            check_writable(config.teacher_logprobs, "teacher_logprobs")
    else:
        for batch in (datasets.held_out, None if datasets.train is None else datasets.train.batch):
            if batch is not None:
                require_kept(config, batch)


def _build(config: DistillConfig, parts: Parts) -> DistillPipeline | None:
    roles, train, held_out = parts.roles, parts.train, parts.held_out
    vocab_size = (
        load_config(parts.model_path, trust_remote_code=config.trusts("actor_train")).get_text_config().vocab_size
    )
    teacher = Teacher(config, roles, parts.teacher_path, vocab_size)
    held_out = None if held_out is None else teacher.ahead(held_out)
    on_disk = config.teacher_logprobs is not None
    if train is not None and on_disk:
        train = teacher.ahead(train)
    if config.precompute_only:
        parts.session.display.note(f"the teacher's log-probabilities are in {config.teacher_logprobs}")
        return None
    loss = DistillLossConfig.model_validate(config.model_dump(include=set(DistillLossConfig.model_fields)))
    prepare = None if on_disk else lambda batch, rows: teacher.score(batch)
    training = parts.training(config, train, "distill", build_distill_loss, loss, prepare=prepare)
    return DistillPipeline(config, parts.session, roles, parts.signals, training, held_out, parts.prompts)
