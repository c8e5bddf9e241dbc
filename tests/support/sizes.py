"""Sizes of tiny models, as Transformers names them, and models of these."""

from pathlib import Path
from typing import Any

FOUR_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def sizes(vocabulary: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def tiny_folder(folders: Any, seed: int, **shape: Any) -> Path:
    """An untrained tiny model in a folder of its own, by pytest's ``tmp_path_factory``."""
    from roll.models.tiny import make_tiny_model

    path: Path = folders.mktemp("model") / "tiny"
    make_tiny_model(path, seed, **shape)
    return path


def save_random(path: Path, family: str, *shape: int, **config: Any) -> Path:
    """A random causal language model of a family (``Qwen2``) with these ``sizes`` in a folder.

    Args:
        config: other keys of its configuration.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    options = sizes(*shape) | {"initializer_range": 0.1} | config
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**options))
    for name, parameter in model.named_parameters():
        if ".gate.weight" in name:
            parameter.data.mul_(10.0)  # experts that score alike would be chosen by rounding
    model.save_pretrained(path)
    return path
