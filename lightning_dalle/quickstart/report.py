"""The report: one HTML file that shows everything by itself."""

import html
import os
from collections.abc import Mapping
from importlib.resources import files
from string import Template
from typing import Any

from lightning_dalle.data.emoji import animated, openmoji
from lightning_dalle.quickstart import report_pictures
from lightning_dalle.quickstart.curves import draw_panels
from lightning_dalle.quickstart.evaluation import EvaluationMetric, Results
from lightning_dalle.quickstart.settings import RunFolder, recipe_name

STAGE_NAMES = {
    "tokenizer": "Tokenizer",
    "discrete_vae": "Discrete VAE",
    "contrastive": "Contrastive reranker",
    "text_to_image": "Text-to-image transformer",
    "video_dit": "Video diffusion transformer",
    "pictures": "Samples drawn and evaluated",
    "report": "Report",
}
_TITLES = {
    "openmoji": "Captions to pictures: OpenMoji",
    "shapes": "Captions to pictures: drawn shapes",
    "moving-shapes": "Captions to clips: moving shapes",
    "animated-emoji": "Captions to clips: animated emoji",
}
_RECIPE = """The recipe of <cite>Zero-Shot Text-to-Image Generation</cite> (Ramesh et al. 2021), small: a tokenizer, a
discrete VAE, a transformer over its codes and a contrastive reranker, trained from nothing on"""
_VIDEO = "A video diffusion transformer, small, trained from nothing by flow matching on"
_PICTURES = """Below is what the transformer draws for captions, the best of each caption’s candidates as the reranker
sees them."""
_LEADS = {
    "openmoji": (f"{_RECIPE} OpenMoji drawings and their Unicode names", _PICTURES),
    "shapes": (f"{_RECIPE} drawn shapes, of which some compositions were never trained on", _PICTURES),
    "moving-shapes": (
        f"{_VIDEO} clips of moving shapes, of which some combinations were never trained on",
        "Below is what it draws for captions of those.",
    ),
    "animated-emoji": (
        f"{_VIDEO} animated emoji and their Unicode names",
        "Below is what it draws for names that were trained on.",
    ),
}
_ATTRIBUTIONS = {
    "openmoji": openmoji.ATTRIBUTION,
    "animated-emoji": animated.ATTRIBUTION,
}


def write_report(folder: RunFolder, stages: Mapping[str, Mapping[str, Any]], machine: Mapping[str, str]) -> None:
    """Write `report.html` from what a run has left.

    Args:
        stages: Seconds and peak memory of the stages.
        machine: Versions and hardware.
    """
    page = render_report(Results.read(folder), stages, machine)
    unfinished = folder.report.with_suffix(".tmp")
    unfinished.write_text(page, encoding="utf-8")
    os.replace(unfinished, folder.report)


def render_report(results: Results, stages: Mapping[str, Mapping[str, Any]], machine: Mapping[str, str]) -> str:
    """Return the page as text."""
    sections = [
        _opening(results, stages),
        _metrics(results.metrics),
        *_attributes(results.details),
        *(report_pictures.prompts(prompts) for prompts in results.pictures["prompts"]),
        report_pictures.samples(results.pictures),
        report_pictures.reconstructions(results.pictures),
        _curves(results),
        _time(stages),
        _settings(results, machine),
        _licence(results),
    ]
    template = Template((files("lightning_dalle.quickstart") / "report.html").read_text(encoding="utf-8"))
    return template.substitute(title=_title(results), body="\n".join(sections))


def _title(results: Results) -> str:
    return _TITLES[results.settings["data"]]


def _opening(results: Results, stages: Mapping[str, Mapping[str, Any]]) -> str:
    verdicts = [metric.met for metric in results.metrics if metric.met is not None]
    minutes = sum(stage["seconds"] for stage in stages.values()) / 60
    trained, shown = _LEADS[results.settings["data"]]
    return f"""<h1>{_title(results)}</h1>
<p class="lead">{trained}, in {minutes:.1f} minutes. {shown} {sum(verdicts)} of {len(verdicts)} targets are met.</p>
{report_pictures.hero(results.pictures["prompts"])}"""


def _metrics(metrics: list[EvaluationMetric]) -> str:
    rows = "\n".join(map(_metric_row, sorted(metrics, key=lambda metric: metric.target is None)))
    return f"""<h2>Metrics</h2>
<div class="scroll"><table>
<tr><th>Metric</th><th class="number">n</th><th class="number">Value</th><th class="number">Target</th><th></th></tr>
{rows}
</table></div>"""


def _metric_row(metric: EvaluationMetric) -> str:
    verdict = {
        True: '<span class="verdict met">✓ met</span>',
        False: '<span class="verdict missed">✗ not met</span>',
        None: "",
    }[metric.met]
    definition = html.escape(metric.definition)
    return (
        f'<tr><td>{html.escape(metric.label)}<span class="definition">{definition}</span></td>'
        f'<td class="number quiet">{metric.n}</td><td class="number">{metric.value_text}</td>'
        f'<td class="number">{metric.target_text}</td><td>{verdict}</td></tr>'
    )


def _attributes(details: Mapping[str, Any]) -> list[str]:
    """Return what of drawn shapes is right where not all is; other data have no such shares."""
    return [
        f"""<h3>{title}: shares of what is right</h3>
<div class="scroll"><table>
<tr><th>Pictures</th>{"".join(f'<th class="number">{word}</th>' for word in details[key]["best"])}</tr>
{_attribute_row("first by the reranker", details[key]["best"])}
{_attribute_row("all", details[key]["mean"])}
</table></div>"""
        for key, title in (("one_object_attributes", "One object"), ("two_object_attributes", "Two objects"))
        if key in details
    ]


def _attribute_row(name: str, shares: Mapping[str, float]) -> str:
    cells = "".join(f'<td class="number">{100 * share:.1f} %</td>' for share in shares.values())
    return f"<tr><td>{name}</td>{cells}</tr>"


def _curves(results: Results) -> str:
    parts = ["<h2>Training</h2>"]
    for stage, curves in results.curves.items():
        drawings = draw_panels(stage, curves)
        if drawings:
            parts.append(f'<h3>{STAGE_NAMES[stage]}</h3>\n<div class="curves">{"".join(drawings)}</div>')
    return "\n".join(parts)


def _time(stages: Mapping[str, Mapping[str, Any]]) -> str:
    rows = "\n".join(
        f'<tr><td>{STAGE_NAMES[name]}</td><td class="number">{_duration(stage["seconds"])}</td>'
        f'<td class="number">{stage["peak_memory_mib"]} MiB</td><td class="number">{stage["attempts"]}</td></tr>'
        for name, stage in stages.items()
        if stage["peak_memory_mib"]
    )
    return f"""<h2>Time and memory</h2>
<p class="quiet">Of all attempts at a stage, if it was interrupted; memory is the whole process at its peak.</p>
<div class="scroll"><table>
<tr><th>Stage</th><th class="number">Time</th><th class="number">Peak memory</th><th class="number">Attempts</th></tr>
{rows}
</table></div>"""


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds) // 60} min {int(seconds) % 60} s"


def _settings(results: Results, machine: Mapping[str, str]) -> str:
    settings = results.settings
    recipes = "\n".join(
        f"<details><summary>{STAGE_NAMES[stage]}: the recipe {recipe_name(settings['data'], stage)}.yaml</summary>"
        f"<pre>{html.escape(text)}</pre>{_extra(settings['extra'].get(stage, []))}</details>"
        for stage, text in settings["recipes"].items()
    )
    sampling = ", ".join(f"{name} {value}" for name, value in settings["sampling"].items())
    rows = "\n".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in machine.items()
    )
    return f"""<h2>Settings</h2>
<p class="quiet">Sampling: {html.escape(sampling)}.</p>
{recipes}
<details><summary>Versions and machine</summary><table>{rows}</table></details>"""


def _extra(arguments: list[str]) -> str:
    if not arguments:
        return ""
    return f"<p>With these arguments above it:</p><pre>{html.escape(chr(10).join(arguments))}</pre>"


def _licence(results: Results) -> str:
    attribution = _ATTRIBUTIONS.get(results.settings["data"])
    if attribution is None:
        return "<footer>Made by lightning-dalle.</footer>"
    return f"<footer>Made by lightning-dalle. {html.escape(attribution)} Generated pictures derive from them.</footer>"
