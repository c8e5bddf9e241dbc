"""How many examples a test draws, as a share of what the profile in use draws."""

from hypothesis import settings


def examples(in_a_hundred: int) -> settings:
    """So many for each hundred of the profile: fewer with ``--hypothesis-profile=quick``."""
    return settings(max_examples=max(1, in_a_hundred * settings().max_examples // 100))
