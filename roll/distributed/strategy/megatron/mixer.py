"""Gated delta nets (Yang et al. 2024), and the attention between them, in Megatron's layers: Transformers' own modules.

Megatron-Core's gated delta net needs kernels that are for GPUs alone and refuses packed rows. The modules are whole on
each tensor-parallel rank, of which there may be but one.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roll.models.megatron.config import transformers_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KINDS = {"linear_attention": "GatedDeltaNet", "full_attention": "Attention"}
"""Ends of the names of their classes, by the kinds of layers of a configuration."""


class TransformersMixer(nn.Module):
    """What mixes the tokens of a row in one of Transformers' layers, in the place of Megatron's attention.

    Axes: S positions, B rows, H hidden units.
    """

    def __init__(self, config: Any, hf_config: PreTrainedConfig, layer_number: int, **_: object) -> None:
        super().__init__()
        text = copy.copy(hf_config)
        text._attn_implementation = "sdpa"  # causal without a mask
        index = layer_number - 1
        kind: Any = transformers_class(text, KINDS[text.layer_types[index]])
        self.module: nn.Module = kind(text, index)
        self._attends = text.layer_types[index] == "full_attention"

    def forward(
        self,
        hidden_SBH: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: Any = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Within each row, or one after another within each of a packed row's sequences; [S, B, H] and no bias."""
        lengths = [len(hidden_SBH)] if packed_seq_params is None else packed_seq_params.cu_seqlens_q.diff().tolist()
        return torch.cat([self._mix(part, rotary_pos_emb) for part in hidden_SBH.split(lengths)]), None

    def _mix(self, hidden_SBH: Tensor, angles: Tensor) -> Tensor:
        hidden_BSH = hidden_SBH.transpose(0, 1)
        if not self._attends:
            mixed: Tensor = self.module(hidden_BSH)
        else:
            angles_1SD = angles[: len(hidden_SBH), 0, 0][None]
            cosine, sine = (turn(angles_1SD).to(hidden_BSH.dtype) for turn in (torch.cos, torch.sin))
            mixed = self.module(hidden_BSH, position_embeddings=(cosine, sine), attention_mask=None)[0]
        return mixed.transpose(0, 1)
