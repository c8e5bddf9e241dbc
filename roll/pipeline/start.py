"""The initial policy of a run: a saved model, or the one that ``pretrain: tiny`` creates and trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

from roll.configs.engines.card import kind_of
from roll.configs.pipeline import TINIES, TINY, PipelineConfig
from roll.distributed.cluster.cluster import Cluster
from roll.models.loading import load_config
from roll.models.tokenizer import check_same_ids, check_vocabulary, policy_tokenizer
from roll.pipeline.programs import Program
from roll.pipeline.roles import Roles
from roll.pipeline.session import RunSession
from roll.utils.registry import import_path
from roll.utils.signals import SignalGuard


class SetUp(Protocol):
    """Workers that are set up while models load."""

    def wait_ready(self) -> None: ...


class Start:
    """The policy before the first step: a model in Hugging Face format, unchanged.

    Args:
        model_path: a model with the policy's tokenizer and sizes, to be read before any worker is set up.
    """

    def __init__(self, model_path: str) -> None:
        self.model_path = model_path

    def weights(self, session: RunSession, roles: Roles, rollouts: Any) -> str:
        """The model whose weights the policy starts from; whatever it did with the roles, they are set up after it."""
        return self.model_path


def start_of(config: PipelineConfig, program: Program) -> Start:
    """The start of a run of this pipeline."""
    if config.pretrain not in TINIES:
        return Start(config.pretrain)
    return cast("Callable[[PipelineConfig], Start]", import_path(program.tiny))(config)


def check_rows(config: PipelineConfig) -> None:
    """Checks that every model which reads the policy's tokens has a row for each, also one that is on the hub.

    Raises:
        ValueError: the embedding of a model would be asked for rows that it does not have.
    """
    roles = [role for role in config.roles if not (kind_of(role) == "teacher" and config.aligns_teacher)]
    models = {path: role for role in reversed(roles) if (path := config.model_of(role)) not in TINIES}
    if config.pretrain in TINIES or not models:
        return
    trusts = config.trusts("actor_train")
    tokenizer = policy_tokenizer(config.pretrain, config.tokenizer_path, trust_remote_code=trusts)
    for path, role in models.items():
        sizes = load_config(path, trust_remote_code=config.trusts(role)).get_text_config()
        try:
            check_vocabulary(tokenizer, sizes.vocab_size)
        except ValueError as error:
            raise ValueError(f"{path}, the model of {role}: {error}") from error


@dataclass(frozen=True)
class RunContext:
    """A run whose workers are up."""

    program: Program
    session: RunSession
    signals: SignalGuard
    clusters: Mapping[str, Cluster]
    roles: Roles
    start: Start

    @contextmanager
    def set_up(self, config: PipelineConfig, rollouts: SetUp | None) -> Iterator[tuple[str, str | None]]:
        """Loads the models, for the block to do the rest, and waits for the workers of the rollouts.

        Yields:
            Folders or hub names: of the starting weights, and of the section ``teacher``, where there is one.
        """
        check_rows(config)
        teacher_path = self._teacher_weights(config, rollouts)
        model_path = self.start.weights(self.session, self.roles, rollouts)
        with self.session.phase("setup"):
            self.roles.setup(model_path, config.total_optimizer_steps, teacher_path)
            yield model_path, teacher_path
            if rollouts is not None:
                rollouts.wait_ready()

    def _teacher_weights(self, config: PipelineConfig, rollouts: SetUp | None) -> str | None:
        """The folder or hub name of the teacher; with ``teacher_pretrain: tiny`` it is taught on the run's own workers.

        Returns:
            ``None`` where the run has no section ``teacher``; those of several teachers are as the configuration says.

        Raises:
            ValueError: the tokens of a teacher are not those of the policy.
        """
        taught = [role for role in config.roles if kind_of(role) == "teacher"]
        for role in taught if not config.aligns_teacher else ():
            trusts = {"trust_policy": config.trusts("actor_train"), "trust_other": config.trusts(role)}
            check_same_ids(config.pretrain, config.model_of(role), config.tokenizer_path, **trusts)
        if "teacher" not in taught:
            return None
        if (path := config.model_of("teacher")) != TINY:
            return path
        self.session.display.note("the teacher is taught first")
        return start_of(config.of_teacher(), self.program).weights(self.session, self.roles, rollouts)
