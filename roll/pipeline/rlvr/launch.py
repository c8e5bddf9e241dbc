"""Reads the data, sets the RLVR pipeline up on its clusters and runs it."""

from __future__ import annotations

import sys
from functools import partial

from roll.algorithms.losses import policy_needs
from roll.algorithms.preferences import build_preference_loss
from roll.configs.batches import describe_batches
from roll.configs.rlvr import RLVRConfig
from roll.data.prompts import PromptDataset
from roll.pipeline.cli import EXIT_USAGE
from roll.pipeline.launch import launch
from roll.pipeline.privileged_teacher import PrivilegedTeacher
from roll.pipeline.programs import RLVR
from roll.pipeline.prompt_roles import PromptRoles, prompt_workers
from roll.pipeline.rl import set_losses
from roll.pipeline.rlvr.datasets import Datasets, load_datasets, load_renderer, make_data, teacher_prompts
from roll.pipeline.rlvr.pipeline import RLVRPipeline
from roll.pipeline.start import Launched


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
    notes = [*describe_batches(config), *datasets.describe()]
    body, workers, needs = partial(_run, datasets=datasets), prompt_workers(config), policy_needs(config)
    data = datasets.identities()
    return launch(config, RLVR, body, workers, needs=needs, notes=notes, started=started, data=data)


def _run(config: RLVRConfig, run: Launched, *, datasets: Datasets[PromptDataset]) -> None:
    roles, prompts = run.roles, PromptRoles(config, run, datasets.train, datasets.val)
    prompts.begin_setup()
    with run.set_up(config, prompts):
        if (writer := teacher_prompts(config, load_renderer(config))) is not None:
            assert roles.teacher is not None, "a rule"
            roles.teacher = PrivilegedTeacher(roles.teacher, lambda group: writer.ids(prompts.drawn(group)))
        if config.online_dpo is None:
            set_losses(roles, config)
        else:
            roles.actor.call("set_loss", build_preference_loss, config.online_dpo)
    RLVRPipeline(config, run, prompts).run()
