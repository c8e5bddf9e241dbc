"""``fsdp2_train`` and ``fsdp2_infer``."""
