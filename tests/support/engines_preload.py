"""Imports engines as their ranks do, seconds of each: once, in the process of which they are forked."""

import contextlib
import importlib
import warnings

from roll.distributed.strategy.megatron.substitutes import redirect_to_cpu

with warnings.catch_warnings(record=True) as WARNINGS:
    redirect_to_cpu()  # where it is not installed, the process of the ranks does without
    for name in ("deepspeed.runtime.zero.muon.muon_optimizer", "peft"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
