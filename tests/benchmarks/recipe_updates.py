"""Updates of the packaged recipes on random inputs of their sizes, as the Trainer makes them."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import lightning_dalle
from lightning_dalle import DiscreteVAEModule, TextToImageModule
from lightning_dalle.commands.recipes import packaged_recipes
from lightning_dalle.data.tokenizer import MIN_VOCABULARY_SIZE, CaptionTokenizer
from tests.benchmarks.timing import clock, seconds_of

CAPTIONS = ("red circle", "blue square above green star", "a yellow triangle moving left slowly")


def small_recipes() -> dict[str, Path]:
    """Those for two CPU cores: all but the paper's."""
    return {name: path for name, path in packaged_recipes().items() if not name.startswith("paper/")}


def read_recipe(path: Path) -> dict[str, Any]:
    recipe: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return recipe


def build_module(path: Path) -> LightningModule:
    """The recipe's module with weights of its start; what earlier stages would bring has random weights."""
    recipe = read_recipe(path)
    arguments = dict(recipe["model"]["init_args"])
    kind = getattr(lightning_dalle, recipe["model"]["class_path"])
    if kind is TextToImageModule:
        discrete_vae = read_recipe(path.with_name("discrete_vae.yaml"))
        arguments["discrete_vae"] = discrete_vae["model"]["init_args"]["network"]
    if kind is TextToImageModule or "text_encoder" in arguments or "text_tokens" in arguments["network"]:
        arguments["tokenizer"] = CaptionTokenizer.train(CAPTIONS, vocabulary_size=MIN_VOCABULARY_SIZE + 32).to_json()
    torch.manual_seed(recipe["seed_everything"])
    module: LightningModule = kind(**arguments)
    if isinstance(module, DiscreteVAEModule) and module.network.decoder.patch is not None:
        # Else it would ask for training images to start from.
        nn.init.normal_(module.network.decoder.patch.w)
    return module


def random_batch(path: Path) -> dict[str, Any]:
    """A batch of the sizes of the recipe's data."""
    sizes = read_recipe(path)["data"]["init_args"]
    count, generator = sizes["batch_size"], torch.Generator().manual_seed(0)
    captions = [CAPTIONS[number % len(CAPTIONS)] for number in range(count)]
    if "frames" in sizes:
        size = sizes["frames"], sizes.get("height", 32), sizes.get("width", 32)
        return {"caption": captions, "video": _noise((count, 3, *size), generator)}
    return {"caption": captions, "image": _noise((count, 3, sizes["image_size"], sizes["image_size"]), generator)}


def _noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(256, shape, generator=generator, dtype=torch.uint8)


@dataclass
class UpdateTimes(Callback):
    """Seconds of each update, and of something else that is run after it.

    Args:
        beside: Run after each update, and timed.
    """

    beside: Callable[[], object]
    updates: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    _start: float = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = clock()

    def on_train_batch_end(self, *_: Any) -> None:
        self.updates.append(clock() - self._start)
        self.others.append(seconds_of(self.beside))

    def medians(self) -> tuple[float, float]:
        """Of the updates and of the others, without the first of each, which starts cold."""
        return statistics.median(self.updates[1:]), statistics.median(self.others[1:])


def train(path: Path, precision: str, rounds: int, callbacks: Iterable[Callback]) -> None:
    """Train for `rounds` + 1 updates of the recipe, with its clipping, optimizer and schedule, and without logs."""
    settings = read_recipe(path)["trainer"]
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        precision=precision,  # type: ignore[arg-type]
        max_steps=rounds + 1,
        gradient_clip_val=settings.get("gradient_clip_val"),
        limit_val_batches=0,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches: Any = [random_batch(path)] * (rounds + 1)
    trainer.fit(build_module(path), DataLoader(batches, batch_size=None))


def count_operations(path: Path) -> int:
    """Floating-point operations of the products and convolutions of one update in 32 bits."""
    counter = FlopCounterMode(display=False)
    with counter:
        train(path, "32-true", 0, ())
    return counter.get_total_flops()
