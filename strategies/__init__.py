"""Strategies of the suite; imported as ``lightning_dalle.strategies``."""
