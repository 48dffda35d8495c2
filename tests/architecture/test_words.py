import re

import pytest

from tests.architecture.tree import ROOT, tracked_files

# A word that this project used up to 0.1, as a pattern -> the field's word for it.
REPLACED_WORDS = {
    r"head_size": "ulysses_degree, ring_degree",
    r"\breal_keys\b": "key_padding_mask",
    r"\bdocuments=|\.documents\b|[\"'`]documents[\"'`]": "document_ids",
    r"whole cop(y|ies)|whole_copies|WholeOrSharded|ShardedReplicas|plain_gradients": "replicated, HSDP, unsharded",
    r"first_weights": "sync_module_states",
    r"\blocal_part\b": "to_local",
    r"\bTraffic\b|ContextTraffic|\btraffic\b|travelling|hidden share": "communication statistics, bytes sent",
    r"(first|second|thin) factors?\b|EarlyFactors|early factors?": "P and Q, overlapped all-reduce of P",
    r"minimum_rate": "min_compression_rate",
    r"uncompressed_steps": "start_powersgd_iter",
    r"division_(factor|window)": "backoff_factor, backoff_interval",
    r"\bload_openai\b": "load_openai_discrete_vae",
    r"export_checkpoint": "consolidate_checkpoint",
    r"(DiscreteVAE|TextToImage|Contrastive|VideoDiT|VideoAutoencoder)Training\b": "...TrainingConfig",
    r"\b(CaptionedImages|CaptionedShapes|CaptionedVideos|MovingShapes|AnimatedEmoji)\b": "...DataModule",
}
# The changelog may name what was; this file has to.
EXEMPT = {ROOT / "CHANGELOG.md", ROOT / "tests" / "architecture" / "test_words.py"}
READ = {".py", ".md", ".yaml", ".yml", ".toml", ".html", ".ipynb", ""}


@pytest.mark.parametrize("pattern", REPLACED_WORDS)
def test_words_of_before_are_gone(pattern: str) -> None:
    matcher = re.compile(pattern)
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for file in tracked_files()
        if file.suffix in READ and file.is_file() and file not in EXEMPT and file.name != "LICENSE"
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if matcher.search(line)
    ]
    assert not found, f"write {REPLACED_WORDS[pattern]} instead:\n" + "\n".join(found)
