"""`quickstart`: its arguments are those of the function."""

import sys

from jsonargparse import auto_cli

from lightning_dalle.quickstart.pipeline import run_quickstart


def main() -> None:
    """Run the whole recipe."""
    auto_cli(run_quickstart, args=sys.argv[2:], as_positional=False, prog="lightning-dalle quickstart")
