"""`quickstart`: its arguments are those of the function."""

import sys

from jsonargparse import auto_cli

from lightning_dalle.quickstart.pipeline import run_quickstart


def main() -> None:
    """Run the whole recipe, or explain what is wrong with its arguments."""
    try:
        auto_cli(run_quickstart, args=sys.argv[2:], as_positional=False, prog="lightning-dalle quickstart")
    except (ModuleNotFoundError, ValueError) as error:
        print(f"lightning-dalle quickstart: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
