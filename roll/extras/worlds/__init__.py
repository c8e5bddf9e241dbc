"""Environments beyond Sokoban and FrozenLake, and adapters of other libraries'; found through the registry of `roll.agentic.env`."""
