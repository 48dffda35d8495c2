import logging
from pathlib import Path

import numpy as np
import pytest

from lightning_dalle.data.cache import cache_folder, cached_arrays


class Builder:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.calls += 1
        return {"numbers": np.arange(5), "words": np.array(["a", "ñ"])}


def test_arrays_are_built_once(tmp_path: Path) -> None:
    build = Builder()
    for _ in range(2):
        arrays = cached_arrays("name", build, tmp_path / "new")
        np.testing.assert_array_equal(arrays["numbers"], np.arange(5))
        assert arrays["words"].tolist() == ["a", "ñ"]
    assert build.calls == 1
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["name.npz"]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 broken", b"not a zip file"])
def test_a_damaged_file_is_built_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes) -> None:
    build = Builder()
    (tmp_path / "name.npz").write_bytes(content)
    for _ in range(2):
        assert cached_arrays("name", build, tmp_path)["numbers"][4] == 4
    assert build.calls == 1
    assert "name.npz cannot be read" in caplog.text


def test_a_cut_file_is_built_anew(tmp_path: Path) -> None:
    build = Builder()
    cached_arrays("name", build, tmp_path)
    path = tmp_path / "name.npz"
    path.write_bytes(path.read_bytes()[:-30])
    assert cached_arrays("name", build, tmp_path)["numbers"][4] == 4
    assert build.calls == 2


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        assert cached_arrays("name", Builder(), tmp_path / "file" / "folder")["numbers"][4] == 4
    assert "cannot be written" in caplog.text


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    class Unwritable:
        def __array__(self, *arguments: object, **keywords: object) -> np.ndarray:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        cached_arrays("name", lambda: {"numbers": Unwritable()}, tmp_path)  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_chosen_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LIGHTNING_DALLE_CACHE", raising=False)
    assert cache_folder() == tmp_path / "home" / ".cache" / "lightning-dalle"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "lightning-dalle"
    monkeypatch.setenv("LIGHTNING_DALLE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
