"""Drawn shapes: scenes, oracle, data module."""
