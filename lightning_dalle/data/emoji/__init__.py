"""Emoji: OpenMoji drawings and animated emoji."""
