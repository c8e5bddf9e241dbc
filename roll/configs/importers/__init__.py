"""Configurations of other systems: what each of their keys is called here, and how one becomes a configuration."""
