import re

import pytest

from tests.architecture.tree import ROOT, tracked_files

# A word that this project used up to 0.1, as a pattern -> the field's word for it.
REPLACED_WORDS = {
    r"\b(un)?cuts?\b|\bcutting\b|CutSequences|CutSteps|SequenceCut|_cut\b|\bcut_": "shard, sharded",
    r"(?<![.\w])join(s|ed|ing)?\b|\b_?join_|_joined?\b|Joined": "gather; for optimizers ChainedOptimizer",
    r"own_positions|\bown part\b": "local_positions, local shard",
    r"context_size\b": "context_parallel_degree",
    r"head_size": "ulysses_degree, ring_degree",
    r"[\"'`]hybrid[\"'`]": "usp",
    r"PlannedBlock|PlannedTiles|attention_plan|planned attention": "block schedule, BlockMask",
    r"RunningSoftmax|share_of_second": "online softmax, log-sum-exp merge",
    r"\bhand_on\b|HandOver|travel_backward": "rotate, send and receive",
    r"KeyExchange|bring_home|BroughtHome": "halo exchange",
    r"HeadExchange|\b_?to_heads\b|\b_?to_positions\b|_?ToHeads|_?ToPositions": "Ulysses all-to-all",
    r"\bblind(ly)?\b": "masked, fully masked",
    r"\breal_keys\b": "key_padding_mask",
    r"\bdocuments=|\.documents\b|[\"'`]documents[\"'`]": "document_ids",
    r"whole cop(y|ies)|whole_copies|WholeOrSharded|ShardedReplicas|plain_gradients": "replicated, HSDP, unsharded",
    r"first_weights": "sync_module_states",
    r"\blocal_part\b": "to_local",
    r"\bTraffic\b|ContextTraffic|\btraffic\b|travelling|hidden share": "communication statistics, bytes sent",
    r"(first|second|thin) factors?\b|EarlyFactors|early factors?": "P and Q, overlapped all-reduce of P",
    r"minimum_rate": "min_compression_rate",
    r"uncompressed_steps": "start_powersgd_iter",
    r"candidate.groups|CandidateGroups": "shared-prefix decoding",
    r"decoding.window|DecodingWindow": "rolling KV cache",
    r"position.waves|wave_features|wave_frequencies": "Fourier position features",
    r"\bRotation\b": "apply_rotary_emb",
    r"kind[^\n]{0,20}[\"']direct[\"']|\bDirect\(": "rope scaling 'default'",
    r"trained_grid": "original_max_position_embeddings",
    r"\.expand\.weight|\.contract\b|self\.contract": "fc1, fc2",
    r"step_size": "learning_rate",
    r"warmup_updates|total_updates": "warmup_steps, total_steps",
    r"division_(factor|window)": "backoff_factor, backoff_interval",
    r"\bfigures\b": "metrics, statistics",
    r"take_turn|is_turn\b|\bOff its turn\b": "should_run, interval",
    r"Judgement|\bjudg(e|ed|es|ing)\b|\bjudge_": "Evaluation, evaluate",
    r"\bload_openai\b": "load_openai_discrete_vae",
    r"export_checkpoint": "consolidate_checkpoint",
    r"(DiscreteVAE|TextToImage|Contrastive|VideoDiT|VideoAutoencoder)Training\b": "...TrainingConfig",
    r"\b(CaptionedImages|CaptionedShapes|CaptionedVideos|MovingShapes|AnimatedEmoji)\b": "...DataModule",
    r"check_agreement|check_request|clip_requests|(?<!_)\bdata_rank\b": "validate_..., data_parallel_rank",
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
