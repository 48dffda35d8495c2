"""Packages that only an extra installs."""

import importlib
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """Import a package that an extra of this distribution brings.

    Called where the package is used, never at import: every module imports with the required dependencies alone.

    Args:
        module: Name as in an import statement, submodules included.
        extra: The extra of `lightning-dalle` that lists the package.

    Raises:
        ModuleNotFoundError: If the package is not installed. A package that is there and fails to import raises its own
            error, unchanged.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"this needs the package {module}, which is not installed: pip install 'lightning-dalle[{extra}]'",
            name=error.name,
        ) from error
