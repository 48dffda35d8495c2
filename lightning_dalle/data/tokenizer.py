"""Byte-pair encoding of captions (paper, section 2.2): lower-cased, padded, with dropout in training."""

import functools
import json
import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

PADDING = "<padding>"
# Every byte is a word of its own, so that no caption holds anything unknown.
MIN_VOCABULARY_SIZE = 1 + 256

logger = logging.getLogger(__name__)


class CaptionTokenizer:
    """Captions as fixed numbers of ids, 0 for padding.

    Merges are learned, stored and applied to words by `tokenizers`. Only BPE dropout (Provilkov et al. 2020) is done
    here, keyed by a seed: the library's cannot be seeded, and would be saved in the file.

    Attributes:
        num_truncated: Captions so far that were longer than they were allowed to be; the first is logged.

    Example:
        >>> tokenizer = CaptionTokenizer.train(["a small red circle", "a large red square"], vocabulary_size=300)
        >>> tokenizer.encode(["A small red circle"], text_tokens=6).tolist()[0][-2:]
        [0, 0]
    """

    def __init__(self, library_tokenizer: Tokenizer) -> None:
        self._library = library_tokenizer
        merges = json.loads(library_tokenizer.to_str())["model"]["merges"]
        self._ranks = {tuple(merge): rank for rank, merge in enumerate(merges)}
        self._vocabulary = library_tokenizer.get_vocab()
        self._words = functools.lru_cache(maxsize=65536)(self._split)
        self._word_ids = functools.lru_cache(maxsize=65536)(self._merge_fully)
        self.num_truncated = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return CaptionTokenizer.from_json, (self.to_json(),)

    @classmethod
    def train(cls, captions: Iterable[str], vocabulary_size: int = 16384) -> "CaptionTokenizer":
        """Learn merges from captions. Few captions give fewer words than `vocabulary_size`.

        Raises:
            TypeError: `captions` is one string.
            ValueError: `vocabulary_size` has no room for padding and the 256 bytes, or there is no caption.
        """
        if vocabulary_size < MIN_VOCABULARY_SIZE:
            raise ValueError(
                f"vocabulary_size ({vocabulary_size}) must be at least {MIN_VOCABULARY_SIZE}: padding and 256 bytes"
            )
        _refuse_one_string(captions)
        library = Tokenizer(models.BPE())
        library.normalizer = normalizers.Sequence(
            [
                normalizers.NFC(),
                normalizers.Lowercase(),
                # Prompts and captions of files are to differ in nothing but their words.
                normalizers.Replace(Regex(r"\s+"), " "),
                normalizers.Strip(),
            ]
        )
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary_size,
            special_tokens=[PADDING],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        counted = _Counted(captions)
        library.train_from_iterator(counted, trainer)
        if not counted.count:
            raise ValueError("captions must not be empty: there is nothing to learn merges from")
        content = json.loads(library.to_str())
        # An added token would be recognised inside captions that happen to spell it.
        content["added_tokens"] = []
        return cls(Tokenizer.from_str(json.dumps(content)))

    @classmethod
    def from_json(cls, text: str, source: str = "the given text") -> "CaptionTokenizer":
        """Read what `to_json` wrote; dropout that another program may have left in it is switched off.

        Raises:
            ValueError: the text is not a byte-pair encoding with padding at id 0.
        """
        way_out = "make one with `lightning-dalle tokenizer`"
        try:
            library = Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{source} is no tokenizer file ({error}); {way_out}") from error
        if not isinstance(library.model, models.BPE) or library.get_vocab().get(PADDING) != 0:
            raise ValueError(f"{source} is no byte-pair encoding with {PADDING!r} at id 0; {way_out}")
        library.model.dropout = None
        return cls(library)

    @classmethod
    def from_file(cls, path: str | Path) -> "CaptionTokenizer":
        """Read a tokenizer.json.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: see `from_json`.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise FileNotFoundError(
                f"tokenizer ({str(path)!r}) does not exist; train one on your captions with `lightning-dalle tokenizer`"
            ) from None
        except UnicodeDecodeError as error:
            raise ValueError(f"tokenizer ({str(path)!r}) is no tokenizer file: it is not UTF-8 text") from error
        return cls.from_json(text, f"tokenizer ({str(path)!r})")

    def to_json(self) -> str:
        """Return the whole tokenizer as text, in the library's format."""
        return str(self._library.to_str())

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @property
    def vocabulary_size(self) -> int:
        """Number of ids, padding included."""
        return int(self._library.get_vocab_size())

    def encode(
        self, captions: Sequence[str], text_tokens: int, dropout: float = 0.0, seed: int | None = None
    ) -> Int[Tensor, "captions text_tokens"]:
        """Return the ids of each caption, truncated or padded with 0 to `text_tokens`.

        Args:
            dropout: Share of the applicable merges that each step skips; .1 in the paper's training.
            seed: With dropout, keys the choice; the same seed, position and caption give the same ids.

        Raises:
            TypeError: `captions` is one string.
            ValueError: dropout is outside [0, 1), or comes without a seed.
        """
        _refuse_one_string(captions)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout ({dropout}) must be at least 0 and below 1, such as the paper's 0.1")
        if dropout and seed is None:
            raise ValueError(f"dropout ({dropout}) needs a seed, such as one drawn from (epoch, index)")
        tokens = torch.zeros(len(captions), text_tokens, dtype=torch.int64)
        for position, caption in enumerate(captions):
            # The standard library's generator starts and draws faster than NumPy's.
            chance = random.Random(f"{seed} {position}") if dropout else None
            ids = [token for word in self._words(caption) for token in self._encode_word(word, dropout, chance)]
            if len(ids) > text_tokens:
                self._count_truncation(caption, len(ids), text_tokens)
            tokens[position, : len(ids)] = torch.tensor(ids[:text_tokens], dtype=torch.int64)
        return tokens

    def _split(self, caption: str) -> list[str]:
        """Return the caption lower-cased and split into words of byte symbols."""
        normalized = self._library.normalizer.normalize_str(_well_formed(caption))
        return [word for word, _ in self._library.pre_tokenizer.pre_tokenize_str(normalized)]

    def _encode_word(self, word: str, dropout: float, chance: random.Random | None) -> Sequence[int]:
        if chance is None:
            return self._word_ids(word)
        return [self._vocabulary[symbol] for symbol in self._merge_with_dropout(word, dropout, chance)]

    def _merge_fully(self, word: str) -> tuple[int, ...]:
        return tuple(token.id for token in self._library.model.tokenize(word))

    def _merge_with_dropout(self, word: str, dropout: float, chance: random.Random) -> list[str]:
        """Apply the earliest learned merge that survives, until none is left or none survives."""
        symbols = list(word)
        while True:
            surviving = [
                (rank, start)
                for start, pair in enumerate(pairwise(symbols))
                if (rank := self._ranks.get(pair)) is not None and chance.random() >= dropout
            ]
            if not surviving:
                return symbols
            _, start = min(surviving)
            symbols[start : start + 2] = [symbols[start] + symbols[start + 1]]

    def _count_truncation(self, caption: str, length: int, text_tokens: int) -> None:
        self.num_truncated += 1
        if self.num_truncated == 1:
            logger.warning(
                "a caption of %d tokens was truncated to text_tokens (%d): %.60r; further ones are counted only",
                length,
                text_tokens,
                caption,
            )


class _Counted:
    """Passes captions on, well-formed, and counts them."""

    def __init__(self, captions: Iterable[str]) -> None:
        self.captions = captions
        self.count = 0

    def __iter__(self) -> Iterator[str]:
        for caption in self.captions:
            self.count += 1
            yield _well_formed(caption)


def _well_formed(caption: str) -> str:
    """Return the caption without lone surrogates (of a file name, of broken JSON), which have no UTF-8 form."""
    return caption.encode("utf-8", "replace").decode("utf-8")


def _refuse_one_string(captions: Iterable[str]) -> None:
    if isinstance(captions, str):
        raise TypeError(f"captions ({captions!r}) must be several strings; put one caption into a list")
