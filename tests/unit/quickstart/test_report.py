import base64
import dataclasses
import io
import re
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from PIL import Image

from lightning_dalle.quickstart.evaluation import EvaluationMetric, Results
from lightning_dalle.quickstart.report import render_report
from lightning_dalle.quickstart.settings import TRAINED_STAGES

STAGES = {
    "tokenizer": {"seconds": 3.14, "peak_memory_mib": 500, "attempts": 1},
    "discrete_vae": {"seconds": 125.0, "peak_memory_mib": 900, "attempts": 2},
    "report": {"seconds": 0.0, "peak_memory_mib": 0, "attempts": 1},
}
LOSSES = {"discrete_vae": "train/loss", "contrastive": "train/loss", "text_to_image": "train/image_loss"}
VOID = {"meta", "img", "br", "hr", "link"}


class Elements(HTMLParser):
    """Checks that elements are closed in their order, and collects what they refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attributes if name in {"src", "href"}]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def prompts(captions: list[str], originals: bool) -> dict[str, Any]:
    images = torch.randint(0, 256, (len(captions), 2, 3, 8, 8), dtype=torch.uint8)
    return {
        "title": "Held-out captions",
        "description": "Never trained on.",
        "captions": captions,
        "images": images,
        "scores": torch.tensor([[0.5, 0.25]] * len(captions)),
        "correct": torch.tensor([[True, False]] * len(captions)),
        "originals": images[:, 0] if originals else None,
    }


def results(
    data: str,
    captions: list[str],
    extra: dict[str, list[str]] | None = None,
    details: dict[str, Any] | None = None,
    trained: tuple[str, ...] = TRAINED_STAGES["shapes"],
) -> Results:
    pictures = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    metrics = [
        EvaluationMetric(key="a", label="Minor", definition="How.", value=0.25, n=4, unit="%"),
        EvaluationMetric(key="b", label="Reached", definition="How.", value=0.95, n=4, target=0.9, unit="%"),
        EvaluationMetric(key="c", label="Missed", definition="How.", value=0.5, n=4, target=0.6, unit="%"),
    ]
    return Results(
        metrics=metrics,
        details=details or {},
        pictures={
            "samples": pictures,
            "sample_captions": ["one", "two"],
            "originals": pictures,
            "reconstructions": pictures,
            "prompts": [prompts(captions, originals=data == "openmoji")],
        },
        curves={
            stage: {LOSSES[stage]: {0: 2.0, 10: 1.0}} if stage in trained else {} for stage in TRAINED_STAGES["shapes"]
        },
        settings={
            "data": data,
            "sampling": {"seed": 0},
            "extra": extra or {},
            "recipes": {stage: f"# {stage} & co\n" for stage in TRAINED_STAGES["shapes"]},
        },
    )


def page(data: str = "shapes", captions: list[str] | None = None, **settings: Any) -> str:
    return render_report(results(data, captions or ["a small red diamond"], **settings), STAGES, {"torch": "2.9"})


@pytest.mark.parametrize("data", ["shapes", "openmoji"])
def test_the_page_is_whole_and_needs_nothing_else(data: str) -> None:
    elements = Elements()
    elements.feed(page(data))
    assert elements.open == []
    outside = [
        reference for reference in elements.references if not reference.startswith(("data:image/png;base64,", "#"))
    ]
    assert outside == []
    assert not re.search(r"@import|<script|<link|url\((?!#)", page(data))


def test_captions_and_recipes_are_escaped() -> None:
    text = page(captions=['<script>alert("x")</script>'])
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "# contrastive &amp; co" in text


def test_figures_with_targets_come_first_and_say_whether_they_are_met() -> None:
    text = page()
    assert text.index("Reached") < text.index("Missed") < text.index("Minor")
    assert "1 of 2 targets are met" in text
    assert text.count("✓ met") == text.count("✗ not met") == 1


def test_candidates_are_marked_and_scored() -> None:
    text = page(captions=["first", "second"])
    assert text.count('<span class="met">✓</span> 0.50') == 2
    assert text.count('<span class="missed">✗</span> 0.25') == 2


def test_repeated_captions_are_shown_once_before_a_click() -> None:
    text = page(captions=["first", "first", "second"])
    assert "<summary>1 more</summary>" in text


def test_clips_move_and_have_no_scores() -> None:
    clips = torch.randint(0, 256, (1, 2, 3, 4, 8, 8), dtype=torch.uint8)
    pictures = {
        "samples": clips[0],
        "sample_captions": ["one", "two"],
        "prompts": [{**prompts(["first"], originals=False), "images": clips, "scores": None}],
    }
    run = dataclasses.replace(results("moving-shapes", ["first"]), pictures=pictures)
    text = render_report(run, STAGES, {"torch": "2.9"})
    elements = Elements()
    elements.feed(text)
    assert elements.open == []
    moving = [link for link in elements.references if link.startswith("data:image/webp;base64,")]
    assert len(moving) == 1 + 2 + 2
    with Image.open(io.BytesIO(base64.b64decode(moving[-1].split(",")[1]))) as shown:
        assert shown.n_frames == 4  # type: ignore[attr-defined]
    assert "Reconstructions" not in text
    assert "by the reranker" not in text


def test_real_pictures_are_attributed_and_shown_beside_the_drawn_ones() -> None:
    assert "CC BY-SA 4.0" in page("openmoji")
    assert "<figcaption>trained</figcaption>" in page("openmoji")
    assert "CC BY-SA 4.0" not in page("shapes")
    assert "Animated emojis by Microsoft" in page("animated-emoji")


def test_times_are_those_of_the_stages_that_are_over() -> None:
    text = page()
    assert "3.1 s" in text
    assert "2 min 5 s" in text
    assert "900 MiB" in text
    assert "<td>Report</td>" not in text


def test_arguments_above_the_recipe_are_shown() -> None:
    assert "--trainer.max_steps=3" in page(extra={"contrastive": ["--trainer.max_steps=3"]})


def test_curves_are_those_of_the_stages_that_have_some() -> None:
    assert page().count("<svg") == 3
    text = page(trained=("discrete_vae",))
    assert text.count("<svg") == 1
    assert "<h3>Contrastive reranker</h3>" not in text


def test_attributes_of_drawn_shapes_are_shown_where_there_are_some() -> None:
    shares = {"best": {"size": 0.75, "relation": 1.0}, "mean": {"size": 0.5, "relation": 0.25}}
    text = page(details={"two_object_attributes": shares})
    assert "Two objects: shares of what is right" in text
    assert "75.0 %" in text
    assert "25.0 %" in text
    assert "shares of what is right" not in page("openmoji")
