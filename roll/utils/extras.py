"""The extras: optional parts. The core finds each here, by import path, and imports none itself."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Extra:
    """A part of the package that the core calls but does not import."""

    entry: str
    """Import path of the module that the core calls; verifiers and environments are found by the paths that their
    registries hold."""
    page: str
    """Its page in ``docs/``."""


EXTRAS = {
    "doctor": Extra("roll.extras.doctor.command", "planning.md"),
    "env_check": Extra("roll.extras.env_check.command", "environments.md"),
    "importers": Extra("roll.extras.importers.command", "migrating.md"),
    "maths": Extra("roll.extras.maths.verifier", "rewards.md"),
    "plan": Extra("roll.extras.plan.command", "planning.md"),
    "sandbox": Extra("roll.extras.sandbox.cell", "rewards.md"),
    "smollm2": Extra("roll.extras.smollm2", "real_model.md"),
    "worlds": Extra("roll.extras.worlds", "environments.md"),
}


def extra(name: str) -> ModuleType:
    """The module through which an extra is called, imported at the first call."""
    return importlib.import_module(EXTRAS[name].entry)
