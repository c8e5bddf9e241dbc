"""Reward models: scores for answers, learnt from comparisons, scores or labelled steps."""
