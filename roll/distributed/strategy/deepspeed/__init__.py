"""``deepspeed_train`` and ``deepspeed_infer``."""
