"""Environments beyond Sokoban and FrozenLake, and adapters to other libraries; `roll.agentic.env` registers them."""
