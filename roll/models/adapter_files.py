"""Names in an adapter's folder, as peft has them. Imports nothing, so that folders can be looked at without torch."""

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
CLASSIFIES = "SEQ_CLS"
GENERATES = "CAUSAL_LM"
"""The tasks of a classifier and of a language model (``task_type``)."""
