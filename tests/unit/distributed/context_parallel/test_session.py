"""Steps of a process that holds all of a sequence: what is redirected, what is refused, and what is left as it was."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import dropout, scaled_dot_product_attention

from lightning_dalle.distributed.context_parallel.comm import ContextGroups
from lightning_dalle.distributed.context_parallel.hooks import attach_plan
from lightning_dalle.distributed.context_parallel.plan import SequencePlan
from lightning_dalle.distributed.context_parallel.session import ContextParallelSession
from lightning_dalle.ops.sharded_sequence import sequence_mean, sharded_sequences

LENGTH = 9


def _sequences(**plan: Any) -> ContextParallelSession:
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
    sequences = _sequences()
    with sequences.step(_batch()):
        results = [scaled_dot_product_attention(query, key, key, **options)]
        results.append(functional.scaled_dot_product_attention(query, key, key, **options))
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-13)
    assert sequences.statistics.attention_seconds > 0


def test_prefix_documents_and_padding_are_those_of_the_plan() -> None:
    query = _query()
    batch: dict[str, Any] = {
        **_batch(),
        "document_ids": torch.tensor([[0] * 4 + [1] * 5, [0] * LENGTH]),
        "real": torch.tensor([[1] * LENGTH, [1] * 7 + [0] * 2]),
    }
    seen = _with_prefix() & (batch["document_ids"].unsqueeze(-1) == batch["document_ids"].unsqueeze(-2))
    seen = (seen & batch["real"].bool().unsqueeze(1)).unsqueeze(1)
    expected = scaled_dot_product_attention(query, query, query, attn_mask=seen)
    sequences = _sequences(document_ids="document_ids", key_padding_mask="real", prefix_length=3)
    for _ in range(2):
        with sequences.step(batch):
            result = scaled_dot_product_attention(query, query, query, is_causal=True)
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-13)
        # The next batch has masks of its own.
        batch["document_ids"] = torch.zeros(2, LENGTH).long()
        expected = scaled_dot_product_attention(
            query, query, query, attn_mask=_with_prefix() & batch["real"].bool()[:, None, None]
        )


def _with_prefix() -> Tensor:
    seen = torch.ones(LENGTH, LENGTH).tril().bool()
    seen[:, :3] = True
    return seen


def test_multi_head_attention_is_redirected_also_for_inference() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).eval()
    hidden = torch.randn(2, LENGTH, 8)
    hidden_positions = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    with torch.no_grad():
        expected = layer(hidden, src_mask=hidden_positions, is_causal=True)
        with _sequences().step(_batch()):
            result = layer(hidden, src_mask=hidden_positions, is_causal=True)
    torch.testing.assert_close(result, expected)
    assert torch.backends.mha.get_fastpath_enabled()


def test_dropout_is_drawn_from_the_generator_and_scaled() -> None:
    hidden, masks = torch.ones(2, LENGTH, 50), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        with _sequences().step(_batch()):
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
    sequences = ContextParallelSession(SequencePlan(batch={1: 0}), ContextGroups())
    with sequences.step((torch.ones(2), torch.arange(LENGTH))) as own:
        _attend(_query())
    assert own[1].tolist() == list(range(LENGTH))
    with pytest.raises(ValueError, match=r"the plan cuts \[1\] of each batch"), sequences.step((torch.ones(2),)):
        pass


def _fail_within_a_step() -> None:
    mask, query = torch.ones(LENGTH, LENGTH).bool(), _query()
    attention = nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)
    with _sequences().step(_batch()):
        scaled_dot_product_attention(query, query, query)
        with sharded_sequences(None):
            scaled_dot_product_attention(query, query, query, attn_mask=mask)
            attention(*[query[:, 0]] * 3, need_weights=True)
            dropout(query, 0.5)
        raise KeyError


def test_nothing_is_redirected_afterwards_nor_where_sequences_are_whole() -> None:
    before = functional.scaled_dot_product_attention, functional.dropout, functional.multi_head_attention_forward
    with pytest.raises(KeyError):
        _fail_within_a_step()
    after = functional.scaled_dot_product_attention, functional.dropout, functional.multi_head_attention_forward
    assert before == after
    assert scaled_dot_product_attention is before[0]


def test_what_would_be_wrong_without_a_word_is_refused() -> None:
    query, mask = _query(), torch.ones(LENGTH, LENGTH).bool()
    attention = nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)
    with _sequences().step(_batch()):
        with pytest.raises(ValueError, match="attn_mask is of this process's positions"):
            scaled_dot_product_attention(query, query, query, attn_mask=mask)
        with pytest.raises(ValueError, match="over a cut sequence it must have 4 dimensions"):
            _attend(query[0])
        with pytest.raises(ValueError, match="need_weights=True computes attention of this process's positions alone"):
            attention(*[query[:, 0]] * 3)
        scaled_dot_product_attention(query, query, query)
    with pytest.raises(RuntimeError, match="sequences were cut, but neither"), _sequences().step(_batch()):
        pass
    with pytest.raises(ValueError, match=r"different numbers of positions: \{'tokens': 9, 'captions': 2\}"):
        _sequences().cut(_batch(), {"tokens": 1, "captions": 0})
    with pytest.raises(RuntimeError, match="came before anything was cut"):
        _sequences().attend_plainly(query, query, query, True, 0.0)


def test_a_loss_of_parts_is_told_from_one_of_the_whole() -> None:
    sequences = _sequences()
    with sequences.step(_batch()):
        _attend(_query())
    with pytest.raises(RuntimeError, match="training_step returned a loss of this process's positions alone"):
        sequences.validate_mean_was_taken("training_step")
    with sequences.step(_batch()):
        _attend(_query())
        assert float(sequence_mean(torch.tensor(6.0), torch.tensor(4))) == 1.5
    sequences.validate_mean_was_taken("training_step")


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Identity()
        self.last = _Pair()


class _Pair(nn.Module):
    def forward(self, hidden: Tensor) -> tuple[Tensor, int]:
        return hidden, 7


def test_plan_is_attached_to_what_exists() -> None:
    network = _Network()
    sequences = _sequences(inputs={"first": {"input": 1}}, outputs={"last": 1})
    handles = attach_plan(network, sequences)
    assert len(handles) == 2
    hidden = torch.randn(2, LENGTH, 3)
    assert network.last(network.first(hidden))[0] is hidden
    with sequences.step(_batch()):
        output, other = network.last(network.first(input=hidden))
        _attend(_query())
    assert torch.equal(output, hidden)
    assert other == 7
    with pytest.raises(ValueError, match="'second' is no submodule of _Network"):
        attach_plan(network, _sequences(outputs={"second": 1}))
    with pytest.raises(
        ValueError, match=r"first takes no argument \['hidden'\], which the plan cuts; it takes \(input"
    ):
        attach_plan(network, _sequences(inputs={"first": {"hidden": 1}}, outputs={"last": 1}))
