"""Somebody else's language models, whose sequences are sharded, and runs of them on ranks."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_dalle import ContextParallelStrategy, SequencePlan, sequence_mean
from tests.distributed.toy_module import trainer_of, whole_state

VOCABULARY, WIDTH, HEADS, SAMPLES = 11, 16, 4, 4
# Divisible by no number of ranks.
LENGTH = 37


class Layer(nn.Module):
    """Attention and a small network, with dropout as people write it."""

    def __init__(self, causal: bool, dropout: float) -> None:
        super().__init__()
        self.causal, self.dropout = causal, dropout
        self.norm = nn.LayerNorm(WIDTH)
        self.projections = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        probability = self.dropout if self.training else 0.0
        projected = self.projections(self.norm(hidden)).unflatten(-1, (3, HEADS, -1))
        query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
        attended = scaled_dot_product_attention(query, key, value, is_causal=self.causal, dropout_p=probability)
        hidden = hidden + dropout(self.output(attended.transpose(1, 2).flatten(2)), probability, self.training)
        return hidden + self.fc2(self.fc1(hidden).relu())


class LayerSharded(LightningModule):
    """Numbers its positions itself and takes the loss of all logits; sequences are sharded for its layers alone."""

    def __init__(self, causal: bool = True, dropout: float = 0.0, recompute: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(seed)
        self.recompute = recompute
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(causal, dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.losses: list[float] = []

    def sequence_plan(self) -> SequencePlan:
        return SequencePlan(inputs={"layers.0": {"hidden": 1}}, outputs={"layers.1": 1}, num_heads=HEADS)

    def number(self, batch: Mapping[str, Tensor]) -> Tensor:
        return torch.arange(batch["tokens"].shape[1])

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        hidden = self.tokens(batch["tokens"]) + self.positions(self.number(batch))
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.recompute else layer(hidden)
        return self.head(hidden)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(self(batch).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch["tokens"]))

    test_step = validation_step

    def predict_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Unlike Adam's, its steps tell a gradient from a multiple of it.
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class BatchSharded(LayerSharded):
    """Sees local shards from the batch on, which has positions and labels; its loss is a mean over the sequence."""

    def sequence_plan(self) -> SequencePlan:
        return SequencePlan(
            batch={"tokens": 1, "labels": 1, "positions": 1},
            predictions=1,
            document_ids="document_ids",
            num_heads=HEADS,
        )

    def number(self, batch: Mapping[str, Tensor]) -> Tensor:
        return batch["positions"]

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        total = cross_entropy(self(batch).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        return sequence_mean(total, (batch["labels"] != -100).sum())


class Foreign(LayerSharded):
    """`BatchSharded` without anything of this package: what it must equal on one process."""

    def number(self, batch: Mapping[str, Tensor]) -> Tensor:
        return batch["positions"]

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        seen = batch["document_ids"].unsqueeze(-1) == batch["document_ids"].unsqueeze(-2)
        self.mask = (seen & torch.ones_like(seen).tril()).unsqueeze(1)
        hidden = self.tokens(batch["tokens"]) + self.positions(self.number(batch))
        for layer in self.layers:
            query, key, value = (
                layer.projections(layer.norm(hidden)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            )
            attended = scaled_dot_product_attention(query, key, value, attn_mask=self.mask)
            hidden = hidden + layer.output(attended.transpose(1, 2).flatten(2))
            hidden = hidden + layer.fc2(layer.fc1(hidden).relu())
        return self.head(hidden)


def batches(num_batches: int, rank: int, world_size: int, length: int = LENGTH, start: int = 0) -> DataLoader[Any]:
    """The samples of a rank among those that get different ones."""
    data: Any = []
    share = SAMPLES // world_size
    for number in range(start, start + num_batches):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(VOCABULARY, (SAMPLES, length), generator=generator)
        labels = (tokens + tokens.roll(1, 1)) % VOCABULARY
        # Labels at the end alone, so that some ranks have few or none.
        labels[:, : 2 * length // 3] = -100
        starts = torch.tensor([[length // 4], [length // 2], [length - 9], [1]]) + number % 8
        document_ids = (torch.arange(length) >= starts).long()
        positions = torch.arange(length).expand(SAMPLES, length)
        mine = slice(rank * share, (rank + 1) * share)
        entries = {"tokens": tokens, "labels": labels, "document_ids": document_ids, "positions": positions}
        data.append({name: entry[mine].clone() for name, entry in entries.items()})
    return DataLoader(data, batch_size=None)


def fit_on_rank(
    rank: int,
    world_size: int,
    settings: dict[str, Any],
    module: LayerSharded,
    num_batches: int = 20,
    start: int = 0,
    ckpt_path: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train on this rank's samples and return what came of it."""
    os.environ["LOCAL_RANK"] = str(rank)
    strategy = ContextParallelStrategy(**settings)
    assert strategy.context_parallel is not None
    degree = strategy.context_parallel.degree
    size = world_size if degree == "auto" else degree
    trainer = trainer_of(world_size, strategy, **options)
    loader = batches(num_batches, rank // size, world_size // size, start=start)
    trainer.fit(module, loader, loader, ckpt_path=ckpt_path)
    return {
        "losses": module.losses,
        "state": whole_state(module),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "sampler": strategy.distributed_sampler_kwargs,
    }


def fit_alone(module: LayerSharded, num_batches: int = 20, **options: Any) -> dict[str, Any]:
    """Train in one process, by Lightning alone."""
    loader = batches(num_batches, 0, 1)
    trainer_of(1, "auto", **options).fit(module, loader, loader)
    return {"losses": module.losses, "state": whole_state(module)}


def mean_losses(ranks: list[dict[str, Any]]) -> list[float]:
    return [sum(losses) / len(ranks) for losses in zip(*(answer["losses"] for answer in ranks), strict=True)]
