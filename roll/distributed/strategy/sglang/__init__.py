"""``sglang``."""
