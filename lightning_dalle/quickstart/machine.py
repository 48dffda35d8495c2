"""What the machine offers, and what a stage took of it."""

import importlib.metadata
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_dalle.ops.hardware import has_fast_bfloat16
from lightning_dalle.quickstart.settings import write_json

_MEBIBYTE = 2**20
_PRODUCT_SIZE = 1024
_PRODUCT_SECONDS = 0.5
_PACKAGES = ("lightning-dalle", "torch", "lightning", "torchmetrics", "open-clip-torch", "tokenizers", "wandb")


def training_precision() -> str:
    """Return the Trainer's precision: bfloat16 where the hardware multiplies matrices fast in it, else 32 bits."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return "bf16-mixed" if has_fast_bfloat16(device) else "32-true"


@dataclass(frozen=True, kw_only=True)
class MachineSpeed:
    """What a machine has to train with, apart from a GPU.

    Args:
        cores: Used at most, a fraction where a container is given less than one.
        core_share: Share of the time of these cores that other processes leave.
        core_gflops: Matrix products in float32, in 1e9 operations a second that a core works for this process.
        load: Processes that want to run, on average over a minute.
    """

    cores: float
    core_share: float
    core_gflops: float
    fast_bfloat16: bool
    load: float

    @property
    def gflops(self) -> float:
        """Of all cores, in the time that they work for this process."""
        return self.cores * self.core_share * self.core_gflops


def measure_speed() -> MachineSpeed:
    """Look at the cores, and time matrix products for a fraction of a second."""
    cores = usable_cores()
    matrix = torch.zeros(_PRODUCT_SIZE, _PRODUCT_SIZE)
    products = 0
    torch.mm(matrix, matrix)
    start, start_of_work = time.monotonic(), time.process_time()
    while (seconds := time.monotonic() - start) < _PRODUCT_SECONDS or not products:
        torch.mm(matrix, matrix)
        products += 1
    work = time.process_time() - start_of_work
    return MachineSpeed(
        cores=cores,
        core_share=min(1.0, work / (seconds * cores)),
        core_gflops=products * 2 * _PRODUCT_SIZE**3 / work / 1e9,
        fast_bfloat16=has_fast_bfloat16("cpu"),
        load=os.getloadavg()[0],
    )


def usable_cores(control_group: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores that torch uses, as far as the system lets this process have them.

    Args:
        control_group: Where Linux tells what a container is limited to.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, torch.get_num_threads(), _control_group_cores(control_group))


def _control_group_cores(folder: Path) -> float:
    """Return the limit in the words of the second version of control groups or of the first; infinity without one."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((folder / name).read_text() for name in names).split()
        except (OSError, ValueError):
            continue
        if quota not in ("max", "-1"):
            return int(quota) / int(period)
    return float("inf")


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
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stages: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}

    def seconds(self, stage: str) -> float:
        """Return what a stage took so far."""
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
    """Return bytes of main memory at most."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
