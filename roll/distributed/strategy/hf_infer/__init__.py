"""``hf_infer``."""
