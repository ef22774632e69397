"""Will it fit: capacity of a model on devices, from metadata alone."""
