"""A server with the APIs of model providers, for agent programs."""
