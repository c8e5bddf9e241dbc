"""Optional parts that the core never imports; it finds each by its entry in `roll.utils.registry`."""
