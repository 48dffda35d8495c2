"""Algorithms on process groups; no Lightning, no models."""
