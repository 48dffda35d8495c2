"""Feature extractors and scores of generated images."""
