import contextlib
import importlib.metadata
import json
import os
import time
from pathlib import Path

import pytest
import torch

from lightning_dalle.quickstart import machine
from lightning_dalle.quickstart.machine import (
    StageLog,
    describe_machine,
    measure_speed,
    training_precision,
    usable_cores,
)
from tests.unit.quickstart.clocks import Clock


@pytest.mark.parametrize(("fast", "precision"), [(True, "bf16-mixed"), (False, "32-true")])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_precision_depends_on_the_device_that_trains(
    monkeypatch: pytest.MonkeyPatch, device: str, fast: bool, precision: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    monkeypatch.setattr(machine, "has_fast_bfloat16", lambda asked: fast if asked == device else not fast)
    assert training_precision() == precision


def test_the_machine_is_described_with_versions() -> None:
    described = describe_machine()
    assert described["torch"] == importlib.metadata.version("torch")
    assert "threads" in described["machine"]


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
    ],
)
def test_a_container_may_use_fewer_cores_than_there_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], cores: float
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    (tmp_path / "cpu").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(f"{content}\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(("allowed", "threads", "cores"), [(1, 8, 1), (8, 1, 1), (4, 2, 2)])
def test_a_process_may_be_kept_to_fewer_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, allowed: int, threads: int, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(allowed)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_speed_of_a_core_is_that_of_the_time_it_works(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    clock = Clock()
    product_seconds = 0.1
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    monkeypatch.setattr(torch, "mm", lambda *matrices: clock.pass_seconds(product_seconds / share))
    monkeypatch.setattr(time, "monotonic", clock)
    # Both cores work, in a share of the time.
    monkeypatch.setattr(time, "process_time", lambda: 2 * share * clock.now)
    speed = measure_speed()
    assert speed.core_share == pytest.approx(share)
    assert speed.core_gflops == pytest.approx(1024**3 / product_seconds / 1e9)
    assert speed.gflops == pytest.approx(2 * 1024**3 / product_seconds / 1e9 * share)


def test_the_speed_of_this_machine_is_found_in_moments() -> None:
    start = time.monotonic()
    speed = measure_speed()
    assert time.monotonic() - start < 10
    assert speed.cores > 0
    assert 0 < speed.core_share <= 1
    assert 0.1 < speed.core_gflops < 10_000


def test_attempts_at_a_stage_add_up_over_processes(tmp_path: Path) -> None:
    path = tmp_path / "stages.json"
    with contextlib.suppress(KeyboardInterrupt), StageLog(path).measured("report"):
        time.sleep(0.02)
        raise KeyboardInterrupt
    first = json.loads(path.read_text())["report"]
    log = StageLog(path)
    with log.measured("report"):
        time.sleep(0.02)
    assert first["attempts"] == 1
    assert log.stages["report"]["attempts"] == 2
    assert log.seconds("report") >= first["seconds"] + 0.02
    assert log.stages["report"]["peak_memory_mib"] > 10
    assert json.loads(path.read_text()) == log.stages


def test_a_killed_attempt_counts_up_to_its_last_sign_of_life(tmp_path: Path) -> None:
    path = tmp_path / "stages.json"
    killed = {"seconds": 1.0, "peak_memory_mib": 0, "attempts": 1, "started": 1000.0}
    path.write_text(json.dumps({"text_to_image": killed}))
    log = StageLog(path)
    with log.measured("text_to_image", last_sign_of_life=1060.0):
        pass
    assert 61 <= log.seconds("text_to_image") < 62


def test_a_stage_s_peak_is_its_own(tmp_path: Path) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("only Linux can forget an earlier peak")
    log = StageLog(tmp_path / "stages.json")
    with log.measured("large"):
        torch.ones(2**26)
    with log.measured("small"):
        pass
    assert log.stages["large"]["peak_memory_mib"] - log.stages["small"]["peak_memory_mib"] > 128
