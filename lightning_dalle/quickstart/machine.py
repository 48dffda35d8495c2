"""What the machine offers, and what a stage took of it."""

import importlib.metadata
import json
import platform
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_dalle.ops.hardware import has_fast_bfloat16
from lightning_dalle.quickstart.settings import write_json

_MEBIBYTE = 2**20
_PACKAGES = ("lightning-dalle", "torch", "lightning", "torchmetrics", "open-clip-torch", "tokenizers", "wandb")


def training_precision() -> str:
    """The Trainer's precision: bfloat16 where the hardware multiplies matrices fast in it, else 32 bits."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return "bf16-mixed" if has_fast_bfloat16(device) else "32-true"


def describe_machine() -> dict[str, str]:
    """Versions and hardware, for the report."""
    versions = {package: importlib.metadata.version(package) for package in _PACKAGES}
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "python": platform.python_version(),
        **versions,
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
        **gpu,
    }


class StageLog:
    """Seconds and peak memory of each stage, over all attempts at it, kept in a file.

    Args:
        path: Of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stages: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}

    def seconds(self, stage: str) -> float:
        """What a stage took so far."""
        return float(self.stages.get(stage, {}).get("seconds", 0.0))

    @contextmanager
    def measured(self, stage: str, last_sign_of_life: float | None = None) -> Iterator[None]:
        """Measure an attempt at a stage.

        Args:
            last_sign_of_life: Time of the last thing that an earlier attempt wrote. One that was killed did not write
                how long it took.
        """
        entry = self.stages.setdefault(stage, {"seconds": 0.0, "peak_memory_mib": 0, "attempts": 0})
        if "started" in entry and last_sign_of_life is not None:
            entry["seconds"] += max(0.0, last_sign_of_life - entry["started"])
        entry["attempts"] += 1
        entry["started"] = time.time()
        write_json(self.path, self.stages)
        _forget_peak_memory()
        start = time.monotonic()
        try:
            yield
        finally:
            entry.pop("started")
            entry["seconds"] = round(entry["seconds"] + time.monotonic() - start, 2)
            entry["peak_memory_mib"] = max(entry["peak_memory_mib"], round(_peak_memory() / _MEBIBYTE))
            write_json(self.path, self.stages)


def _forget_peak_memory() -> None:
    """Let the peak count from here; where the system cannot (it is Linux that can), it counts from the start."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _peak_memory() -> int:
    """Bytes of main memory at most."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
