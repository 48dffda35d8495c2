"""`tokenizer`: byte-pair merges learned from the training captions of a recipe's data."""

import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser as TypedParser

import lightning_dalle
from lightning_dalle.commands.recipes import find_recipe
from lightning_dalle.data.base import CaptionedDataModule
from lightning_dalle.data.tokenizer import CaptionTokenizer


def main() -> None:
    """Train the tokenizer that the command line asks for."""
    parser = _parser()
    arguments = parser.parse_args(sys.argv[2:])
    try:
        recipe = yaml.safe_load(find_recipe(arguments.config).read_text(encoding="utf-8")) or {}
        captions = data_of_recipe(recipe).captions("train")
        vocabulary_size = arguments.vocabulary_size or vocabulary_size_of_recipe(recipe)
        tokenizer = CaptionTokenizer.train(captions, vocabulary_size)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(arguments.output)
    print(f"{arguments.output}: {tokenizer.vocabulary_size} words from {len(captions)} captions")


def data_of_recipe(recipe: Mapping[str, Any]) -> CaptionedDataModule:
    """Return the data module of a recipe, without the tokenizer that is still to be trained.

    Raises:
        ValueError: If the recipe has no `data`.
        SystemExit: If its `data` cannot be built, after a message that names the argument.
    """
    if "class_path" not in recipe.get("data", {}):
        raise ValueError(
            "config must have a section `data` with the class_path of the data module whose captions count"
        )
    for name in lightning_dalle.__all__:
        getattr(lightning_dalle, name)
    settings = {name: value for name, value in recipe["data"].get("init_args", {}).items() if name != "tokenizer"}
    parser = TypedParser(prog="lightning-dalle tokenizer")
    parser.add_subclass_arguments(CaptionedDataModule, "data", required=True)
    data = {"class_path": recipe["data"]["class_path"], "init_args": settings}
    data_module: CaptionedDataModule = parser.instantiate(parser.parse_object({"data": data})).data
    return data_module


def vocabulary_size_of_recipe(recipe: Mapping[str, Any]) -> int:
    """Return what the recipe's model has room for, else the paper's 16,384."""
    model = recipe.get("model", {}).get("init_args", {})
    sizes = {**model.get("text_encoder", {}), **model.get("network", {})}
    return int(sizes.get("text_vocabulary_size", sizes.get("vocabulary_size", 16384)))


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="lightning-dalle tokenizer",
        description="Train a byte-pair tokenizer on the training captions of a recipe's data.",
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--config", required=True, help="recipe, a file or a name; its section `data` has the captions")
    parser.add_argument("--output", type=Path, default=Path("tokenizer.json"), help="file to write")
    parser.add_argument("--vocabulary-size", type=int, help="words at most, if not as many as the recipe's model takes")
    return parser
