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
# # Training over a slow link
#
# Two processes train one discrete VAE from this notebook, as two machines would. After each backward pass they have to
# agree on a gradient. `ShardedPowerSGDStrategy` sends P and Q of low rank instead of each matrix, and an error-feedback
# buffer keeps what they miss for the next step. Here each process is a machine of its own (`shard_size=1`); on real
# machines `shard_size` is the number of devices in each, which share one replica of the parameters.

# %%
import csv
import os
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torchvision.utils import make_grid

from lightning_dalle import (
    CaptionedShapesDataModule,
    DiscreteVAEConfig,
    DiscreteVAEModule,
    PowerSGDConfig,
    PowerSGDMonitor,
    ShardedPowerSGDStrategy,
)

warnings.filterwarnings("ignore")
# Processes are forked, which a thread pool of this one would not survive.
torch.set_num_threads(1)
FAST = os.environ.get("LIGHTNING_DALLE_NOTEBOOK_FAST", "1") == "1"
UPDATES = 12 if FAST else 300
folder = Path(tempfile.mkdtemp())


def train(name, **compression):
    """Fit on two processes; return what was logged, and the trained module."""
    seed_everything(0, verbose=False)
    config = DiscreteVAEConfig(image_size=40, codebook_size=64, hidden_width=32, num_groups=3, blocks_per_group=1)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ShardedPowerSGDStrategy(shard_size=1, powersgd=PowerSGDConfig(**compression)),
        callbacks=[PowerSGDMonitor()],
        max_steps=UPDATES,
        limit_val_batches=0,
        log_every_n_steps=1,
        logger=CSVLogger(folder, name=name, version=0),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = DiscreteVAEModule(config)
    trainer.fit(module, CaptionedShapesDataModule(num_train=2_000, num_val=64, batch_size=16))
    with open(folder / name / "version_0" / "metrics.csv") as file:
        return list(csv.DictReader(file)), module


# %% [markdown]
# ## Uncompressed, compressed, and without error feedback
#
# The third run drops what P and Q miss instead of keeping it.

# %%
runs = {
    "uncompressed": train("uncompressed", start_powersgd_iter=UPDATES),
    "rank 2": train("rank_2", matrix_approximation_rank=2),
    "rank 2, no error feedback": train("no_feedback", matrix_approximation_rank=2, error_feedback=False),
}

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5))
for name, (rows, _) in runs.items():
    left.plot([float(row["train/loss"]) for row in rows if row["train/loss"]], label=name)
    sent = [float(row["powersgd/bytes_sent"]) / 1e6 for row in rows if row["powersgd/bytes_sent"]]
    right.plot(sent, label=name)
    print(f"{name}: {sent[-1]:.2f} MB sent by each process")
left.set(title="training loss", xlabel="step")
right.set(title="MB sent by each process", xlabel="step")
left.legend()
plt.show()

# %% [markdown]
# ## The trained module
#
# Its parameters came back from the processes, and it runs here as any other.

# %%
vae = runs["rank 2"][1].eval()
samples = CaptionedShapesDataModule(num_train=1, num_val=8).dataset("val")
originals = torch.stack([samples[index]["image"] for index in range(8)])
pictures = torch.cat([originals, vae.decode(vae.encode(originals))])
plt.figure(figsize=(8, 2.4))
plt.imshow(make_grid(pictures, nrow=8, padding=2, pad_value=128).permute(1, 2, 0), interpolation="nearest")
plt.title("originals over reconstructions", fontsize=9)
plt.axis("off")
plt.show()
