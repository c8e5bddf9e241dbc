"""Seeing a run and keeping it: trackers, the run's folder, the live display, checkpoints, time and memory."""
