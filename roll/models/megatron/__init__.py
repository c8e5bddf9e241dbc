"""Weights and configurations between Hugging Face and Megatron-Core. Needs no Megatron: names and arithmetic only.

``config.py`` translates a model's configuration, ``layout.py`` says which part of a model a rank holds, ``names.py``
maps names of parameters, ``convert.py`` cuts whole tensors into a rank's shards and joins them again.
"""
