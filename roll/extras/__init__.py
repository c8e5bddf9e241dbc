"""What the core works without and never imports; it finds each by its entry in `roll.utils.extras`."""
