"""Keys and values that one attention layer keeps while a sequence is decoded."""

from jaxtyping import Float, Int
from torch import Tensor

from lightning_dalle.ops.attention import AttentionPattern, attend, attend_cached


class KeyValueCache:
    """The cache of one layer: the first `attend` takes the whole prefix, each later one a single position.

    Its layout is its own affair, so that it can come to hold only the keys that the pattern still reaches.

    Args:
        pattern: Pattern of the whole sequence. A prefix must be the text block and complete rows of the grid.
    """

    def __init__(self, pattern: AttentionPattern) -> None:
        self._pattern = pattern
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.length = 0

    def attend(
        self,
        query: Float[Tensor, "batch heads new head_dim"],
        key: Float[Tensor, "batch heads new head_dim"],
        value: Float[Tensor, "batch heads new head_dim"],
    ) -> Float[Tensor, "batch heads new head_dim"]:
        """Appends the new positions, and attends from them to all that the pattern lets them see.

        Raises:
            ValueError: If more than one position is appended to a cache that has its prefix.
        """
        if self._keys is None or self._values is None:
            rows, rest = divmod(query.shape[-2] - self._pattern.text_length, self._pattern.width)
            if rest or rows < 0:
                raise ValueError(
                    f"a prefix of {query.shape[-2]} positions must be the text block ({self._pattern.text_length}) "
                    f"and complete rows of {self._pattern.width}"
                )
            self._keys, self._values = self._preallocate(key), self._preallocate(value)
            self.length = key.shape[-2]
            return attend(query, key, value, self._pattern.with_height(rows))
        if query.shape[-2] != 1:
            raise ValueError(
                f"query has {query.shape[-2]} positions; after its prefix a sequence is decoded one by one"
            )
        position = self.length
        output_cache = slice(position, position + 1)
        self._keys[:, :, output_cache] = key
        self._values[:, :, output_cache] = value
        self.length += 1
        return attend_cached(query, self._keys, self._values, self._pattern, position)

    def select(self, rows: Int[Tensor, " selected"]) -> "KeyValueCache":
        """A new cache whose batch is `rows` of this one: how candidates of one caption share its prefix."""
        selected = KeyValueCache(self._pattern)
        if self._keys is not None and self._values is not None:
            selected._keys = self._preallocate(self._keys[:, :, : self.length].index_select(0, rows))
            selected._values = self._preallocate(self._values[:, :, : self.length].index_select(0, rows))
            selected.length = self.length
        return selected

    def _preallocate(self, prefix: Tensor) -> Tensor:
        batch, heads, length, head_dim = prefix.shape
        buffer = prefix.new_empty(batch, heads, self._pattern.length, head_dim)
        buffer[:, :, :length] = prefix
        return buffer
