"""Divergences of a policy from its teacher over a set of outcomes: a vocabulary, or its top tokens and the rest.

Each is a sum over outcomes of the addends that are computed here, so that outcomes may lie on several devices. With t
and s the teacher's and the student's probabilities:

- ``forward_kl``: KL(t || s); Hinton, Vinyals and Dean (2015).
- ``reverse_kl``: KL(s || t); Gu et al. (2024), MiniLLM.
- ``js_divergence``: b KL(t || m) + (1 - b) KL(s || m), m = b t + (1 - b) s; Agarwal et al. (2024), GKD.
- ``skewed_forward_kl``: KL(t || a t + (1 - a) s), ``skewed_reverse_kl``: KL(s || a s + (1 - a) t); Ko et al. (2024).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from roll.configs.divergence import DivergenceConfig


def divergence_addends(teacher: Tensor, student: Tensor, config: DivergenceConfig) -> Tensor:
    """Addends, in nats, that sum over all outcomes to the divergence.

    Args:
        teacher: Log-probabilities, finite.
        student: The same of the student, of the same shape; gradients flow through it.
        config: Reads ``kd_objective``, ``jsd_beta``, ``skew_lambda``.
    """
    match config.kd_objective:
        case "forward_kl":
            return _kl_addends(teacher, student)
        case "reverse_kl":
            return _kl_addends(student, teacher)
        case "js_divergence":
            beta = config.jsd_beta
            middle = _mixture(teacher, student, beta)
            return beta * _kl_addends(teacher, middle) + (1 - beta) * _kl_addends(student, middle)
        case "skewed_forward_kl":
            return _kl_addends(teacher, _mixture(teacher, student, config.skew_lambda))
        case "skewed_reverse_kl":
            return _kl_addends(student, _mixture(student, teacher, config.skew_lambda))


def _kl_addends(p: Tensor, q: Tensor) -> Tensor:
    return p.exp() * (p - q)


def _mixture(p: Tensor, q: Tensor, share: float) -> Tensor:
    """Log-probabilities of ``share`` p and the rest q."""
    return q if share == 0 else torch.logaddexp(p + math.log(share), q + math.log1p(-share))
