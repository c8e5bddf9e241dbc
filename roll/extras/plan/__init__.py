"""``roll plan``: estimates what a configuration needs, without running it. The formulas: docs/planning.md."""
