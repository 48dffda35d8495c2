"""Captioned images and videos in folders and tar shards."""
