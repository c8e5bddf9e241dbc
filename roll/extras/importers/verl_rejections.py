"""verl's rejection of tokens and sequences by the ratio of the engines' probabilities, as filters on that ratio."""

from __future__ import annotations

import math
from typing import Any

from roll.extras.importers.transforms import Untranslatable

NO_BOUND = 1e9
"""Above every ratio, which is at most exp(20)."""
_LEVELS = {"token": "token", "sequence": "sequence", "geometric": "geometric"}
_K1 = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
_OF_TOKENS = ("token_k2", "token_k3", "seq_max_k2", "seq_max_k3")


def filter_of(level: str, low: float, high: float, *, whole_rows: bool = False) -> dict[str, Any]:
    """An entry of ``train_infer_correction.filters``."""
    found = {"enabled": True, "agg_type": level, "ratio_low": low, "ratio_high": high}
    return found | {"whole_rows": True} if whole_rows else found


def rejections(options: Any, bounds: Any, least: Any) -> list[dict[str, Any]]:
    """The filters of ``rollout_rs``, ``rollout_rs_threshold`` and (of earlier releases) ``…_threshold_lower``.

    ``token``, ``sequence`` and ``geometric`` bound the ratio r itself, ``*_k1`` its inverse, ``*_k2`` (log r)² / 2 and
    ``*_k3`` r - 1 - log r from above.

    Raises:
        Untranslatable: an option is no bound of a ratio.
    """
    names = [name.strip() for name in str(options or "").split(",") if name.strip()]
    given = [each.strip() for each in str(2.0 if bounds is None else bounds).split(",")]
    if len(given) not in (1, len(names)) and names:
        raise Untranslatable(f"{len(given)} thresholds for {len(names)} options")
    return [_filter(name, given[0 if len(given) == 1 else i], least) for i, name in enumerate(names)]


def _filter(name: str, bound: str, least: Any) -> dict[str, Any]:
    low, _, high = bound.rpartition("_")
    upper = float(high)
    lower = float(low) if low else 1 / upper
    if name in _LEVELS:
        return filter_of(_LEVELS[name], lower if least is None else float(least), upper)
    if name in _K1:
        return filter_of(_K1[name], 1 / upper, 1 / lower)
    if name not in _OF_TOKENS:
        raise Untranslatable(f"{name} is no bound of a ratio: there are {', '.join([*_LEVELS, *_K1, *_OF_TOKENS])}")
    reach = math.sqrt(2 * upper)
    down, up = (-reach, reach) if name.endswith("k2") else (_root(upper, -(upper + 1)), _root(upper, reach))
    return filter_of("token", math.exp(down), math.exp(up), whole_rows=name.startswith("seq_"))


def _root(bound: float, outside: float) -> float:
    """The log ratio x on the side of ``outside`` (where it is more) at which exp(x) - 1 - x is the bound."""
    inside = 0.0
    for _ in range(100):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if math.expm1(middle) - middle <= bound else (inside, middle)
    return inside
