"""Liger's fused kernels (RMS norm, SwiGLU) in the layers of a Transformers model, on a GPU.

Its rotary embedding is left out because it replaces a function of all models in the process, its loss because losses
are computed here from log-probabilities.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "model_args.use_liger_kernel"


def use_liger_kernels(model: PreTrainedModel) -> None:
    """Replaces the layers of one model that Liger has kernels for.

    Raises:
        ValueError: no GPU, or Liger does not know the architecture.
        ImportError: liger-kernel is not installed.
    """
    if not torch.cuda.is_available():
        raise ValueError(f"{KEY}: true, expected false on a machine without a GPU, where its kernels do not run")
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance
    except ImportError as error:
        raise ImportError(f"{KEY}: {error}; expected: pip install 'roll-rl[liger]'") from error

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        known = sorted(MODEL_TYPE_TO_APPLY_LIGER_FN)
        near = difflib.get_close_matches(kind, known, n=3) or known
        raise ValueError(f"{KEY}: Liger has no kernels for {kind!r}, expected false, or a model such as {near}")
    _apply_liger_kernel_to_instance(model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False)
