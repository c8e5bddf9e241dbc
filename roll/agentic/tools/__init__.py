"""Tools that a model calls: their schemas, and the ways in which model families write calls."""
