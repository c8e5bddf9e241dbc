"""Trains a language model in text environments: ``python examples/start_agentic_pipeline.py --help``."""

import sys

from roll.pipeline.cli import main

if __name__ == "__main__":
    sys.exit(main())
