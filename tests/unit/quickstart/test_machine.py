import contextlib
import importlib.metadata
import json
import time
from pathlib import Path

import pytest
import torch

from lightning_dalle.quickstart import machine
from lightning_dalle.quickstart.machine import StageLog, describe_machine, training_precision


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
