"""Whether an update of each small recipe takes about as long as its arithmetic, beside a float32 product.

    python -m tests.benchmarks.recipe_budgets

Each recipe's module is trained for a few updates on random inputs of the recipe's sizes, in the precision that the
quickstart would choose. After each update a float32 product is timed. What is held against a budget is the time of an
update over the time that products of the same number of operations would take. So it hardly depends on the machine, nor
on sizes that a recipe changes; where it does, `--renew` prints `RATIOS` anew. If a part is computed in a number format
that the CPU has no instructions for, an update takes several times as long, and the command fails and names the recipe.

No part of `make test`: what it holds against a budget is a time, if a relative one.
"""

import argparse
import logging
import sys
import warnings

import torch
from rich.console import Console

from lightning_dalle.quickstart.machine import training_precision
from tests.benchmarks.recipe_updates import UpdateTimes, count_operations, small_recipes, train
from tests.benchmarks.table import Table, milliseconds

RATIOS = {
    "animated_emoji/video_dit": 1.8,
    "moving_shapes/video_autoencoder": 1.3,
    "moving_shapes/video_dit": 1.7,
    "openmoji/contrastive": 2.9,
    "openmoji/discrete_vae": 2.8,
    "openmoji/text_to_image": 1.7,
    "shapes/contrastive": 3.1,
    "shapes/discrete_vae": 5.7,
    "shapes/text_to_image": 1.9,
}
"""What was measured, in float32 on one thread."""
ALLOWANCE = 2.5
"""How many times that is borne: other machines and busy ones differ by less, a slow number format by more."""
SIDE = 768
OPERATIONS_OF_PRODUCT = 2 * SIDE**3
PRODUCTS = 8
"""Timed together after each update: one alone would be over before a busy machine shows."""


def complaint(name: str, ratio: float) -> str | None:
    """What is wrong with a recipe whose updates take `ratio` times as long as products of as many operations."""
    if name not in RATIOS:
        return f"{name} has no budget; run `python -m tests.benchmarks.recipe_budgets --renew {name}`"
    budget = ALLOWANCE * RATIOS[name]
    if ratio <= budget:
        return None
    return (
        f"{name}: an update takes {ratio:.1f} times as long as float32 products of as many operations, above its "
        f"budget of {budget:.1f}; look for a part that is computed in a slow number format (docs/number_formats.md)"
    )


def measure(name: str, precision: str, rounds: int) -> tuple[UpdateTimes, int]:
    """Times of updates and products in turn, and the operations of an update."""
    path, matrix = small_recipes()[name], torch.randn(SIDE, SIDE)
    times = UpdateTimes(lambda: [matrix @ matrix for _ in range(PRODUCTS)])
    train(path, precision, rounds, [times])
    return times, count_operations(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help="such as shapes/discrete_vae; all small ones if none is given")
    parser.add_argument("--rounds", type=int, default=3, help="updates of each recipe, after one that does not count")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", default=training_precision(), help="if not what the quickstart would choose")
    parser.add_argument("--renew", action="store_true", help="print RATIOS as measured, and hold nothing against them")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in ("lightning.pytorch", "lightning_dalle"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    table = Table(
        "Updates of the small recipes",
        f"{arguments.precision}, {arguments.threads} threads, {torch.backends.cpu.get_cpu_capability()}. A product is "
        f"of two float32 matrices of {SIDE} x {SIDE}.",
        ("recipe", "update ms", "product ms", "products an update", "of its operations", "ratio", "budget"),
    )
    complaints, ratios = [], {}
    for name in arguments.recipes or small_recipes():
        times, operations = measure(name, arguments.precision, arguments.rounds)
        update, products = times.medians()
        product = products / PRODUCTS
        least = operations / OPERATIONS_OF_PRODUCT
        ratios[name] = update / product / least
        complaints.append(complaint(name, ratios[name]))
        budget = f"{ALLOWANCE * RATIOS[name]:.1f}" if name in RATIOS else ""
        numbers = f"{update / product:.0f}", f"{least:.0f}", f"{ratios[name]:.1f}", budget
        table.rows.append((name, milliseconds(update), milliseconds(product), *numbers))
    table.show(Console(width=120))
    if arguments.renew:
        print("RATIOS = {", *(f'    "{name}": {ratio:.1f},' for name, ratio in ratios.items()), "}", sep="\n")
        return 0
    wrong = [complaint for complaint in complaints if complaint is not None]
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
