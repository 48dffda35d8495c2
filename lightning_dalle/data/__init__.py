"""Captioned images as LightningDataModules, the caption tokenizer and the procedural sets with their oracle."""
