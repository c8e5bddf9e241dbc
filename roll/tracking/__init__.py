"""Seeing a run and keeping it: trackers, the run's folder, the live display, renders, checkpoints, timing.

Importing this package loads neither torch nor a tracking service; each tracker imports its service when it is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll.utils.registry import Registry

if TYPE_CHECKING:
    from roll.tracking.trackers import TrackerFactory

TRACKERS: Registry[TrackerFactory] = Registry("tracker")
"""Names for ``track_with``; outside code is reached as ``package.module:Class``."""

TRACKERS.register("tensorboard", "roll.tracking.trackers:TensorboardTracker")
TRACKERS.register("wandb", "roll.tracking.services:WandbTracker")
TRACKERS.register("mlflow", "roll.tracking.services:MlflowTracker")
TRACKERS.register("swanlab", "roll.tracking.services:SwanlabTracker")
TRACKERS.register("trackio", "roll.tracking.services:TrackioTracker")
TRACKERS.register("stdout", "roll.tracking.trackers:StdoutTracker")

SERVICES = ("wandb", "mlflow", "swanlab", "trackio")
"""Trackers whose packages are extras of the same names."""
