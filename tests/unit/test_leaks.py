import os
import threading
from pathlib import Path

import pytest
from lightning.pytorch import seed_everything
from torch import distributed

from tests import leaks
from tests.architecture.tree import ROOT
from tests.leaks import Surroundings


def test_nothing_is_reported_where_nothing_was_left(tmp_path: Path) -> None:
    assert Surroundings.now(tmp_path).leaks_since(tmp_path) == []


def test_every_kind_of_leak_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "_GRACE_SECONDS", 0.1)
    before = Surroundings.now(tmp_path)
    (tmp_path / "left.txt").touch()
    os.environ["LEFT_BEHIND"] = "1"
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="left-thread")
    thread.start()
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/left.store", rank=0, world_size=1)
    try:
        found = before.leaks_since(tmp_path)
    finally:
        release.set()
        thread.join()
    assert found[:3] == ["a process group", "the thread left-thread", "the environment variable LEFT_BEHIND"]
    assert found[3:] == ["the file left.txt"]
    assert "LEFT_BEHIND" not in os.environ
    assert not distributed.is_initialized()


def test_a_changed_variable_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHANGED", "before")
    before = Surroundings.now(tmp_path)
    os.environ["CHANGED"] = "after"
    assert before.leaks_since(tmp_path) == ["the environment variable CHANGED"]
    assert os.environ["CHANGED"] == "before"


def test_seeds_are_put_back_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    before = Surroundings.now(tmp_path)
    seed_everything(5, verbose=False)
    assert before.leaks_since(tmp_path) == []
    assert "PL_GLOBAL_SEED" not in os.environ


def test_folders_of_tools_are_no_leaks(tmp_path: Path) -> None:
    before = Surroundings.now(tmp_path)
    (tmp_path / ".hypothesis").mkdir()
    (tmp_path / ".pytest_cache").mkdir()
    assert before.leaks_since(tmp_path) == []


def test_every_worker_stands_in_a_folder_of_its_own() -> None:
    assert not Path.cwd().is_relative_to(ROOT)
