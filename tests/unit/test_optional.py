import sys
from pathlib import Path

import pytest

from lightning_dalle.optional import require


def test_an_installed_package_is_imported() -> None:
    assert require("json.decoder", "anything") is sys.modules["json.decoder"]


def test_a_missing_package_names_its_extra() -> None:
    message = r"needs the package no_such_package.part, .*: pip install 'lightning-dalle\[shards\]'"
    with pytest.raises(ModuleNotFoundError, match=message) as error:
        require("no_such_package.part", "shards")
    assert error.value.name == "no_such_package"


def test_a_package_that_lacks_something_itself_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_installed.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_package'"):
        require("half_installed", "shards")
