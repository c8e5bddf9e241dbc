"""A server that speaks the APIs of model providers, for agent programs that play episodes."""
