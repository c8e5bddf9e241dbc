"""Trackers, the run's folder, the live display, checkpoints, time and memory."""
