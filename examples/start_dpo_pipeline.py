"""Trains a language model on preferences: ``python examples/start_dpo_pipeline.py --help``."""

import sys

from roll.pipeline.cli import DPO, main

if __name__ == "__main__":
    sys.exit(main(program=DPO))
