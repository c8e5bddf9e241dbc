"""Typed, strict configuration. Imports nothing of roll but itself, and neither torch nor Ray."""
