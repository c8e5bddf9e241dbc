"""Agent programs: how they are started, what they are told, and the episodes that they play."""
