"""Arrays that are slow to make, kept on disk between runs."""

import logging
import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """`LIGHTNING_DALLE_CACHE`, else `lightning-dalle` in `XDG_CACHE_HOME`, else in `~/.cache`."""
    own = os.environ.get("LIGHTNING_DALLE_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-dalle"


def cached_arrays(
    name: str, build: Callable[[], Mapping[str, np.ndarray]], folder: str | Path | None = None
) -> Mapping[str, np.ndarray]:
    """Return the arrays kept under `name`, built and kept if they are not there.

    The file appears whole or not at all, so processes may race for it. A damaged file is built anew; a folder that
    cannot be written costs a warning and the time to build each run.

    Args:
        name: What the arrays depend on, versions and sizes included: whatever is not in the name is not noticed.
        folder: `cache_folder()` if None.
    """
    path = Path(folder or cache_folder()) / f"{name}.npz"
    try:
        # Opened here, since NumPy leaves a file that it cannot read open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return dict(stored)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        logger.warning("cache file %s cannot be read (%s), it is built anew", path, error)
    arrays = build()
    try:
        _write(path, arrays)
    except OSError as error:
        logger.warning("cache file %s cannot be written (%s); LIGHTNING_DALLE_CACHE names another folder", path, error)
    return arrays


def _write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write beside the target, then rename over it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.close()
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
