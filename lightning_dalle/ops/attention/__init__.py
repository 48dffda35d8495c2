"""Attention: entry point, patterns, kernels, caches."""
