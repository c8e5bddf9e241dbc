"""Distillation: answers that are there before, and what a teacher makes of each of their tokens."""
