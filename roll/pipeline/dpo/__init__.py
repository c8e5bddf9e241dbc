"""Preferences: answers that are better or worse."""
