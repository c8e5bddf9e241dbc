"""Teachers: scores of rollouts and datasets, also by tag, with another tokenizer, or with prompts of their own.

A prompt of the teacher's own is the question with columns of its row that the policy does not see.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roll.algorithms.distillation import NO_CHUNK, shared_logprobs, teacher_metrics
from roll.algorithms.quantities import TOP_COLUMNS
from roll.algorithms.types import TokenScores
from roll.configs.distill import DistillConfig
from roll.configs.engine_rules import compute_dtype
from roll.configs.rlvr import RLVRConfig
from roll.configs.teacher import DivergenceConfig
from roll.data.batch import Batch
from roll.data.columns import IntArray
from roll.data.files import Problems
from roll.data.prompt_rows import RowError, lookup
from roll.data.prompts import Prompt
from roll.data.renderer import ChatRenderer
from roll.distributed.strategy.base import Metrics, StrategyContext
from roll.models.aligned_text import Retokenizer
from roll.models.loading import load_config
from roll.models.tokenizer import load_tokenizer, model_folder
from roll.pipeline.column_cache import cached_columns, digest_of, read_cached, weight_files
from roll.pipeline.model_cluster import ModelCluster, Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TEACHER_COLUMNS = ("teacher_hidden_TH", "teacher_ids_TK", "teacher_top_TK", "teacher_tail_T")
"""Columns of a batch that a comparison over the vocabulary reads; large."""


def with_teacher(batch: Batch, scores: TokenScores, teaching: DivergenceConfig | None) -> Batch:
    """The batch with what a teacher's scores say of it.

    Raises:
        ValueError: they say too little for a comparison over the vocabulary.
    """
    found = scores.as_they_are.get
    columns: dict[str, Any] = {"teacher_logprobs_T": found("logprobs_T"), "teacher_chunk_T": found("chunk_T")}
    if teaching is not None:
        compared = [found(name) for name in ("hidden_TH", *TOP_COLUMNS)]
        if all(column is None for column in compared):
            raise ValueError(
                "teacher: its strategy returns neither hidden states nor top tokens; expected hf_infer or an fsdp2, "
                "deepspeed or megatron strategy"
            )
        columns |= dict(zip(TEACHER_COLUMNS, compared, strict=True))
    return batch.replace(**columns)


def shared_ids(*models: tuple[str, bool]) -> int:
    """Ids that all models have, from 0 on; of each its folder or hub name, and whether its Python files may run."""
    return int(min(load_config(path, trust_remote_code=trust).get_text_config().vocab_size for path, trust in models))


_MORE_TOKENS = 2
"""Times the policy's longest row that a teacher may need for the same text, where its model has positions for it."""


class AlignedTeacher:
    """Log-probs of a policy's batch from a teacher with another tokenizer."""

    def __init__(self, teacher: ModelCluster, retokenizer: Retokenizer) -> None:
        self._teacher = teacher
        self._retokenizer = retokenizer

    def submit_logprobs(self, batch: Batch, rows: Tensor | None = None) -> Callable[[], TokenScores]:
        """The teacher's log-probability of each chunk of text, in equal parts for the policy's tokens in it."""
        theirs, chunk_S, chunk_T = self._retokenizer.batch(batch)
        wait = self._teacher.submit_logprobs(theirs, rows)

        def shared() -> TokenScores:
            scores = wait()
            assert scores.logprobs_T is not None, "a language model's"
            logprobs_T = shared_logprobs(scores.logprobs_T, (theirs.rows_T, chunk_S), (batch.rows_T, chunk_T))
            return TokenScores(logprobs_T.float(), chunk_T=chunk_T)

        return shared


def aligned(
    context: StrategyContext, teacher: ModelCluster, policy: PreTrainedTokenizerBase
) -> tuple[StrategyContext, ModelCluster | AlignedTeacher]:
    """A teacher that reads the text of a policy, and the context to set it up with.

    With the policy's own vocabulary it is a teacher like any other: it reads the very tokens that were sampled.

    Args:
        context: that of a teacher with the policy's tokens.
    """
    args = context.worker.model_args
    own = load_tokenizer(context.model_path, trust_remote_code=args.trust_remote_code)
    if own.get_vocab() == policy.get_vocab():
        return context, teacher
    config = load_config(context.model_path, args.model_config_kwargs, trust_remote_code=args.trust_remote_code)
    longest = _MORE_TOKENS * context.sequence_length
    longest = min(longest, getattr(config.get_text_config(), "max_position_embeddings", None) or longest)
    retokenizer = Retokenizer(policy, own, context.template, longest)
    return replace(context, tokenizer_path=None, sequence_length=longest), AlignedTeacher(teacher, retokenizer)


class TaggedTeachers:
    """Log-probs of a policy's batch, each row by the teachers of its tag.

    Args:
        teachers: by name, set up.
        tags: of each teacher, as ``Batch.tag_B`` counts them.
        coefficients: what a teacher counts for beside the others of a row.
    """

    def __init__(
        self, teachers: Mapping[str, Scorer], tags: Mapping[str, Sequence[int]], coefficients: Mapping[str, float]
    ) -> None:
        self._teachers = teachers
        self._tags = tags
        self._coefficients = coefficients
        self._scored: list[tuple[str, Tensor, Tensor]] = []

    def rows(self, batch: Batch) -> dict[str, Tensor]:
        """int64: the rows of each teacher, which may be none."""
        assert batch.tag_B is not None, "rollouts have tags"
        return {
            name: torch.isin(batch.tag_B, torch.tensor(self._tags[name])).nonzero()[:, 0] for name in self._teachers
        }

    def submit_logprobs(self, batch: Batch, rows: Tensor | None = None) -> Callable[[], TokenScores]:
        """Log-probabilities of each row under its teacher, and chunks where one of them has other tokens.

        Teachers on other devices work side by side. Of a row with several teachers the scores are the mean, weighted
        with the coefficients. All rows are scored.
        """
        pending = []
        for name, own in self.rows(batch).items():
            if len(own):
                part = batch.select(own)
                pending.append((name, own, part, self._teachers[name].submit_logprobs(part)))
        return partial(self._weighed, batch, pending)

    def _weighed(
        self, batch: Batch, pending: Sequence[tuple[str, Tensor, Batch, Callable[[], TokenScores]]]
    ) -> TokenScores:
        sum_T, weight_T = torch.zeros(2, batch.num_tokens, dtype=torch.float64)
        chunk_T, aligned, self._scored = torch.full((batch.num_tokens,), NO_CHUNK), False, []
        for name, own, part, wait in pending:
            scores, place = wait(), batch.token_index(own)
            assert scores.logprobs_T is not None, "a language model's"
            self._scored.append((name, own, scores.logprobs_T))
            sum_T[place] += self._coefficients[name] * scores.logprobs_T.double()
            weight_T[place] += self._coefficients[name]
            aligned |= scores.chunk_T is not None
            every_T = torch.where(part.loss_mask_T, part.positions_T, NO_CHUNK)  # with the policy's tokens, each is one
            chunk_T[place] = every_T if scores.chunk_T is None else scores.chunk_T
        logprobs_T = torch.where(weight_T > 0, sum_T / weight_T, sum_T).float()
        return TokenScores(logprobs_T, chunk_T=chunk_T if aligned else None)

    def metrics(self, batch: Batch) -> Metrics:
        """``teacher_metrics`` of each teacher's rows and own opinion, ``teacher/<name>/…``.

        Args:
            batch: the one that was scored last.
        """
        return {
            key.replace("teacher/", f"teacher/{name}/", 1): value
            for name, own, logprobs_T in self._scored
            for key, value in teacher_metrics(batch.select(own).replace(teacher_logprobs_T=logprobs_T)).items()
        }


class PrivilegedTeacher:
    """Log-probs of the policy's responses after the teacher's own prompts.

    Zhao et al. 2026, *Self-Distilled Reasoner: On-Policy Self-Distillation for Large Language Models*.

    Args:
        prompt: the teacher's prompt of a rollout group, as token ids.
    """

    def __init__(self, teacher: Scorer, prompt: Callable[[int], IntArray]) -> None:
        self._teacher = teacher
        self._prompt = prompt

    def submit_logprobs(self, batch: Batch, rows: Tensor | None = None) -> Callable[[], TokenScores]:
        """The teacher's scores of the sampled tokens, where they stand in the policy's rows."""
        theirs = self.read(batch)
        wait = self._teacher.submit_logprobs(theirs, rows)
        own_K, their_K = (each.loss_mask_T.nonzero().squeeze(1) for each in (batch, theirs))

        def placed() -> TokenScores:
            found = {name: column[their_K] for name, column in wait().columns.items()}
            return TokenScores.gathered(batch.num_tokens, [own_K], [TokenScores.of(**found)])

        return placed

    def read(self, batch: Batch) -> Batch:
        """The rows as the teacher reads them: its prompt in place of what stands before the first sampled token."""
        assert batch.group_B is not None, "rollouts are groups"
        prompts = {group: torch.tensor(self._prompt(group)) for group in batch.group_B.unique().tolist()}
        lengths, tokens, masks = [], [], []
        rows = zip(
            *(column.split(batch.lengths_B.tolist()) for column in (batch.tokens_T, batch.loss_mask_T)), strict=True
        )
        for group, (own, sampled) in zip(batch.group_B.tolist(), rows, strict=True):
            prompt, cut = prompts[group], int(sampled.long().argmax())
            tokens += [prompt, own[cut:]]
            masks += [torch.zeros(len(prompt), dtype=torch.bool), sampled[cut:]]
            lengths.append(len(prompt) + len(own) - cut)
        return Batch(torch.tensor(lengths), torch.cat(tokens), torch.cat(masks), group_B=batch.group_B)


_WHAT = "log-probabilities of a teacher"
_ON_DISK = {"ids": "teacher_ids_TK", "logprobs": "teacher_top_TK", "tail": "teacher_tail_T"}
"""Columns of a file, one entry per token to learn, and what they are in a batch."""


def require_cached(config: DistillConfig, batch: Batch) -> Path:
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


class DatasetTeacher:
    """Computes log-probs of given responses with the teacher's role, or reads stored ones.

    Args:
        model: the role, set up; ``None`` where all of it is on disk.
        path: folder or hub name of the teacher; ``None`` where all of it is on disk.
        vocab_size: ids that the policy has.
    """

    def __init__(self, config: DistillConfig, model: Scorer | None, path: str | None, vocab_size: int) -> None:
        self._config = config
        self._model = model
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
            found = read_cached(require_cached(config, batch), list(_ON_DISK), _WHAT)
            assert found is not None
        else:
            file = _file(config, batch)
            found = dict(cached_columns(file, list(_ON_DISK), _WHAT, lambda: self._computed(batch), self._identity))
        return self._placed(batch, found)

    @property
    def _identity(self) -> dict[str, str]:
        """The teacher's name and the files of its weights where they are on this machine, and how it computes."""
        assert self._config.teacher is not None, "it scores"
        _, dtype = compute_dtype("teacher", self._config.teacher)
        files = weight_files(model_folder(str(self._path)))
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


_PLACEHOLDER = re.compile(r"(?<![\w\\{])\{([\w.]+)\}(?!\})")  # not the braces of \boxed{answer}
_BLOCK = 1024
"""Prompts that are tokenised together."""


class TeacherPrompts:
    """Fills a template with a row and renders it.

    Args:
        template: text of the last message; ``{prompt}`` is what it is for the policy, ``{column}`` a column of the row.
        renderer: the policy's: the teacher reads the same tokens.
        response: column of the reference answer.
        column_length: most tokens of a column; what is behind them is cut off.
    """

    def __init__(
        self, template: str, renderer: ChatRenderer, response: str | None = None, column_length: int | None = None
    ) -> None:
        self._template = template
        self._renderer = renderer
        self._response = response
        self._column_length = column_length

    def messages(self, prompt: Prompt) -> tuple[Mapping[str, str], ...]:
        """The conversation that the teacher reads.

        Raises:
            RowError: the row has no such column, or no text or number in it.
        """
        *before, question = prompt.messages
        values = {**prompt.extra_info, "prompt": question["content"]}
        if self._response is not None:
            values.setdefault(self._response, prompt.ground_truth)

        def fill(place: re.Match[str]) -> str:
            value = lookup(values, place[1])
            if not isinstance(value, str | int | float):
                raise RowError(f"column {place[1]!r}: {value!r:.60}, expected text or a number")
            return str(value) if place[1] == "prompt" else self._cut(str(value))

        return (*before, {**question, "content": _PLACEHOLDER.sub(fill, self._template)})

    def _cut(self, text: str) -> str:
        """The text of its first ``column_length`` tokens; of a character that they only begin, nothing."""
        if self._column_length is None:
            return text
        tokenizer = self._renderer.tokenizer
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) <= self._column_length:
            return text
        kept: Any = tokenizer.decode(ids[: self._column_length], skip_special_tokens=False)
        return str(kept if text.startswith(kept) else kept.rstrip("\ufffd"))

    def ids(self, prompt: Prompt) -> IntArray:
        """Token ids of the conversation, with the assistant's turn opened."""
        return self._renderer.prompt(self.messages(prompt))

    def check(self, prompts: Sequence[Prompt], most: int) -> None:
        """Fills the template with every row.

        Raises:
            DataError: what is missing in which row, and which prompt has more than ``most`` tokens.
        """
        problems = Problems()
        for start in range(0, len(prompts), _BLOCK):
            filled = {}
            for prompt in prompts[start : start + _BLOCK]:
                try:
                    filled[prompt.id] = self.messages(prompt)
                except RowError as error:
                    problems.add(prompt.id, f"teacher_prompt: {error}")
            for name, ids in zip(filled, self._renderer.prompts(list(filled.values())), strict=True):
                if len(ids) > most:
                    expected = f"expected at most {most:,}: sequence_length minus the longest response"
                    problems.add(name, f"teacher_prompt: {len(ids):,} tokens, {expected}")
        problems.raise_any()


def teacher_prompts(config: RLVRConfig, renderer: ChatRenderer) -> TeacherPrompts | None:
    """Writer of the teacher's own prompts, where it has them."""
    if config.teacher_prompt is None:
        return None
    response, most = config.actor_train.data_args.response, config.teacher_column_length
    return TeacherPrompts(config.teacher_prompt, renderer, response, most)
