"""Tools that a model calls: their schemas, and the notations in which model families write calls."""
