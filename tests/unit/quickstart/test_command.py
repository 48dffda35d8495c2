import sys
from collections.abc import Mapping
from typing import Any

import pytest

from lightning_dalle.quickstart import pipeline
from lightning_dalle.quickstart.settings import Sampling


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []

    def run_quickstart(
        data: str = "openmoji",
        output: str = "runs/quickstart",
        fresh: bool = False,
        sampling: Sampling = Sampling(),
        extra: Mapping[str, list[str]] | None = None,
    ) -> None:
        made.append({"data": data, "output": output, "fresh": fresh, "sampling": sampling, "extra": extra})
        if output == "taken":
            raise ValueError("output (taken) holds a run with other settings")

    monkeypatch.setattr(pipeline, "run_quickstart", run_quickstart)
    return made


def test_arguments_of_the_command_are_those_of_the_function(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "lightning-dalle quickstart --data shapes --output here --fresh true --sampling.num_prompts 4"
    monkeypatch.setattr(sys, "argv", [*line.split(), '--extra={"contrastive": ["--trainer.max_steps=3"]}'])
    pipeline.main()
    assert calls == [
        {
            "data": "shapes",
            "output": "here",
            "fresh": True,
            "sampling": Sampling(num_prompts=4),
            "extra": {"contrastive": ["--trainer.max_steps=3"]},
        }
    ]


def test_what_is_wrong_is_said_without_a_traceback(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-dalle", "quickstart", "--output", "taken"])
    with pytest.raises(SystemExit) as stop:
        pipeline.main()
    assert stop.value.code == 2
    assert "lightning-dalle quickstart: error: output (taken) holds" in capsys.readouterr().err
