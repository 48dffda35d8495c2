"""Calls of attention and dropout: whoever makes them, they are redirected or refused, and only while this is wanted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from lightning_dalle.distributed.context_parallel.dispatch import redirected

LENGTH = 6


class _Recorder:
    """Counts what it is asked for."""

    def __init__(self) -> None:
        self.is_active = True
        self.attended = 0
        self.dropped = 0

    def is_whole(self, query: Tensor) -> bool:
        return not self.is_active

    def attend_plainly(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, dropout: float) -> Tensor:
        self.attended += 1
        return 2 * value

    def dropout_factors(self, hidden: Tensor, probability: float) -> Tensor:
        self.dropped += 1
        return torch.full_like(hidden, 3.0)


@contextmanager
def _recording() -> Iterator[_Recorder]:
    recorder = _Recorder()
    with redirected(recorder):
        yield recorder


def _query(requires_grad: bool = False) -> Tensor:
    return torch.randn(2, 2, LENGTH, 4, generator=torch.Generator().manual_seed(0)).requires_grad_(requires_grad)


def _by_alias(query: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, query, query)


def _by_module(query: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, query, query)


def _by_operator(query: Tensor) -> Tensor:
    attended: Tensor = torch.ops.aten.scaled_dot_product_attention(query, query, query)
    return attended


def _by_late_import(query: Tensor) -> Tensor:
    names: dict[str, Any] = {}
    exec("from torch.nn.functional import scaled_dot_product_attention as attend", names)
    attended: Tensor = names["attend"](query, query, query)
    return attended


def _under_autocast(query: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return _by_alias(query)


def _in_inference_mode(query: Tensor) -> Tensor:
    with torch.inference_mode():
        return _by_alias(query.clone())


def _in_another_thread(query: Tensor) -> Tensor:
    results: list[Tensor] = []
    thread = Thread(target=lambda: results.append(_by_alias(query)))
    thread.start()
    thread.join()
    return results[0]


CALLS = [_by_alias, _by_module, _by_operator, _by_late_import, _under_autocast, _in_inference_mode, _in_another_thread]


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_attention_is_redirected_by_whatever_name(call: Callable[[Tensor], Tensor], requires_grad: bool) -> None:
    query = _query(requires_grad)
    before = call(query)
    with _recording() as recorder:
        result = call(query)
        recorder.is_active = False
        whole = call(query)
    assert recorder.attended == 1
    torch.testing.assert_close(result.float(), 2 * query, rtol=2**-8, atol=0)
    assert torch.equal(whole, before)
    assert torch.equal(call(query), before)


def test_multi_head_attention_and_fused_layers_are_redirected() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).eval()
    hidden = torch.randn(2, LENGTH, 8)
    with torch.no_grad(), _recording() as recorder:
        layer(hidden)
        nn.MultiheadAttention(8, 2, batch_first=True)(hidden, hidden, hidden, need_weights=False)
    assert recorder.attended == 2
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_within_backward_is_redirected(use_reentrant: bool) -> None:
    query = _query(requires_grad=True)
    recorder = _Recorder()
    with redirected(recorder):
        output = checkpoint(lambda query: dropout(_by_alias(query), 0.5), query, use_reentrant=use_reentrant)
    assert (recorder.attended, recorder.dropped) == (1, 1)
    with redirected(recorder):
        output.sum().backward()
    assert (recorder.attended, recorder.dropped) == (2, 2)
    assert query.grad is not None
    assert torch.equal(query.grad, torch.full_like(query, 6.0))


def test_dropout_is_redirected_where_it_draws() -> None:
    hidden = torch.ones(2, LENGTH, 4)
    with _recording() as recorder:
        changed = hidden.clone()
        assert torch.equal(dropout(hidden, 0.5), 3 * hidden)
        assert dropout(changed, 0.5, inplace=True) is changed
        assert torch.equal(changed, 3 * hidden)
        assert torch.equal(nn.Dropout(0.5)(hidden), 3 * hidden)
        assert recorder.dropped == 3
        assert dropout(hidden, 0.5, training=False) is hidden
        assert torch.equal(dropout(hidden, 0.0), hidden)
        assert not dropout(hidden, 1.0).any()
        assert recorder.dropped == 3


def _refused_calls() -> dict[str, tuple[Callable[[], Any], str]]:
    query, hidden = _query(), torch.ones(2, LENGTH, 4)
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    mask = torch.ones(LENGTH, LENGTH).bool()
    return {
        "mask": (lambda: scaled_dot_product_attention(query, query, query, attn_mask=mask), "attn_mask"),
        "three dimensions": (lambda: _by_alias(query[0]), "must have 4 dimensions"),
        "weights": (lambda: attention(hidden, hidden, hidden), "need_weights=True"),
        "products": (lambda: torch._scaled_dot_product_attention_math(query, query, query), "attends among local"),
        "kernel": (
            lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, query, query),
            "_scaled_dot_product_flash_attention_for_cpu attends among local",
        ),
        "flex": (lambda: flex_attention(query, query, query), "flex_attention attends among local"),
        "vmap": (lambda: torch.vmap(_by_alias)(query.unsqueeze(0)), "torch.vmap"),
        "dropout in vmap": (lambda: torch.vmap(lambda x: dropout(x, 0.5), randomness="same")(hidden), "torch.vmap"),
        "channels": (lambda: nn.Dropout1d()(hidden), "feature_dropout"),
        "channels in place": (lambda: nn.Dropout1d(inplace=True)(hidden), "feature_dropout_"),
        "alpha": (lambda: nn.AlphaDropout()(hidden), "alpha_dropout"),
    }


@pytest.mark.parametrize("name", list(_refused_calls()))
@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_what_cannot_be_redirected_is_refused(name: str) -> None:
    call, message = _refused_calls()[name]
    with _recording() as recorder:
        with pytest.raises((ValueError, RuntimeError), match=message):
            call()
        assert recorder.attended == recorder.dropped == 0
        recorder.is_active = False
        if name != "dropout in vmap":
            call()
    call()


@pytest.mark.parametrize("call", [_by_alias, partial(dropout, p=0.5)], ids=["attention", "dropout"])
@pytest.mark.parametrize("compiled_before", [False, True])
def test_compiled_calls_are_redirected_also_where_they_are_recomputed(
    call: Callable[[Tensor], Tensor], compiled_before: bool
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda query: query * call(query), backend="aot_eager")
    if compiled_before:
        compiled(_query())
    query = _query(requires_grad=True)
    with _recording() as recorder:
        for _ in range(2):
            compiled(_query())
        output = checkpoint(compiled, query, use_reentrant=False)
        output.sum().backward()
    torch._dynamo.reset()
    assert recorder.attended + recorder.dropped == 4
    factor = 2 if call is _by_alias else 3
    torch.testing.assert_close(output, factor * query.square())


def test_nothing_is_redirected_after_an_error() -> None:
    before = _by_alias(_query())
    with pytest.raises(KeyError), _recording():
        raise KeyError
    assert torch.equal(_by_alias(_query()), before)
    assert torch.backends.mha.get_fastpath_enabled()
