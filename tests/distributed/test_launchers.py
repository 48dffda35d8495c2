"""The strategy under each way of starting processes, against the same training in one process."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.architecture.tree import ROOT
from tests.distributed.launched_toy import FULL_RANK, NUM_BATCHES, LaunchedToy
from tests.distributed.toy_module import fit_alone, powersgd_strategy, trainer_of, whole_state
from tests.foreign_module import LIGHTNING_WARNINGS

pytestmark = LIGHTNING_WARNINGS
PROGRAM = ["-m", "tests.distributed.launched_toy"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def _assert_as_alone(state: dict[str, torch.Tensor]) -> None:
    expected = fit_alone(NUM_BATCHES, depth=1)["state"]
    # Sums of other order in double precision.
    torch.testing.assert_close(state, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("launcher", [[], TORCHRUN], ids=["lightning", "torchrun"])
def test_program(launcher: list[str], tmp_path: Path) -> None:
    command = [sys.executable, *launcher, *PROGRAM, str(tmp_path / "state.pt")]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    _assert_as_alone(torch.load(tmp_path / "state.pt", weights_only=True))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
def test_fork_as_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        # Else Lightning leaves a variable with a port of its own choice.
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    # As Lightning tells a notebook.
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    module = LaunchedToy(depth=1)
    trainer_of(2, powersgd_strategy(**FULL_RANK), default_root_dir=tmp_path).fit(module)
    _assert_as_alone(whole_state(module))
