"""What a diffusion model asks of the encoder of its captions."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class TextEncoder(Protocol):
    """An encoder, frozen or trained: a tower of open_clip or transformers becomes one by a few lines around it."""

    @property
    def text_width(self) -> int:
        """Features of a token."""
        ...

    # The command line compares annotations with those of the class it is given: shapes are never equal, Any always is.
    def encode(self, captions: Any) -> Any:
        """Return features of captions, a sequence of strings: floating point [captions, tokens, text_width].

        All captions have the same number of tokens at every call, with zeros behind a caption's end.
        """
        ...
