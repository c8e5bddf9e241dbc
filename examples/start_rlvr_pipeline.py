"""Trains a language model on prompts with verifiable answers: ``python examples/start_rlvr_pipeline.py --help``."""

import sys

from roll.pipeline.cli import RLVR, main

if __name__ == "__main__":
    sys.exit(main(program=RLVR))
