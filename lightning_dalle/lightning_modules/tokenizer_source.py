"""A tokenizer from a file, or from the text that a checkpoint carries."""

from pathlib import Path

from lightning_dalle.data.tokenizer import CaptionTokenizer


def load_tokenizer(source: str | Path) -> CaptionTokenizer:
    """Return the tokenizer of a file's path, or of the file's JSON text."""
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return CaptionTokenizer.from_json(source)
    return CaptionTokenizer.from_file(source)
