"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# A machine with other work draws and runs examples slowly, which says nothing of the code.
settings.register_profile("roll", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("roll")
