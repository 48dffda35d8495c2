# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Captions to pictures, by hand
#
# The four pieces of the DALL-E recipe, each with an ordinary `Trainer`: a tokenizer for the captions, a discrete VAE
# that turns pictures into codes, a transformer that continues a caption with codes, and a contrastive model that ranks
# what the transformer draws. The pictures are drawn shapes, so an oracle can tell whether a picture shows its caption.
#
# With `FAST` everything runs in well under a minute and the pictures are not worth much;
# `lightning-dalle quickstart --data shapes` trains the same pieces for minutes.

# %%
import os
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from lightning.pytorch import Trainer, seed_everything
from torchvision.utils import make_grid

from lightning_dalle import (
    CaptionedShapesDataModule,
    CaptionTokenizer,
    ContrastiveConfig,
    ContrastiveModule,
    ContrastiveTrainingConfig,
    DiscreteVAEConfig,
    DiscreteVAEModule,
    OptimizerConfig,
    ScheduleConfig,
    SparseTransformerConfig,
    TextToImageModule,
    TextToImageTrainingConfig,
)
from lightning_dalle.data.shapes.oracle import matches_each

warnings.filterwarnings("ignore")
FAST = os.environ.get("LIGHTNING_DALLE_NOTEBOOK_FAST", "1") == "1"
folder = Path(tempfile.mkdtemp())
seed_everything(0, verbose=False)


def train(module, data, updates):
    """Fit for a number of updates, without files."""
    trainer = Trainer(
        max_steps=updates,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        gradient_clip_val=1.0,
    )
    trainer.fit(module, data)
    return module


def show(images, title, columns):
    """Draw a grid of pictures."""
    grid = make_grid(images, nrow=columns, padding=2, pad_value=128).permute(1, 2, 0)
    plt.figure(figsize=(columns, len(images) / columns + 0.4))
    plt.imshow(grid, interpolation="nearest")
    plt.title(title, fontsize=9)
    plt.axis("off")
    plt.show()


# %% [markdown]
# ## Data and tokenizer
#
# Twelve of the 72 single objects, and some pairs, are never shown in training.

# %%
shapes = CaptionedShapesDataModule(num_train=2_000 if FAST else 50_000, num_val=64, batch_size=32)
CaptionTokenizer.train(shapes.captions("train"), 512).save(folder / "tokenizer.json")
samples = [shapes.dataset("val")[index] for index in range(8)]
originals = torch.stack([sample["image"] for sample in samples])
show(originals, samples[0]["caption"] + ", ...", columns=8)

# %% [markdown]
# ## Discrete VAE
#
# 40 x 40 pixels become a 10 x 10 grid of codes. The code starts from k-means over patches.

# %%
vae_config = DiscreteVAEConfig(
    image_size=40,
    codebook_size=64 if FAST else 256,
    hidden_width=8,
    num_groups=3,
    blocks_per_group=1,
    decoder_input_width=32,
    min_log_scale=-2.0,
    patch_codebook=True,
)
vae = train(DiscreteVAEModule(vae_config, {"dequantise": True}), shapes, updates=10 if FAST else 150)
show(torch.cat([originals, vae.decode(vae.encode(originals))]), "originals over reconstructions", columns=8)

# %% [markdown]
# ## Transformer
#
# It continues the caption's tokens with the picture's codes.

# %%
updates = 20 if FAST else 2_200
captioned = CaptionedShapesDataModule(
    num_train=2_000 if FAST else 50_000,
    num_val=64,
    batch_size=32,
    tokenizer=folder / "tokenizer.json",
    text_tokens=12,
    bpe_dropout=0.0,
)
transformer = train(
    TextToImageModule(
        SparseTransformerConfig(
            depth=2 if FAST else 4,
            num_heads=3,
            head_dim=64,
            text_tokens=12,
            text_vocabulary_size=512,
            grid_height=10,
            grid_width=10,
            image_vocabulary_size=vae_config.codebook_size,
        ),
        TextToImageTrainingConfig(
            optimizer=OptimizerConfig(learning_rate=2e-3, beta2=0.96),
            schedule=ScheduleConfig(name="cosine", warmup_steps=5, total_steps=updates),
            caption_dropout=0.1,
            image_token_noise=0.1,
        ),
        discrete_vae=vae.network,
        tokenizer=folder / "tokenizer.json",
    ),
    captioned,
    updates,
)

# %% [markdown]
# ## Reranker

# %%
updates = 10 if FAST else 300
reranker = train(
    ContrastiveModule(
        ContrastiveConfig(image_size=32, text_tokens=13, text_width=64, text_layers=1),
        ContrastiveTrainingConfig(
            optimizer=OptimizerConfig(learning_rate=1e-3),
            schedule=ScheduleConfig(name="cosine", warmup_steps=5, total_steps=updates),
        ),
        tokenizer=folder / "tokenizer.json",
    ),
    shapes,
    updates,
)

# %% [markdown]
# ## Pictures
#
# Each row has the candidates of one caption that training never showed, best to worst.

# %%
captions = shapes.held_out_captions(1)[:4]
candidates = transformer.generate(captions, num_candidates=8, guidance_scale=1.5, progress=False)
ranked = []
for caption, pictures in zip(captions, candidates, strict=True):
    order = reranker.score(pictures, [caption])[:, 0].argsort(descending=True)
    ranked.append(pictures[order])
    right = matches_each(ranked[-1], [caption] * len(pictures))
    print(f"{caption}: the oracle reads {int(right.sum())} of {len(right)} back as the caption says")
show(torch.cat(ranked), "candidates, best to worst", columns=8)
