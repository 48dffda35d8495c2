"""The command `lightning-dalle`: which subcommand lives where. Nothing heavy is imported before one is chosen."""

import importlib
import sys

import lightning_dalle
from lightning_dalle.commands.recipes import packaged_recipes

_MODULE_OF = {
    "fetch": "lightning_dalle.commands.fetch",
    "fit": "lightning_dalle.commands.trainer",
    "predict": "lightning_dalle.commands.trainer",
    "quickstart": "lightning_dalle.quickstart.pipeline",
    "sample": "lightning_dalle.commands.sample",
    "test": "lightning_dalle.commands.trainer",
    "tokenizer": "lightning_dalle.commands.tokenizer",
    "validate": "lightning_dalle.commands.trainer",
}

_HELP = """\
usage: lightning-dalle COMMAND ...

the whole recipe:
  quickstart   from captions to ranked and scored pictures on two CPU cores, with a report

one stage, from a recipe (--config RECIPE.yaml; then any value by its name, as --trainer.max_steps 10):
  fit          train a module
  validate     evaluate it on the validation set
  test         evaluate it on the test set
  predict      run its predict_step

around it:
  fetch        fetch a data set that no package brings
  tokenizer    train a tokenizer on the captions of a recipe's data
  sample       draw pictures for captions from a trained checkpoint

"lightning-dalle COMMAND --help" lists the arguments of each; "lightning-dalle --version" is {version}.

recipes of the package, by the name that --config takes:
{recipes}
"""


def main() -> None:
    """Run the subcommand that the command line names.

    Raises:
        SystemExit: With status 2 if there is no such subcommand.
    """
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in {"-h", "--help"}:
        print(_help(), end="")
    elif name == "--version":
        print(lightning_dalle.__version__)
    elif name in _MODULE_OF:
        importlib.import_module(_MODULE_OF[name]).main()
    else:
        print(f"lightning-dalle: unknown command {name!r}; it is one of {', '.join(_MODULE_OF)}", file=sys.stderr)
        raise SystemExit(2)


def _help() -> str:
    recipes = "\n".join(f"  {name}" for name in packaged_recipes())
    return _HELP.format(version=lightning_dalle.__version__, recipes=recipes)


if __name__ == "__main__":
    main()
