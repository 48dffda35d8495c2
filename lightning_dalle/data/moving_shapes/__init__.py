"""Moving shapes: motions, oracle, data module."""
