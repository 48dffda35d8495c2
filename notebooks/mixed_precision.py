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
# # One gradient scale per residual block
#
# Float16 holds numbers from about 6e-8 to 65504. Gradients may be spread wider than that over the depth of a network,
# and then one scale for all of them loses some to zero at one end or to infinity at the other.
# `PerBlockGradientScaling` gives each residual block a scale of its own, `AdamW16` keeps the moments in two bytes each,
# and `LossScaleMonitor` shows what they do. Here they train a text-to-image transformer on drawn shapes, for a few
# updates with `FAST`.

# %%
import os
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from lightning.pytorch import Trainer, seed_everything

from lightning_dalle import (
    AdamW16,
    CaptionedShapesDataModule,
    CaptionTokenizer,
    DiscreteVAE,
    DiscreteVAEConfig,
    LossScaleMonitor,
    OptimizerConfig,
    PerBlockGradientScaling,
    ScheduleConfig,
    SparseTransformerConfig,
    TextToImageModule,
    TextToImageTrainingConfig,
)
from lightning_dalle.ops.float_formats import FLOAT_0_6_10, FLOAT_1_6_9, decode, encode

warnings.filterwarnings("ignore")
FAST = os.environ.get("LIGHTNING_DALLE_NOTEBOOK_FAST", "1") == "1"
folder = Path(tempfile.mkdtemp())
seed_everything(0, verbose=False)

# %% [markdown]
# ## What a scale does to one gradient
#
# Rounded to float16 directly, the smallest of these is gone; multiplied by 1024 first and divided afterwards, all are
# there.

# %%
gradients = torch.tensor([1e-8, 3e-8, 1e-7, 1e-6, 1e-5])
print("direct:", gradients.half().float().tolist())
print("scaled:", ((gradients * 1024).half().float() / 1024).tolist())

# %% [markdown]
# ## A run
#
# The module names its blocks, two in each layer; a module that does not is served as well, by
# `PerBlockGradientScaling(blocks=SomeClass)` or a regular expression. The scales begin higher than the paper's and fall
# faster, so that a short run shows something: the first updates are skipped until each block has found its own place.

# %%
updates = 40 if FAST else 1_000
data = CaptionedShapesDataModule(num_train=2_000 if FAST else 50_000, num_val=64, batch_size=16)
tokenizer = folder / "tokenizer.json"
CaptionTokenizer.train(data.captions("train"), 512).save(tokenizer)
vae = DiscreteVAE(DiscreteVAEConfig(image_size=40, codebook_size=64, hidden_width=8, num_groups=3, blocks_per_group=1))
module = TextToImageModule(
    SparseTransformerConfig(
        depth=4,
        num_heads=2,
        head_dim=16 if FAST else 64,
        text_tokens=12,
        text_vocabulary_size=512,
        grid_height=10,
        grid_width=10,
        image_vocabulary_size=64,
    ),
    TextToImageTrainingConfig(
        optimizer=OptimizerConfig(learning_rate=2e-3, beta2=0.96, moments="16bit"),
        schedule=ScheduleConfig(name="cosine", warmup_steps=5, total_steps=updates),
    ),
    discrete_vae=vae,
    tokenizer=tokenizer,
)
plugin = PerBlockGradientScaling(dtype="float16", initial_scale=2.0**24, backoff_factor=4.0, backoff_interval=1)
monitor = LossScaleMonitor(every_n_updates=1)
trainer = Trainer(
    max_steps=updates,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    limit_val_batches=0,
    gradient_clip_val=4.0,
    plugins=plugin,
    callbacks=[monitor],
)
captioned = CaptionedShapesDataModule(
    num_train=2_000 if FAST else 50_000,
    num_val=64,
    batch_size=16,
    tokenizer=tokenizer,
    text_tokens=12,
    bpe_dropout=0.0,
)
trainer.fit(module, captioned)
print(f"{plugin.num_skipped_updates} of {plugin.num_updates} updates were skipped")
print("the first value that was not finite came up in", monitor.first_non_finite)

# %% [markdown]
# ## The scales, by block and update

# %%
plt.figure(figsize=(9, 4))
plt.imshow(monitor.heat_map().permute(1, 2, 0))
plt.axis("off")
plt.show()

# %% [markdown]
# ## What is left of the gradients
#
# Gradients are unscaled by the time that clipping and logging see them. None of a block's are lost.

# %%
blocks = list(plugin.loss_scales())
figure, axes = plt.subplots(1, 3, figsize=(12, 3), layout="constrained")
for axis, name in zip(axes, ["scale", "gradient_norm", "zero_gradients"], strict=True):
    axis.bar(range(len(blocks)), [monitor.metrics[f"precision/{name}/{block}"] for block in blocks])
    axis.set_title(f"{name} by block")
axes[0].set_yscale("log", base=2)
axes[1].set_yscale("log")
plt.show()

# %% [markdown]
# ## Moments in two bytes
#
# Six bits of exponent reach from 2**-67 to 16, at three digits: the curve is the error of rounding, as a share of the
# value.

# %%
values = torch.logspace(-22, 1.5, 4_000)
plt.figure(figsize=(9, 3))
for name, float_format in {"1-6-9, mean": FLOAT_1_6_9, "0-6-10, variance": FLOAT_0_6_10}.items():
    rounded = decode(encode(values, float_format), float_format)
    plt.loglog(values, (rounded - values).abs() / values, ".", markersize=1, label=name)
plt.ylim(1e-6, 2)
plt.xlabel("value")
plt.legend()
plt.show()
optimizer = trainer.optimizers[0]
assert isinstance(optimizer, AdamW16)
sizes = [state[name].element_size() for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
print(f"{sizes.count(2)} moments have two bytes, {sizes.count(4)} have four")
