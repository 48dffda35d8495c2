"""What a test may leave behind: nothing."""

import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

# Set by seed_everything: no leak, but put back, since Lightning seeds the ranks of later tests by them.
_SEEDS = {"PL_GLOBAL_SEED", "PL_SEED_WORKERS"}
# Set by pytest for each phase, and by libraries once when they are first imported.
_ALLOWED_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
}
_TOOL_FOLDERS = {
    ".git",
    ".hypothesis",
    ".import_linter_cache",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    "__pycache__",
}
_GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class Surroundings:
    """The state around a test at one moment."""

    variables: dict[str, str]
    threads: set[int]
    files: set[str]

    @classmethod
    def now(cls, folder: Path) -> "Surroundings":
        """What is there now; `folder` is looked at without its subfolders."""
        return cls(dict(os.environ), {id(thread) for thread in _living_threads()}, files_in(folder))

    def leaks_since(self, folder: Path) -> list[str]:
        """What came since, in words. Variables and the process group are also put back: one test fails, not all."""
        return [
            *_leaked_process_group(),
            *self._leaked_threads(),
            *self._leaked_variables(),
            *(f"the file {name}" for name in sorted(files_in(folder) - self.files)),
        ]

    def _leaked_threads(self) -> list[str]:
        deadline = time.monotonic() + _GRACE_SECONDS
        while leaked := [thread for thread in _living_threads() if id(thread) not in self.threads]:
            if time.monotonic() > deadline:
                return [f"the thread {thread.name}" for thread in leaked]
            leaked[0].join(timeout=0.05)
        return []

    def _leaked_variables(self) -> list[str]:
        names = set(os.environ) ^ set(self.variables)
        names |= {name for name, value in self.variables.items() if os.environ.get(name, value) != value}
        for name in names - _ALLOWED_VARIABLES:
            os.environ.pop(name, None)
            if name in self.variables:
                os.environ[name] = self.variables[name]
        return [f"the environment variable {name}" for name in sorted(names - _ALLOWED_VARIABLES - _SEEDS)]


def files_in(folder: Path) -> set[str]:
    """Names in a folder, without those of tools that run the tests."""
    return set(os.listdir(folder)) - _TOOL_FOLDERS


def _living_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if not thread.daemon]


def _leaked_process_group() -> list[str]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    distributed.destroy_process_group()
    return ["a process group"]
