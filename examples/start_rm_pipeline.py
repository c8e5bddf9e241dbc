"""Trains a reward model on answers that were compared or scored: ``python examples/start_rm_pipeline.py --help``."""

import sys

from roll.pipeline.cli import REWARD_MODEL, main

if __name__ == "__main__":
    sys.exit(main(program=REWARD_MODEL))
