"""``roll plan``: what a configuration takes of a machine, computed and not run. The formulas: docs/planning.md."""
