"""KL divergence to the reference model, estimated from the sampled token alone, and the control of its coefficient.

With d = log p - log q (p the policy that sampled, q the reference) the estimators are those of Schulman,
"Approximating KL Divergence" (2020): k1 = d is unbiased, k2 = d^2 / 2 has low variance, k3 = exp(-d) - 1 + d has both
and is never negative. ``kl_penalty: full`` is none of them: the KL over the vocabulary comes from the model
(``TokenScores.kl_T``), where all log-probabilities are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from roll.configs.algorithm import KlTerm
from roll.utils.registry import Registry

EXPONENT_BOUND = 20.0
"""|log ratio| is clamped to this before the exponential."""
K3_BOUND = 10.0
"""k3 is clamped to this, so that one token cannot outweigh a batch; its gradient is 0 beyond."""

KlFn: TypeAlias = Callable[[Tensor], Tensor]
"""Maps d = log p - log q to a divergence of the same shape, differentiably."""


def k1(d: Tensor) -> Tensor:
    """Log ratio. As a loss its expected gradient is 0: use k2 or k3 there."""
    return d


def absolute(d: Tensor) -> Tensor:
    """Absolute log ratio."""
    return d.abs()


def k2(d: Tensor) -> Tensor:
    """Half the squared log ratio."""
    return 0.5 * d.square()


def k3(d: Tensor) -> Tensor:
    """Ratio - 1 - log ratio, of the reference to the policy, clamped to [-10, 10]."""
    ratio = torch.exp((-d).clamp(-EXPONENT_BOUND, EXPONENT_BOUND))
    return (ratio - 1 + d).clamp(-K3_BOUND, K3_BOUND)


def straight_through(estimator: KlFn) -> KlFn:
    """The estimator's value with the gradient of k2, whose expectation is that of the KL (Tang & Munos 2025)."""

    def value_and_gradient(d: Tensor) -> Tensor:
        guide = k2(d)
        return estimator(d).detach() + (guide - guide.detach())

    return value_and_gradient


KL_ESTIMATORS: Registry[KlFn] = Registry("KL estimator")
for _name, _estimator in {
    "kl": k1,
    "k1": k1,
    "abs": absolute,
    "mse": k2,
    "k2": k2,
    "low_var_kl": k3,
    "k3": k3,
}.items():
    KL_ESTIMATORS.register(_name, _estimator)
    if _estimator is not k2:
        KL_ESTIMATORS.register(f"{_name}+", straight_through(_estimator))


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Per-token KL of the policy to the reference.

    Args:
        logprobs: log p of the sampled tokens; gradients flow through it.
        ref_logprobs: log q of the same tokens, same shape.
        kind: A name in ``KL_ESTIMATORS`` (``kl_penalty``).
    """
    return KL_ESTIMATORS.get(kind)(logprobs - ref_logprobs)


class KlController:
    """The coefficient of a KL: fixed, or adapted to a target (Ziegler et al. 2019, section 2.2).

    Adaptive: ``coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * min(sequences / horizon, 1)`` after each step. Ziegler et
    al. have steps of fewer sequences than the horizon; of more than five times as many, the sign would change.
    """

    def __init__(self, coef: float, target: float | None = None, horizon: int = 10000) -> None:
        self.coef = coef
        self.target = target
        self.horizon = horizon

    @classmethod
    def of(cls, term: KlTerm | None) -> KlController:
        """Of one of the two KLs; with a coefficient of 0 where it is off."""
        return cls(0.0) if term is None else cls(term.coef, term.target, term.horizon)

    def update(self, kl: float, num_sequences: int) -> None:
        """Adapts the coefficient to the KL that ``num_sequences`` sequences had on average; no-op when fixed."""
        if self.target is None:
            return
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * min(num_sequences / self.horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes up a coefficient that is steered; a fixed one is the configuration's."""
        if self.target is not None:
            self.coef = float(state["coef"])
