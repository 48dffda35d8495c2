"""`fit`, `validate`, `test` and `predict`: LightningCLI with this suite's classes known by their short names."""

import sys
from collections.abc import Sequence

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

import lightning_dalle
from lightning_dalle.commands.recipes import find_recipe


class SuiteCLI(LightningCLI):
    """LightningCLI for any module and data module, those of this suite or somebody else's.

    Checkpoints stay as the modules write them: hyper-parameters are plain mappings that `load_from_checkpoint` reads
    with `weights_only=True`, not the command line's configuration.

    Args:
        arguments: As on the command line, the subcommand first.
        run: Whether to call the subcommand, or only to build `model`, `datamodule` and `trainer`; then `arguments` has
            no subcommand.
    """

    def __init__(self, arguments: Sequence[str], run: bool = True) -> None:
        for name in lightning_dalle.__all__:
            getattr(lightning_dalle, name)
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            seed_everything_default=0,
            # A rerun or a resumed run writes its configuration over the earlier one.
            save_config_kwargs={"overwrite": True},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_kwargs={"allow_abbrev": False, **{name: {"allow_abbrev": False} for name in self.subcommands()}},
            args=list(arguments),
            run=run,
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse what was given, also from within Python, where the base class warns about it."""
        try:
            self.config = parser.parse_args(_with_recipes_found(args))  # type: ignore[arg-type]
        except FileNotFoundError as error:
            parser.error(str(error))

    def instantiate_classes(self) -> None:
        """Build module, data and Trainer; a setting that one of them refuses is an error of the command line."""
        try:
            super().instantiate_classes()
        except (OSError, TypeError, ValueError) as error:
            # With JSONARGPARSE_DEBUG in the environment this raises, and so shows where.
            self.parser.error(str(_first_cause(error)), error)

    def _parse_ckpt_path(self) -> None:
        """Leave the configuration alone: hyper-parameters in these checkpoints name no class to build from them."""


def main() -> None:
    """Run the subcommand of the command line."""
    SuiteCLI(sys.argv[1:])


def _first_cause(error: BaseException) -> BaseException:
    """Return what was raised first; jsonargparse wraps it once for each level of the configuration."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _with_recipes_found(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with packaged recipes after `--config` replaced by their files."""
    found = list(arguments)
    for place, argument in enumerate(found):
        if argument in {"-c", "--config"} and place + 1 < len(found):
            found[place + 1] = str(find_recipe(found[place + 1]))
        elif argument.startswith("--config="):
            found[place] = f"--config={find_recipe(argument.removeprefix('--config='))}"
    return found
