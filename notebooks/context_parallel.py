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
# # A sequence in parts
#
# Processes share each sequence: every one holds a part of its positions in all layers, and attention is that of the
# whole. Here a small language model learns to repeat what it read half a sequence ago, on one process and on several,
# under `ContextParallelStrategy`. The losses are the same; what each process keeps for its backward pass is not.

# %%
import csv
import os
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader

from lightning_dalle import ContextParallelMonitor, ContextParallelStrategy, SequencePlan, sequence_mean

warnings.filterwarnings("ignore")
# Processes are forked, which a thread pool of this one would not survive.
torch.set_num_threads(1)
FAST = os.environ.get("LIGHTNING_DALLE_NOTEBOOK_FAST", "1") == "1"
UPDATES, LENGTH, RANKS = (6, 512, (1, 2)) if FAST else (60, 2048, (1, 2, 4))
WIDTH, HEADS, VOCABULARY = 64, 4, 32
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## The module
#
# It is written for whole sequences. `sequence_plan` says which entries of a batch are sharded, and along which
# dimension; positions and labels are among them, made of the whole sequence by the data. The loss is a `sequence_mean`,
# which without a strategy is a sum over a count. Attention is torch's own.


# %%
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.projections = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.network = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden):
        projected = self.projections(self.norm(hidden)).unflatten(-1, (3, HEADS, -1))
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(attended.transpose(1, 2).flatten(2))
        return hidden + self.network(hidden)


class Repeater(LightningModule):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(2)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def sequence_plan(self):
        return SequencePlan(batch={"tokens": 1, "positions": 1, "labels": 1}, num_heads=HEADS)

    def training_step(self, batch, batch_idx):
        kept = {}

        def keep(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = self.layers(self.tokens(batch["tokens"]) + self.positions(batch["positions"]))
            logits = self.head(hidden)
            total = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
            loss = sequence_mean(total, (batch["labels"] != -100).sum())
        self.log_dict({"loss": loss, "kept_megabytes": sum(kept.values()) / 1e6})
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def sample(seed):
    """Half a sequence twice; only the second half can be told."""
    half = torch.randint(VOCABULARY, (LENGTH // 2,), generator=torch.Generator().manual_seed(seed))
    tokens = half.repeat(2)
    labels = torch.where(torch.arange(LENGTH) < LENGTH // 2, -100, tokens.roll(-1))
    return {"tokens": tokens, "positions": torch.arange(LENGTH), "labels": labels}


# %% [markdown]
# ## One process, then more


# %%
def train(ranks):
    """Fit with each sequence on so many processes; return the logged rows."""
    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ContextParallelStrategy(context_parallel_degree=ranks),
        callbacks=[ContextParallelMonitor()],
        max_steps=UPDATES,
        log_every_n_steps=1,
        logger=CSVLogger(folder, name=f"ranks_{ranks}", version=0),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Repeater(), DataLoader([sample(seed) for seed in range(4 * UPDATES)], batch_size=4))
    with open(folder / f"ranks_{ranks}" / "version_0" / "metrics.csv") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def column(rows, name):
    return [row[name] for row in rows if name in row]


runs = {ranks: train(ranks) for ranks in RANKS}

# %%
figure, (losses, memory, time) = plt.subplots(1, 3, figsize=(12, 3.5))
for ranks, rows in runs.items():
    losses.plot(column(rows, "loss"), label=f"{ranks} process{'es' * (ranks > 1)}", lw=5 - ranks)
losses.set(title="training loss", xlabel="update")
losses.legend()
kept = [column(rows, "kept_megabytes")[-1] for rows in runs.values()]
memory.plot(RANKS, kept, "o-", label="kept")
memory.plot(RANKS, [kept[0] / ranks for ranks in RANKS], ":", color="gray", label="an equal share")
memory.set(title="MB kept for the backward pass", xlabel="processes", xticks=RANKS, ylim=(0, None))
memory.legend()


def median(rows, name):
    values = sorted(column(rows, name))
    return 1e3 * values[len(values) // 2]


computing = [median(rows, "context_parallel/computing_seconds") for rows in runs.values()]
waiting = [median(rows, "context_parallel/waiting_seconds") for rows in runs.values()]
time.bar(range(len(RANKS)), computing, label="computing")
time.bar(range(len(RANKS)), waiting, bottom=computing, label="waiting")
time.set(title="ms of an update", xlabel="processes", xticks=range(len(RANKS)), xticklabels=RANKS)
time.legend()
plt.tight_layout()
plt.show()
for ranks, rows in runs.items():
    sent = column(rows, "context_parallel/bytes_sent")[-1] / 1e6
    print(f"{ranks}: loss {column(rows, 'loss')[-1]:.5f}, {sent:.2f} MB sent")

# %% [markdown]
# Processes beyond the machine's cores only take turns; memory falls all the same. `attention="ulysses"` or `"usp"`
# trade positions for heads instead of rotating keys and values, with the same losses.
