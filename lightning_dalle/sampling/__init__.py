"""Decoding of trained networks."""
