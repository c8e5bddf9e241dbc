"""Trains a language model on a teacher's probabilities: ``python examples/start_distill_pipeline.py --help``."""

import sys

from roll.pipeline.cli import DISTILL, main

if __name__ == "__main__":
    sys.exit(main(program=DISTILL))
