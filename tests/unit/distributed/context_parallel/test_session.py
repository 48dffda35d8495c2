"""Steps of a process that holds all of a sequence: what is redirected, what is refused, and what is left as it was."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import dropout, scaled_dot_product_attention

from lightning_dalle.distributed.context_parallel.comm import ContextGroups
from lightning_dalle.distributed.context_parallel.plan import SequencePlan
from lightning_dalle.distributed.context_parallel.session import ContextParallelSession
from lightning_dalle.ops.sharded_sequence import sequence_mean, sharded_sequences

LENGTH = 9


def _session(**plan: Any) -> ContextParallelSession:
    return ContextParallelSession(SequencePlan(**{"batch": {"tokens": 1}, **plan}), ContextGroups())


def _batch() -> dict[str, Tensor]:
    return {"tokens": torch.arange(2 * LENGTH).view(2, LENGTH), "captions": torch.ones(2)}


def _query(heads: int = 2) -> Tensor:
    return torch.randn(2, heads, LENGTH, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _attend(query: Tensor, **options: Any) -> Tensor:
    return scaled_dot_product_attention(query, query, query, **options)


@pytest.mark.parametrize(("is_causal", "scale"), [(True, None), (False, 0.3)])
def test_attention_is_that_of_torch(is_causal: bool, scale: float | None) -> None:
    query, key = _query(4), _query(2)
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": True}
    expected = scaled_dot_product_attention(query, key, key, **options)
    session = _session()
    with session.step(_batch()):
        results = [scaled_dot_product_attention(query, key, key, **options)]
        results.append(functional.scaled_dot_product_attention(query, key, key, **options))
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-13)
    assert session.communication.attention_seconds > 0


def test_prefix_documents_and_padding_are_those_of_the_plan() -> None:
    query = _query()
    batch: dict[str, Any] = {
        **_batch(),
        "document_ids": torch.tensor([[0] * 4 + [1] * 5, [0] * LENGTH]),
        "real": torch.tensor([[1] * LENGTH, [1] * 7 + [0] * 2]),
    }
    visible = _with_prefix() & (batch["document_ids"].unsqueeze(-1) == batch["document_ids"].unsqueeze(-2))
    visible = (visible & batch["real"].bool().unsqueeze(1)).unsqueeze(1)
    expected = scaled_dot_product_attention(query, query, query, attn_mask=visible)
    session = _session(document_ids="document_ids", key_padding_mask="real", prefix_length=3)
    for _ in range(2):
        with session.step(batch):
            result = scaled_dot_product_attention(query, query, query, is_causal=True)
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-13)
        # The next batch has masks of its own.
        batch["document_ids"] = torch.zeros(2, LENGTH).long()
        expected = scaled_dot_product_attention(
            query, query, query, attn_mask=_with_prefix() & batch["real"].bool()[:, None, None]
        )


def _with_prefix() -> Tensor:
    visible = torch.ones(LENGTH, LENGTH).tril().bool()
    visible[:, :3] = True
    return visible


def test_multi_head_attention_is_redirected_also_for_inference() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).eval()
    hidden = torch.randn(2, LENGTH, 8)
    masked_positions = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    with torch.no_grad():
        expected = layer(hidden, src_mask=masked_positions, is_causal=True)
        with _session().step(_batch()):
            result = layer(hidden, src_mask=masked_positions, is_causal=True)
    torch.testing.assert_close(result, expected)
    assert torch.backends.mha.get_fastpath_enabled()


def test_dropout_is_drawn_from_the_generator_and_scaled() -> None:
    hidden, masks = torch.ones(2, LENGTH, 50), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        with _session().step(_batch()):
            _attend(_query(), dropout_p=0.5)
            masks.append(dropout(hidden, 0.25))
            changed = hidden.clone()
            assert dropout(changed, 0.25, inplace=True) is changed
            # Of a tensor without positions too.
            assert dropout(torch.ones(50), 0.25).unique().numel() == 2
            assert dropout(hidden, 0.25, training=False) is hidden
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
    torch.testing.assert_close(masks[0].unique(), torch.tensor([0, 4 / 3]))
    assert float((masks[0] == 0).float().mean()) == pytest.approx(0.25, abs=0.05)
    assert not torch.equal(masks[0][0], masks[0][1])


def test_batches_may_be_tuples() -> None:
    session = ContextParallelSession(SequencePlan(batch={1: 0}), ContextGroups())
    with session.step((torch.ones(2), torch.arange(LENGTH))) as local:
        _attend(_query())
    assert local[1].tolist() == list(range(LENGTH))
    with pytest.raises(ValueError, match=r"the plan shards \[1\] of each batch"), session.step((torch.ones(2),)):
        pass


def test_steps_without_attention_or_sharded_tensors_are_refused() -> None:
    query = _query()
    with pytest.raises(RuntimeError, match="sequences were sharded, but neither"), _session().step(_batch()):
        pass
    with pytest.raises(ValueError, match=r"different numbers of positions: \{'tokens': 9, 'captions': 2\}"):
        _session().shard(_batch(), {"tokens": 1, "captions": 0})
    with pytest.raises(RuntimeError, match="came before anything was sharded"):
        _session().attend_plainly(query, query, query, True, 0.0)
    with _session().step(_batch()):
        _attend(query)
        with pytest.raises(ValueError, match=r"query has 5 positions, but of the sharded .* holds \{9: 9\}"):
            _attend(query[:, :, :5])


def test_sequences_of_a_step_are_told_apart_by_length() -> None:
    session, query = _session(), _query()
    with session.step(_batch()):
        session.shard({"text": torch.zeros(2, 5)}, {"text": 1})
        short = _attend(query[:, :, :5], is_causal=True)
        whole = _attend(query, is_causal=True)
        assert torch.equal(session.gather(whole, 2), whole)
    torch.testing.assert_close(short, _attend(query[:, :, :5], is_causal=True), rtol=0, atol=1e-13)
    torch.testing.assert_close(whole, _attend(query, is_causal=True), rtol=0, atol=1e-13)


def test_generation_within_a_step_attends_to_whole_sequences() -> None:
    query, mask = _query(), torch.ones(LENGTH, LENGTH).bool()
    expected = _attend(query, attn_mask=mask)
    with _session().step(_batch()):
        _attend(query)
        with sharded_sequences(None):
            assert torch.equal(_attend(query, attn_mask=mask), expected)


def test_predictions_on_shards_need_a_word_of_the_plan() -> None:
    for predictions in (1, "whole", None):
        session = _session(predictions=predictions)
        with session.step(_batch()) as local:
            _attend(_query())
        if predictions is not None:
            assert session.gather_predictions((local["tokens"], 7))[1] == 7
            continue
        with pytest.raises(RuntimeError, match="let its predictions name the dimension of positions"):
            session.gather_predictions(local["tokens"])


def test_loss_of_local_positions_is_refused() -> None:
    session = _session()
    with session.step(_batch()):
        _attend(_query())
    with pytest.raises(RuntimeError, match="training_step returned a loss of local positions alone"):
        session.validate_mean_was_taken("training_step")
    with session.step(_batch()):
        _attend(_query())
        assert float(sequence_mean(torch.tensor(6.0), torch.tensor(4))) == 1.5
    session.validate_mean_was_taken("training_step")
