"""Callbacks of the suite; imported as ``lightning_dalle.callbacks``."""
