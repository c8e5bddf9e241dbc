"""ROLL: reinforcement-learning post-training for large language models.

Importing the package is cheap: torch, ray and the engines load only where they are used.
"""

__version__ = "0.1.0"
