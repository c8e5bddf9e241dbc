"""``megatron_train`` and ``megatron_infer``."""
