"""Pictures of a finished training: drawn for captions, ranked, and reconstructed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from lightning_dalle.commands.sample import rank_best_first
from lightning_dalle.data.base import CaptionedDataModule
from lightning_dalle.lightning_modules.contrastive_module import ContrastiveModule
from lightning_dalle.lightning_modules.discrete_vae_module import DiscreteVAEModule
from lightning_dalle.lightning_modules.text_to_image_module import TextToImageModule
from lightning_dalle.lightning_modules.video_dit_module import VideoDiTModule
from lightning_dalle.quickstart.settings import RunFolder, Sampling

MAX_BATCH = 256


@dataclass(frozen=True)
class Models:
    """What the stages of training have left, ready to use."""

    discrete_vae: DiscreteVAEModule
    contrastive: ContrastiveModule
    text_to_image: TextToImageModule

    @classmethod
    def load(cls, folder: RunFolder) -> "Models":
        """Read the final checkpoints."""
        return cls(
            load_final(DiscreteVAEModule, folder, "discrete_vae"),
            load_final(ContrastiveModule, folder, "contrastive"),
            load_final(TextToImageModule, folder, "text_to_image"),
        )


def load_final(kind: Any, folder: RunFolder, stage: str) -> Any:
    """Return the trained module of a stage, ready to use."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return kind.load_from_checkpoint(folder.checkpoint(stage), map_location=device, weights_only=True).eval()


@dataclass(frozen=True)
class RankedPictures:
    """Candidates of captions, best first by the reranker if there is one; clips have frames before height and width."""

    captions: list[str]
    images: UInt8[Tensor, "captions candidates 3 *size"]
    scores: Float[Tensor, "captions candidates"] | None

    @property
    def repeated_captions(self) -> list[str]:
        """The caption of each candidate, in the order of `images.flatten(0, 1)`."""
        return [caption for caption in self.captions for _ in range(self.images.shape[1])]

    def bear_caption(self, nearest: Int[Tensor, " pictures"], all_captions: Sequence[str]) -> Tensor:
        """Return whether the sample nearest to each candidate bears its caption, [captions, candidates].

        Args:
            nearest: Index in the set, in the order of `images.flatten(0, 1)`.
        """
        pairs = zip(nearest.tolist(), self.repeated_captions, strict=True)
        return torch.tensor([all_captions[index] == caption for index, caption in pairs]).unflatten(
            0, self.images.shape[:2]
        )

    @property
    def best(self) -> UInt8[Tensor, "captions 3 *size"]:
        """The picture of each caption that the reranker likes most."""
        return self.images[:, 0]


def draw_ranked(models: Models, captions: Sequence[str], sampling: Sampling) -> RankedPictures:
    """Draw candidates of each caption and put them in the order of their cosine with it; equal ones stay in theirs."""
    candidates = models.text_to_image.generate(
        captions,
        sampling.candidates,
        **sampling.distribution,
        generator=torch.Generator().manual_seed(sampling.seed),
    ).cpu()
    image_features = models.contrastive.encode_images(candidates.flatten(0, 1)).unflatten(0, candidates.shape[:2])
    text_features = models.contrastive.encode_captions(captions)
    cosines = torch.einsum("pcf,pf->pc", image_features, text_features).cpu()
    return RankedPictures(list(captions), *rank_best_first(candidates, cosines))


def draw_clips(module: VideoDiTModule, captions: Sequence[str], sampling: Sampling) -> RankedPictures:
    """Draw clips of each caption, in no order."""
    generator = torch.Generator().manual_seed(sampling.seed)
    clips = module.generate(captions, sampling.candidates, **sampling.distribution, generator=generator).cpu()
    return RankedPictures(list(captions), clips, scores=None)


def reconstruct(
    discrete_vae: DiscreteVAEModule, images: UInt8[Tensor, "images 3 height width"]
) -> UInt8[Tensor, "images 3 height width"]:
    """Images through the code and back."""
    with torch.inference_mode():
        chunks = [chunk.to(discrete_vae.device) for chunk in images.split(MAX_BATCH)]
        return torch.cat([discrete_vae.decode(discrete_vae.encode(chunk)).cpu() for chunk in chunks]).clone()


def split_samples(
    data: CaptionedDataModule, split: str, most: int | None = None
) -> tuple[UInt8[Tensor, "samples 3 *size"], list[str]]:
    """Images or clips of a split, evenly spaced in it, and their captions; all of them by default."""
    dataset = data.dataset(split)
    count = len(dataset) if most is None else min(most, len(dataset))
    samples = [dataset[index * len(dataset) // count] for index in range(count)]
    kind = "video" if "video" in samples[0] else "image"
    return torch.stack([sample[kind] for sample in samples]), [sample["caption"] for sample in samples]


def training_prompts(data: CaptionedDataModule, sampling: Sampling) -> list[str]:
    """Return captions of the training set, chosen by the seed."""
    captions = sorted(set(data.captions("train")))
    return random.Random(sampling.seed).sample(captions, min(sampling.num_prompts, len(captions)))
