"""The teacher's scores of answers: from its role, or from disk."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from roll.configs.distill import DistillConfig
from roll.configs.engine_rules import compute_dtype
from roll.data.batch import Batch
from roll.pipeline.model_cluster import ModelCluster
from roll.pipeline.offline.kept import digest_of, kept, read_kept, weight_files
from roll.pipeline.roles import Roles
from roll.pipeline.teaching import with_teacher

_WHAT = "log-probabilities of a teacher"
_ON_DISK = {"ids": "teacher_ids_TK", "logprobs": "teacher_top_TK", "tail": "teacher_tail_T"}
"""Columns of a file, one entry per token to learn, and what they are in a batch."""


def require_kept(config: DistillConfig, batch: Batch) -> Path:
    """The file of what a teacher has written about a dataset.

    Raises:
        ValueError: there is none.
    """
    file = _file(config, batch)
    if not file.is_file():
        raise ValueError(
            f"teacher_logprobs: got no {file}, expected what a run with a section teacher and the same data, "
            f"sequence_length, tokenizer and logits_topk has written ({_setting(config)})"
        )
    return file


def _file(config: DistillConfig, batch: Batch) -> Path:
    folder = Path(config.teacher_logprobs or "").expanduser()
    return folder / f"teacher-{digest_of(batch, [_setting(config)])}.safetensors"


def _setting(config: DistillConfig) -> str:
    return f"top {config.logits_topk} at temperature {config.kd_temperature:g}"


class Teacher:
    """Scores answers with the teacher's role, or reads what one has written.

    Args:
        roles: set up.
        path: folder or hub name of the teacher; ``None`` where all of it is on disk.
        vocab_size: ids that the policy has.
    """

    def __init__(self, config: DistillConfig, roles: Roles, path: str | None, vocab_size: int) -> None:
        self._config = config
        self._model = roles.teacher
        self._path = path
        self._vocab_size = vocab_size

    def score(self, batch: Batch) -> Batch:
        """The batch with the teacher's columns."""
        assert isinstance(self._model, ModelCluster), "a rule"
        return with_teacher(batch, self._model.logprobs(batch), self._config.divergence)

    def ahead(self, batch: Batch) -> Batch:
        """The same of a whole dataset before the first step, on disk with ``teacher_logprobs``.

        Raises:
            ValueError: a file cannot be read, was written by another teacher, or is missing where there is none.
        """
        config = self._config
        if config.teacher_logprobs is None:
            return self.score(batch)
        if self._model is None:
            found = read_kept(require_kept(config, batch), list(_ON_DISK), _WHAT)
            assert found is not None
        else:
            file = _file(config, batch)
            found = dict(kept(file, list(_ON_DISK), _WHAT, lambda: self._computed(batch), self._identity))
        return self._placed(batch, found)

    @property
    def _identity(self) -> dict[str, str]:
        """The teacher's name and the files of its weights where they are on this machine, and how it computes."""
        assert self._config.teacher is not None, "it scores"
        _, dtype = compute_dtype("teacher", self._config.teacher)
        files = weight_files(Path(str(self._path)).expanduser())
        return {"teacher": " ".join([str(self._path), *files]), "dtype": dtype or "the model's"}

    def _computed(self, batch: Batch) -> dict[str, Tensor]:
        scored = self.score(batch)
        return {name: getattr(scored, column)[batch.loss_mask_T].contiguous() for name, column in _ON_DISK.items()}

    def _placed(self, batch: Batch, found: dict[str, Tensor]) -> Batch:
        most = int(found["ids"].max()) if len(found["ids"]) else -1
        if most >= self._vocab_size:
            raise ValueError(
                f"teacher_logprobs: got token {most}, expected less than {self._vocab_size}, the policy's vocabulary; "
                "the file was written for another policy"
            )
        columns = {}
        for name, column in _ON_DISK.items():
            values = found[name]
            whole = torch.zeros(batch.num_tokens, *values.shape[1:], dtype=values.dtype)
            whole[batch.loss_mask_T] = values
            columns[column] = whole
        return batch.replace(**columns)
