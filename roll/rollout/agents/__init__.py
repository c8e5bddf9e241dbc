"""Agent programs: how they are started, their input, and their episodes."""
