"""`sample`: pictures for captions, from a trained text-to-image checkpoint, the best first if there is a reranker."""

import json
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import TypeVar

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torchvision.utils import make_grid, save_image

from lightning_dalle.lightning_modules.contrastive_module import ContrastiveModule
from lightning_dalle.lightning_modules.text_to_image_module import TextToImageModule

Loaded = TypeVar("Loaded", TextToImageModule, ContrastiveModule)


def main() -> None:
    """Draw the pictures that the command line asks for."""
    parser = _parser()
    arguments = parser.parse_args(sys.argv[2:])
    for name in ("checkpoint", "reranker"):
        path = getattr(arguments, name)
        if path is not None and not path.is_file():
            parser.error(f"argument --{name}: there is no file {path}")
    # Everything that may be wrong with the arguments comes before drawing, which takes long.
    _check_device_and_folder(parser, arguments)
    module = _load(parser, TextToImageModule, "checkpoint", arguments)
    reranker = None if arguments.reranker is None else _load(parser, ContrastiveModule, "reranker", arguments)
    try:
        images = module.generate(
            arguments.captions,
            num_candidates=arguments.num_candidates,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            guidance_scale=arguments.guidance_scale,
            generator=torch.Generator().manual_seed(arguments.seed),
        )
    except ValueError as error:
        parser.error(str(error))
    scores = None
    if reranker is not None:
        images, scores = rank_best_first(images, _scores(reranker, images, arguments.captions))
    print(_save(images, scores, arguments))


def _check_device_and_folder(parser: ArgumentParser, arguments: Namespace) -> None:
    try:
        torch.empty(0, device=arguments.device)
    except (AssertionError, RuntimeError) as error:
        parser.error(f"argument --device: {arguments.device!r} cannot be used: {_first_line(error)}")
    try:
        torch.Generator().manual_seed(arguments.seed)
    except (OverflowError, RuntimeError, ValueError):
        parser.error(f"argument --seed: {arguments.seed} must be a number of 64 bits")
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --output: {arguments.output} cannot be a folder: {error.strerror}")


def _load(parser: ArgumentParser, kind: type[Loaded], name: str, arguments: Namespace) -> Loaded:
    """Return the module of a checkpoint; what is none ends the command with one sentence."""
    path = getattr(arguments, name)
    try:
        return kind.load_from_checkpoint(path, map_location=arguments.device, weights_only=True).eval()
    # Whatever files of others lack, or hold that is no tensor.
    except (AttributeError, EOFError, KeyError, OSError, RuntimeError, TypeError, UnpicklingError, ValueError) as error:
        parser.error(f"argument --{name}: {path} is no checkpoint of a {kind.__name__}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def rank_best_first(
    images: UInt8[Tensor, "captions candidates 3 height width"], scores: Float[Tensor, "captions candidates"]
) -> tuple[UInt8[Tensor, "captions candidates 3 height width"], Float[Tensor, "captions candidates"]]:
    """Candidates of each caption from the highest score to the lowest; equal ones keep their order."""
    ranked = scores.sort(dim=1, descending=True, stable=True)
    order: Int[Tensor, "captions candidates"] = ranked.indices
    return images[torch.arange(len(images)).unsqueeze(1), order.to(images.device)], ranked.values


def _scores(
    reranker: ContrastiveModule, images: UInt8[Tensor, "captions candidates 3 height width"], captions: Sequence[str]
) -> Float[Tensor, "captions candidates"]:
    with torch.inference_mode():
        pairs = zip(images, captions, strict=True)
        return torch.stack([reranker.score(candidates, [caption])[:, 0] for candidates, caption in pairs])


def _save(
    images: UInt8[Tensor, "captions candidates 3 height width"],
    scores: Float[Tensor, "captions candidates"] | None,
    arguments: Namespace,
) -> Path:
    """Write `grid.png`, a caption a row, and `samples.json` with the captions and scores in the grid's order."""
    arguments.output.mkdir(parents=True, exist_ok=True)
    grid = make_grid(images.flatten(0, 1).cpu(), nrow=images.shape[1])
    save_image(grid / 255, arguments.output / "grid.png")
    rows = [{"caption": caption} for caption in arguments.captions]
    if scores is not None:
        rows = [{**row, "scores": best.tolist()} for row, best in zip(rows, scores, strict=True)]
    (arguments.output / "samples.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return arguments.output / "grid.png"


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="lightning-dalle sample",
        description="Draw pictures for captions: a row of candidates for each, in OUTPUT/grid.png.",
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="of a TextToImageModule")
    parser.add_argument("--captions", nargs="+", required=True, metavar="CAPTION", help="each in quotes")
    parser.add_argument("--num-candidates", type=int, default=8, help="pictures for each caption")
    parser.add_argument("--reranker", type=Path, help="checkpoint of a ContrastiveModule that puts the best first")
    parser.add_argument("--output", type=Path, default=Path("runs/sample"), help="folder")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the softmax over image tokens")
    parser.add_argument("--top-k", type=int, help="draw among this many most probable tokens only")
    parser.add_argument("--top-p", type=float, help="draw among the most probable tokens of this share only")
    parser.add_argument("--guidance-scale", type=float, default=1.0, help="above 1 follows the caption more closely")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same pictures")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to draw")
    return parser
