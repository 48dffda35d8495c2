import json
import logging
import pickle
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer

from lightning_dalle.data.tokenizer import MIN_VOCABULARY_SIZE, PADDING, CaptionTokenizer

CAPTIONS = [
    "a small red diamond left of a large blue square",
    "Woman’s hat, São Tomé & Príncipe",
    "grinning face with smiling eyes",
    "twelve o’clock 🕛 piñata",
    "the the the theatre thermometer",
]
TOKENIZER = CaptionTokenizer.train(CAPTIONS * 3, vocabulary_size=340)
LIBRARY = Tokenizer.from_str(TOKENIZER.to_json())

CHANCE = random.Random(0)


def spelled(ids: torch.Tensor) -> str:
    """The text that ids stand for, by the vocabulary's byte symbols."""
    return "".join(LIBRARY.id_to_token(index) or "" for index in ids.tolist() if index)


@given(st.text(max_size=40) | st.sampled_from(CAPTIONS))
@settings(max_examples=200, deadline=None)
def test_without_dropout_the_ids_are_the_library_s(caption: str) -> None:
    expected = LIBRARY.encode(caption).ids
    tokens = TOKENIZER.encode([caption], text_tokens=256)[0]
    assert tokens[: len(expected)].tolist() == expected
    assert not tokens[len(expected) :].any()


@given(st.text(max_size=40) | st.sampled_from(CAPTIONS))
@settings(max_examples=200, deadline=None)
def test_the_own_merging_equals_the_library_s(caption: str) -> None:
    for word in TOKENIZER._words(caption):
        merged = [TOKENIZER._vocabulary[symbol] for symbol in TOKENIZER._merge_with_dropout(word, 0.0, CHANCE)]
        assert merged == list(TOKENIZER._merge_fully(word))


@given(st.text(max_size=40) | st.sampled_from(CAPTIONS), st.floats(0.01, 0.99), st.integers(0, 2**40))
@settings(max_examples=100, deadline=None)
def test_dropout_spells_the_same_caption(caption: str, dropout: float, seed: int) -> None:
    whole = TOKENIZER.encode([caption], 256)[0]
    dropped = TOKENIZER.encode([caption], 256, dropout=dropout, seed=seed)[0]
    assert spelled(dropped) == spelled(whole)
    assert dropped.count_nonzero() >= whole.count_nonzero()


def test_dropout_is_a_function_of_seed_and_position() -> None:
    batch = [CAPTIONS[0]] * 3
    first, again, other = (TOKENIZER.encode(batch, 64, dropout=0.3, seed=seed) for seed in (5, 5, 6))
    assert first.equal(again)
    assert not first.equal(other)
    assert not first[0].equal(first[1])
    assert TOKENIZER.encode(batch[:1], 64, dropout=0.3, seed=5)[0].equal(first[0])


def test_dropout_skips_that_share_of_a_single_merge() -> None:
    tokenizer = CaptionTokenizer.train(["ab ab ab"], vocabulary_size=MIN_VOCABULARY_SIZE + 1)
    tokens = tokenizer.encode([" ".join(["xab"] * 4000)], 20_000, dropout=0.1, seed=0)
    # Each of 4,000 words is Ġ x ab, or Ġ x a b with chance .1: the count has a deviation of 19.
    assert tokens.count_nonzero() - 3 * 4000 == pytest.approx(400, abs=80)


def test_captions_are_lower_cased_and_padded_with_zero() -> None:
    upper, lower = TOKENIZER.encode(["A SMALL Red diamond", "a small red diamond"], 32)
    assert upper.equal(lower)
    assert upper.dtype == torch.int64
    assert (upper > 0).sum() < 32
    assert upper.max() < TOKENIZER.vocabulary_size


def test_an_empty_caption_is_padding_alone() -> None:
    assert not TOKENIZER.encode([""], 8).any()
    assert TOKENIZER.encode([], 8).shape == (0, 8)


def test_a_caption_that_spells_the_padding_has_none_in_it() -> None:
    tokens = TOKENIZER.encode([PADDING], 32)[0]
    assert spelled(tokens) == f"Ġ{PADDING}"


@pytest.mark.parametrize("caption", ["\ud800 lone surrogate", "null \x00 byte", "🏴󠁧󠁢󠁳󠁣󠁴󠁿", "ﷺ" * 20, "日本語", "a\u0301"])
def test_odd_text_is_encoded(caption: str) -> None:
    assert TOKENIZER.encode([caption], 256)[0].any()
    assert CaptionTokenizer.train([caption], 300).encode([caption], 256)[0].any()


def test_long_captions_are_cut_counted_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = CaptionTokenizer.from_json(TOKENIZER.to_json())
    with caplog.at_level(logging.WARNING):
        tokens = tokenizer.encode(CAPTIONS, text_tokens=3)
    assert tokens.equal(tokenizer.encode(CAPTIONS, text_tokens=64)[:, :3])
    assert tokenizer.num_truncated == len(CAPTIONS)
    assert [
        record.message
        for record in caplog.records
        if "was truncated to text_tokens (3): 'a small red diamond" in record.message
    ]
    assert len(caplog.records) == 1


def test_a_file_gives_the_same_tokenizer(tmp_path: Path) -> None:
    TOKENIZER.encode(CAPTIONS, 64, dropout=0.5, seed=1)
    TOKENIZER.save(tmp_path / "tokenizer.json")
    loaded = CaptionTokenizer.from_file(tmp_path / "tokenizer.json")
    assert loaded.to_json() == TOKENIZER.to_json()
    assert loaded.encode(CAPTIONS, 64).equal(TOKENIZER.encode(CAPTIONS, 64))
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["dropout"] is None


def test_dropout_left_in_a_file_is_switched_off() -> None:
    content = json.loads(TOKENIZER.to_json())
    content["model"]["dropout"] = 0.9
    loaded = CaptionTokenizer.from_json(json.dumps(content))
    assert loaded.to_json() == TOKENIZER.to_json()
    assert loaded.encode(CAPTIONS, 64).equal(TOKENIZER.encode(CAPTIONS, 64))


def test_a_pickled_tokenizer_is_the_same() -> None:
    assert pickle.loads(pickle.dumps(TOKENIZER)).encode(CAPTIONS, 64).equal(TOKENIZER.encode(CAPTIONS, 64))


def test_the_vocabulary_is_at_most_what_was_asked_for() -> None:
    assert TOKENIZER.vocabulary_size == 340
    few = CaptionTokenizer.train(["a red diamond"], vocabulary_size=16384)
    assert MIN_VOCABULARY_SIZE < few.vocabulary_size < 300
    assert few.encode(["a red diamond"], 8).count_nonzero() == 3


def test_training_is_repeatable() -> None:
    assert CaptionTokenizer.train(CAPTIONS * 3, 340).to_json() == TOKENIZER.to_json()


@pytest.mark.parametrize("caption", ["a red diamond\n", "\ta red  diamond ", "a\u00a0red diamond"])
def test_white_space_around_and_between_words_makes_no_difference(caption: str) -> None:
    assert torch.equal(TOKENIZER.encode([caption], 8), TOKENIZER.encode(["a red diamond"], 8))
    spaced = [word.replace(" ", "  ") + "\n" for word in CAPTIONS * 3]
    assert CaptionTokenizer.train(spaced, 340).to_json() == TOKENIZER.to_json()


def test_one_string_is_not_taken_for_its_letters() -> None:
    for use in (lambda: TOKENIZER.encode("a red cat", 4), lambda: CaptionTokenizer.train("a red cat")):
        with pytest.raises(
            TypeError, match=r"captions \('a red cat'\) must be several strings; put one caption into a"
        ):
            use()


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"vocabulary_size \(256\) must be at least 257"):
        CaptionTokenizer.train(CAPTIONS, 256)
    with pytest.raises(ValueError, match="captions must not be empty"):
        CaptionTokenizer.train(iter([]))
    with pytest.raises(ValueError, match=r"dropout \(1.0\) must be at least 0 and below 1"):
        TOKENIZER.encode(CAPTIONS, 8, dropout=1.0, seed=0)
    with pytest.raises(ValueError, match=r"dropout \(0.1\) needs a seed"):
        TOKENIZER.encode(CAPTIONS, 8, dropout=0.1)


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\xff\xfe\x00binary", b'{"model": {"type": "BPE"}}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer \('.*tokenizer.json'\) is no tokenizer file"):
        CaptionTokenizer.from_file(path)


def test_a_foreign_tokenizer_is_refused() -> None:
    content = json.loads(TOKENIZER.to_json())
    content["model"]["vocab"] = {
        word.replace("padding", "pad"): index for word, index in content["model"]["vocab"].items()
    }
    with pytest.raises(
        ValueError, match="the given text is no byte-pair encoding with '<padding>' at id 0; make one with"
    ):
        CaptionTokenizer.from_json(json.dumps(content))


def test_a_missing_file_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match="does not exist; train one on your captions with `lightning-dalle tokenizer`"
    ):
        CaptionTokenizer.from_file(tmp_path / "none.json")
