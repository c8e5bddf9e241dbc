"""Trains a language model to imitate conversations: ``python examples/start_sft_pipeline.py --help``."""

import sys

from roll.pipeline.cli import SFT, main

if __name__ == "__main__":
    sys.exit(main(program=SFT))
