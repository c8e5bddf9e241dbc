"""Whether ``hf_infer`` can run a model, told from its configuration alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def foreign_attention(config: PreTrainedConfig, sequence_length: int) -> str | None:
    """The kinds of attention layers that the engine does not have; ``None`` if it has them all.

    A window that the context never fills hides nothing.

    Args:
        config: of the model's text part.
        sequence_length: longest prompt plus completion.
    """
    window = getattr(config, "sliding_window", None)
    default = "full_attention" if window is None else "sliding_attention"
    kinds = set(getattr(config, "layer_types", None) or [default]) - {"full_attention"}
    if window is not None and window >= sequence_length:
        kinds.discard("sliding_attention")
    return f"{', '.join(sorted(kinds))} (window {window})" if kinds else None
