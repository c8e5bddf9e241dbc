"""``roll doctor``: what of a machine, or of every machine of a Ray cluster, a run would stumble over."""
