"""Signatures of the data modules: the same settings of the loaders, with the same defaults, written out in each."""

import inspect

import pytest

import lightning_dalle
from lightning_dalle.data.base import CaptionedDataModule

MODULES = [name for name in lightning_dalle.__all__ if name.endswith("DataModule")]
SHARED = {
    "batch_size": 64,
    "tokenizer": None,
    "text_tokens": 256,
    "bpe_dropout": 0.1,
    "num_workers": 0,
    "seed": 0,
}


@pytest.mark.parametrize("name", MODULES)
def test_signature_shows_the_settings_of_the_loaders(name: str) -> None:
    module = getattr(lightning_dalle, name)
    parameters = inspect.signature(module).parameters
    assert {setting: parameters[setting].default for setting in SHARED} == SHARED
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters.values())
    assert module.__bases__ == (CaptionedDataModule,)
