"""Every module tells whoever gives its Trainer a precision that is slow there."""

import warnings
from collections.abc import Callable

import pytest
from lightning.pytorch import LightningModule, Trainer

from lightning_dalle.lightning_modules.contrastive_module import ContrastiveModule
from lightning_dalle.lightning_modules.discrete_vae_module import DiscreteVAEModule
from lightning_dalle.lightning_modules.video_autoencoder_module import VideoAutoencoderModule
from lightning_dalle.models.contrastive import ContrastiveConfig
from lightning_dalle.models.discrete_vae import DiscreteVAEConfig
from lightning_dalle.models.video_autoencoder import CausalVideoAutoencoderConfig
from lightning_dalle.ops import hardware
from tests.unit.lightning_modules import tiny_text_to_image, tiny_video_dit

SIZES = ContrastiveConfig(
    image_size=32, embed_dim=8, vision_width=4, text_tokens=5, text_width=8, text_heads=1, text_layers=1
)
MODULES: dict[str, Callable[[], LightningModule]] = {
    "contrastive": lambda: ContrastiveModule(SIZES, tokenizer=tiny_text_to_image.tokenizer_json()),
    "discrete VAE": lambda: DiscreteVAEModule(DiscreteVAEConfig(image_size=8, codebook_size=4, hidden_width=4)),
    "text to image": tiny_text_to_image.tiny_module,
    "video autoencoder": lambda: VideoAutoencoderModule(CausalVideoAutoencoderConfig(hidden_width=2)),
    "video DiT": tiny_video_dit.tiny_module,
}


def set_up(module: LightningModule, precision: str) -> None:
    module.trainer = Trainer(**tiny_text_to_image.TRAINER, precision=precision)  # type: ignore[arg-type]
    module.setup("fit")


@pytest.mark.parametrize("name", MODULES)
def test_a_slow_precision_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_cpu_multiplies_fast", lambda dtype: False)
    module = MODULES[name]()
    with pytest.warns(UserWarning, match="bfloat16 is much slower"):
        set_up(module, "bf16-mixed")
    with pytest.warns(UserWarning, match="float16 is much slower"):
        set_up(module, "16-true")


@pytest.mark.parametrize(("precision", "fast"), [("32-true", False), ("64-true", False), ("bf16-mixed", True)])
def test_nothing_is_told_of_a_precision_that_is_not(
    precision: str, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "_cpu_multiplies_fast", lambda dtype: fast)
    module = MODULES["discrete VAE"]()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*much slower")
        set_up(module, precision)
