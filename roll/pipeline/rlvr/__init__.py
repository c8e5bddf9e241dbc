"""The RLVR pipeline: prompts from datasets, rewards that can be verified."""
