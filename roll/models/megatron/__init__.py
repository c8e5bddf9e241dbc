"""Weights and configurations between Hugging Face and Megatron-Core. Needs no Megatron: names and arithmetic only.

``families.py`` has all that is particular to a model family. ``config.py`` translates a model's configuration,
``names.py`` maps names of parameters, says which part of a model a rank holds, and cuts whole tensors into a rank's
shards and joins them again, and puts a layer's experts into the tensors of Transformers' module.
"""
