"""Settings of the whole suite: shapes are checked, W&B writes to a temporary folder, and a test that leaks fails.

Workers of pytest-xdist run tests at the same time, so each stands in a folder of its own: a file with a relative path
belongs to the test that left it, and never to one beside it.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jaxtyping import install_import_hook

from tests import shape_checks
from tests.leaks import Surroundings, files_in

# Before any test module imports the package.
install_import_hook("lightning_dalle", f"{shape_checks.__name__}.typechecker")

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session", autouse=True)
def _quiet_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps logs, caches and threads of third parties out of the way; subprocesses inherit it."""
    folder = tmp_path_factory.mktemp("environment")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "MPLCONFIGDIR"):
            patch.setenv(name, str(folder / name.lower()))
            (folder / name.lower()).mkdir()
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("MPLBACKEND", "agg")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        patch.setenv("OMP_NUM_THREADS", "1")
        # LightningCLI calls what jsonargparse 5 will drop; the version range excludes that.
        patch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
        torch.set_num_threads(1)
        (folder / "working").mkdir()
        patch.chdir(folder / "working")
        yield


@pytest.fixture(scope="session", autouse=True)
def _repository_left_alone() -> Iterator[None]:
    """Fails a run that leaves a file in the repository: who writes there by an absolute path cannot be told."""
    before = files_in(REPOSITORY)
    yield
    assert sorted(files_in(REPOSITORY) - before) == [], "a test of this run left files in the repository"


@pytest.fixture(autouse=True)
def _no_leaks(_quiet_environment: None) -> Iterator[None]:
    """Fails a test that leaves a process group, a thread, a variable or a file in the working folder behind."""
    folder = Path.cwd()
    before = Surroundings.now(folder)
    yield
    leaks = before.leaks_since(folder)
    if leaks:
        pytest.fail("this test leaked " + "; ".join(leaks), pytrace=False)
