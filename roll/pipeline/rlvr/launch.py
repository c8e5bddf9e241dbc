"""Reads the data, sets the RLVR pipeline up on its clusters and runs it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial

from roll.algorithms.preferences import build_preference_loss
from roll.configs.batches import describe_batches
from roll.configs.rlvr import RLVRConfig
from roll.distributed.cluster.cluster import Cluster
from roll.pipeline.launch import EXIT_USAGE, launch
from roll.pipeline.privileged_teacher import PrivilegedTeacher
from roll.pipeline.programs import RLVR
from roll.pipeline.prompt_roles import PromptRoles, prompt_workers
from roll.pipeline.rl import set_losses
from roll.pipeline.rlvr.datasets import (
    Datasets,
    describe_datasets,
    load_datasets,
    load_renderer,
    make_data,
    teacher_prompts,
)
from roll.pipeline.rlvr.pipeline import RLVRPipeline
from roll.pipeline.roles import Roles
from roll.pipeline.session import RunSession
from roll.pipeline.start import Start, teacher_weights
from roll.utils.signals import SignalGuard


def run_rlvr(config: RLVRConfig, started: float | None = None) -> int:
    """Runs the RLVR pipeline to its end and returns the exit code, see ``launch``; 2 for wrong data."""
    try:
        if config.data_generator is not None:
            make_data(config.data_generator)
        datasets = load_datasets(config, load_renderer(config))
    except (OSError, ValueError) as error:  # a DataError is a ValueError
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    config = config if datasets.train is None else config.with_length(len(datasets.train))
    notes = [*describe_batches(config), *describe_datasets(datasets)]
    return launch(config, RLVR, partial(_run, datasets=datasets), prompt_workers(config), notes=notes, started=started)


def _run(
    config: RLVRConfig,
    session: RunSession,
    signals: SignalGuard,
    clusters: Mapping[str, Cluster],
    start: Start,
    *,
    datasets: Datasets,
) -> None:
    roles = Roles(config, clusters)
    tokenizer = config.tokenizer_path or start.model_path
    prompts = PromptRoles(config, clusters, roles, tokenizer, datasets.train, datasets.val, on_tick=signals.check)
    prompts.begin_setup()
    teacher_path = teacher_weights(config, RLVR, session, roles, prompts)
    model_path = start.weights(session, roles, prompts)
    with session.phase("setup"):
        roles.setup(model_path, config.total_optimizer_steps, teacher_path)
        if (writer := teacher_prompts(config, load_renderer(config))) is not None:
            assert roles.teacher is not None, "a rule"
            roles.teacher = PrivilegedTeacher(roles.teacher, lambda group: writer.ids(prompts.drawn(group)))
        if config.online_dpo is None:
            set_losses(roles, config)
        else:
            roles.actor.call("set_loss", build_preference_loss, config.online_dpo)
        prompts.wait_ready()
    RLVRPipeline(config, session, roles, signals, prompts).run()
