"""Weights and configurations between Hugging Face and Megatron-Core. Needs no Megatron: names and arithmetic only.

``config.py`` translates a model's configuration, ``names.py`` maps names of parameters, says which part of a model a
rank holds, and cuts whole tensors into a rank's shards and joins them again.
"""
