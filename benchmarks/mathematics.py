"""The ``math`` verifier beside plain math-verify, on the labelled pairs of ``mathematics_pairs.jsonl``.

Prints how often each takes a wrong answer for a right one and the other way round, per kind of answer, and the mean
time of a comparison. An answer stands in ``\\boxed{}``, but for whole responses (kind ``prose``).
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from roll.extras.maths.verifier import MathConfig, MathVerifier
from roll.rewards.types import Sample

PAIRS = Path(__file__).with_name("mathematics_pairs.jsonl")


def roll_says() -> Callable[[str, str], bool]:
    verifier = MathVerifier(MathConfig())
    return lambda gold, response: verifier.check(Sample("", response, gold, "maths")).correct


def math_verify_says() -> Callable[[str, str], bool]:
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def says(gold: str, response: str) -> bool:
        return bool(verify(parse(f"\\boxed{{{gold}}}"), parse(response)))

    return says


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, default=PAIRS)
    pairs = [json.loads(line) for line in parser.parse_args().pairs.read_text(encoding="utf-8").splitlines()]
    wrong: dict[str, Counter[str]] = {}
    for name, build in (("roll", roll_says), ("math-verify", math_verify_says)):
        says, started = build(), time.perf_counter()
        for accepted in (True, False):
            wrong[f"{name} {accepted}"] = Counter()
        for pair in pairs:
            if says(pair["gold"], pair["response"]) != pair["equal"]:
                wrong[f"{name} {not pair['equal']}"][pair["kind"]] += 1
        print(f"{name}: {1000 * (time.perf_counter() - started) / len(pairs):.1f} ms per comparison")
    totals = {equal: Counter(pair["kind"] for pair in pairs if pair["equal"] is equal) for equal in (True, False)}
    print("\n| Kind | Wrong pairs | roll accepts | math-verify accepts | Right | roll refuses | math-verify refuses |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for kind in [*dict.fromkeys(pair["kind"] for pair in pairs), "all"]:
        cells = []
        for equal in (False, True):
            counters = [totals[equal], wrong[f"roll {not equal}"], wrong[f"math-verify {not equal}"]]
            cells += [counter.total() if kind == "all" else counter[kind] for counter in counters]
        print(f"| {kind} | {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
