"""A text encoder of `transformers` under the video module, by a few lines around it."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

from lightning_dalle.lightning_modules.video_dit_module import VideoDiTModule
from lightning_dalle.models.modes import evaluation_mode
from lightning_dalle.models.text_encoders import TextEncoder
from tests.unit.lightning_modules.tiny_video_dit import CAPTIONS, TRAINER, loader, tiny_module

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


class T5Captions(nn.Module):
    """Frozen, in evaluation mode whatever the module's, with zeros behind a caption's end."""

    text_width = 16
    text_tokens = 20

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        config = T5Config(vocab_size=384, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.5)
        self.tokenizer = ByT5Tokenizer()
        self.tower = T5EncoderModel(config).requires_grad_(False)

    def encode(self, captions: Sequence[str]) -> Tensor:
        padding = {"padding": "max_length", "truncation": True, "max_length": self.text_tokens}
        tokens = self.tokenizer(list(captions), return_tensors="pt", **padding).to(self.tower.device)
        with evaluation_mode(self.tower):
            features = self.tower(**tokens).last_hidden_state
        return features * tokens["attention_mask"].unsqueeze(-1)


def test_frozen_t5_conditions_clips(tmp_path: Path) -> None:
    encoder = T5Captions()
    assert isinstance(encoder, TextEncoder)
    features = encoder.encode(CAPTIONS)
    assert features.shape == (3, 20, 16)
    ends = [len(caption.encode()) + 1 for caption in CAPTIONS]
    for row, end in zip(features, ends, strict=True):
        assert (row[:end] != 0).any(dim=1).all()
        assert (row[end:] == 0).all()
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    module = tiny_module(std=0.3, text_encoder=encoder, tokenizer=None)
    trainer = Trainer(**TRAINER, max_epochs=1, limit_train_batches=2)
    trainer.fit(module, loader(2), loader(1))
    for name, value in encoder.state_dict().items():
        assert torch.equal(value, before[name])
    trained = {parameter for group in trainer.optimizers[0].param_groups for parameter in group["params"]}
    assert trained == set(module.network.parameters())
    trainer.save_checkpoint(tmp_path / "clip.ckpt")
    other = T5Captions()
    nn.init.ones_(other.tower.shared.weight)
    loaded = VideoDiTModule.load_from_checkpoint(tmp_path / "clip.ckpt", text_encoder=other, weights_only=True)
    clips = [
        each.eval().generate(CAPTIONS, num_steps=2, generator=torch.Generator().manual_seed(0), progress=False)
        for each in (module, loaded)
    ]
    assert torch.equal(clips[0], clips[1])
    assert not torch.equal(clips[0][0], clips[0][1])
