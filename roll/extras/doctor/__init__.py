"""``roll doctor``: checks a machine, or every machine of a Ray cluster, for what would make a run fail."""
