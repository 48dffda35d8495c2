"""Steps of sessions on two ranks against the same steps on one process, in double precision."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from lightning_dalle import ContextGroups, ContextParallelSession, SequencePlan
from lightning_dalle.distributed.context_parallel.collectives import is_replicated, validate_batches_agree
from lightning_dalle.distributed.context_parallel.comm import init_context_groups
from lightning_dalle.distributed.context_parallel.hooks import attach_plan
from tests.ranks import run_ranks

LENGTH, WIDTH, HEADS = 10, 8, 2
# Double precision, sums of a few dozen terms of order 1 in another order.
BAR = 1e-12


def _attend(query: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, query, query)


class Block(nn.Module):
    """Attends by a reference that it keeps, drops out, and recomputes both within itself."""

    def __init__(self, dropout: float, causal: bool, recompute: bool) -> None:
        super().__init__()
        self.attend: Callable[..., Tensor] = scaled_dot_product_attention
        self.causal, self.recompute = causal, recompute
        self.projections, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.recompute:
            return self.attended(hidden)
        output: Tensor = checkpoint(self.attended, hidden, use_reentrant=False)
        return output

    def attended(self, hidden: Tensor) -> Tensor:
        query, key, value = self.projections(hidden).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = self.attend(query, key, value, is_causal=self.causal).transpose(1, 2).flatten(2)
        return hidden + self.dropout(attended)


class Network(nn.Module):
    """Two sequences, and a vector from a third that every process sees whole."""

    def __init__(self, dropout: float = 0.0, causal: bool = True, recompute: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text, self.caption = (Block(dropout, causal, recompute) for _ in range(3))
        self.double()

    def forward(self, image: Tensor, text: Tensor, caption: Tensor) -> Tensor:
        hidden = self.text(text).mean(1, keepdim=True) + self.caption(caption).mean(1, keepdim=True)
        output: Tensor = self.image(image + hidden)
        return output


INPUTS = {"image": {"hidden": 1}, "text": {"hidden": 1}}
PLAN: dict[str, Any] = {"inputs": INPUTS, "outputs": {"image": 1, "text": 1}, "unsharded": ("caption",)}


def _inputs(text_length: int = 6, caption_length: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(3, length, WIDTH, dtype=torch.float64, generator=generator)
        for length in (LENGTH, text_length, caption_length)
    ]


def _run(
    network: Network, session: ContextParallelSession, inputs: list[Tensor], steps: int = 1
) -> dict[str, dict[str, Tensor]]:
    """Return output and gradients of the last of several steps."""
    handles = attach_plan(network, session)
    for _ in range(steps):
        network.zero_grad()
        torch.manual_seed(2)
        with session.step(inputs) as local:
            output = network(*local)
            weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
            loss = (weights * output).sum()
        with session.active():
            loss.backward()
    for handle in handles:
        handle.remove()
    gradients = {name: part.grad.clone() for name, part in network.named_parameters() if part.grad is not None}
    if session.groups.context is not None:
        for gradient in gradients.values():
            distributed.all_reduce(gradient)
            gradient /= session.groups.size
    return {"output": {"": output.detach()}, "gradients": gradients}


# Arguments of the network, settings of the plan and the session, lengths of text and caption.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "two lengths": ({}, {}, {}, ()),
    "two lengths with dropout": ({"dropout": 0.3}, {}, {}, ()),
    "text as long as the image": ({"dropout": 0.3}, {}, {}, (LENGTH,)),
    "caption as long as a shard": ({"dropout": 0.3, "recompute": False}, {}, {}, (6, LENGTH // 2)),
    "contiguous": ({"dropout": 0.3}, {}, {"layout_kind": "contiguous"}, ()),
    "prefix": ({}, {"prefix_length": 3}, {}, ()),
    "bidirectional": ({"causal": False}, {}, {}, ()),
}


def _case(name: str, groups: ContextGroups, steps: int = 1) -> dict[str, dict[str, Tensor]]:
    arguments, plan, options, lengths = CASES[name]
    session = ContextParallelSession(SequencePlan(**PLAN, **plan), groups, **options)
    return _run(Network(**arguments), session, _inputs(*lengths), steps)


def _cases_on_rank(rank: int, ulysses_degree: int) -> dict[str, Any]:
    groups = init_context_groups(2, 2, ulysses_degree, "cpu")
    # The second step is like the first, although its calls are not validated any more.
    return {name: _case(name, groups, steps=2) for name in CASES}


@pytest.mark.parametrize("ulysses_degree", [1, 2])
def test_steps_on_two_ranks_are_those_of_one_process(ulysses_degree: int) -> None:
    expected = {name: _case(name, ContextGroups()) for name in CASES}
    for answers in run_ranks(_cases_on_rank, 2, ulysses_degree, timeout=120):
        for name, answer in answers.items():
            for kind, tensors in answer.items():
                for part, tensor in tensors.items():
                    error = (tensor - expected[name][kind][part]).abs().max()
                    assert error <= BAR, f"{name}: {kind} of {part}"


def test_settings_of_the_plan_and_the_module_change_the_result() -> None:
    outputs = {name: _case(name, ContextGroups())["output"][""] for name in CASES}
    for name in ("two lengths with dropout", "prefix", "bidirectional"):
        assert not torch.allclose(outputs[name], outputs["two lengths"]), name


def _layouts_on_rank(rank: int) -> dict[str, list[int]]:
    world = distributed.group.WORLD
    groups = ContextGroups(world, ring=world)
    plan = SequencePlan(batch={"x": 0})
    sessions = {kind: ContextParallelSession(plan, groups, kind) for kind in ("zigzag", "contiguous")}
    return {kind: session.shard({"x": torch.arange(8)}, {"x": 0})["x"].tolist() for kind, session in sessions.items()}


def test_layout_kind_decides_which_positions_a_rank_holds() -> None:
    assert run_ranks(_layouts_on_rank, 2) == [
        {"zigzag": [0, 1, 6, 7], "contiguous": [0, 1, 2, 3]},
        {"zigzag": [2, 3, 4, 5], "contiguous": [4, 5, 6, 7]},
    ]


def _sequence_first(groups: ContextGroups) -> Tensor:
    """Hidden states of a module that holds positions in the first dimension."""
    hidden = torch.ones(LENGTH, 3, WIDTH)
    session = ContextParallelSession(SequencePlan(batch={"x": 0}, sequence_dim=0), groups)
    torch.manual_seed(3)
    hidden[:] = torch.rand(LENGTH, 1, 1) + 1
    with session.step({"x": hidden}) as local:
        dropped = nn.functional.dropout(local["x"], 0.5)
        _attend(dropped.permute(1, 0, 2).unsqueeze(1))
    return session.gather(dropped, 0)


def _sequence_first_on_rank(rank: int) -> Tensor:
    world = distributed.group.WORLD
    return _sequence_first(ContextGroups(world, ring=world))


def test_dropout_finds_positions_in_the_dimension_of_the_plan() -> None:
    expected = _sequence_first(ContextGroups())
    assert 0 < (expected == 0).float().mean() < 1
    for dropped in run_ranks(_sequence_first_on_rank, 2):
        assert torch.equal(dropped, expected)


def _mistakes_on_rank(rank: int) -> dict[str, str]:
    world = distributed.group.WORLD
    assert world is not None
    groups = ContextGroups(world, ring=world)
    session = functools.partial(ContextParallelSession, SequencePlan(batch={"x": 1}), groups)
    hidden = torch.randn(2, 1, 10, 4, generator=torch.Generator().manual_seed(0))
    batch = {"x": torch.arange(20).view(2, 10)}

    def replicated_query() -> None:
        with session().step(batch):
            _attend(hidden[:, :, :5])

    def replicated_hidden_states() -> None:
        with session().step(batch):
            nn.functional.dropout(hidden[:, 0, :5], 0.5)

    def vector_as_wide_as_a_shard() -> None:
        with session().step(batch):
            nn.functional.dropout(torch.ones(2, 5), 0.5)

    def shards_of_one_length() -> None:
        own = session()
        with own.step({"x": torch.zeros(2, 11)}):
            own.shard({"y": torch.zeros(2, 10)}, {"y": 1})
            shard = hidden[:, :, : own.positions(10, "cpu").numel()] + rank
            _attend(shard)

    def other_batches_in_the_second_step() -> None:
        own = session()
        for number in range(2):
            with own.step({"x": batch["x"] + number * rank, "caption": ["a"]}) as local:
                _attend(torch.as_tensor(local["x"]).double().view(2, 1, 5, 1))

    def other_captions() -> None:
        validate_batches_agree({"x": torch.zeros(3), "caption": [str(rank)]}, world, torch.device("cpu"))

    def whole_or_shard_recomputed() -> None:
        own = ContextParallelSession(SequencePlan(**PLAN), groups)
        _run(Network(), own, _inputs(6, LENGTH // 2))

    answers = {}
    for mistake in (
        whole_or_shard_recomputed,
        replicated_query,
        replicated_hidden_states,
        vector_as_wide_as_a_shard,
        shards_of_one_length,
        other_batches_in_the_second_step,
        other_captions,
    ):
        try:
            mistake()
            answers[mistake.__name__] = "nothing"
        except ValueError as error:
            answers[mistake.__name__] = str(error)
    return answers


MESSAGES = {
    "whole_or_shard_recomputed": "5 positions are recomputed, which may be a whole sequence or a shard",
    "replicated_query": "query of shape (2, 1, 5, 4) is the same on all processes",
    "replicated_hidden_states": "hidden states of dropout of shape (2, 5, 4) is the same on all processes",
    "vector_as_wide_as_a_shard": "dropout got a tensor of shape (2, 5), whose last dimension",
    "shards_of_one_length": "sequences of lengths [11, 10] have shards of one length",
    "other_batches_in_the_second_step": "got different batches",
    "other_captions": "got different batches",
}


def test_mistakes_are_refused_on_all_ranks() -> None:
    for answers in run_ranks(_mistakes_on_rank, 2):
        assert answers.keys() == MESSAGES.keys()
        for mistake, message in MESSAGES.items():
            assert message in answers[mistake], mistake


def _agreement_on_rank(rank: int) -> dict[str, bool]:
    world = distributed.group.WORLD
    assert world is not None
    tensor = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    swapped = tensor.clone()
    if rank:
        swapped[0, 0], swapped[0, 1] = tensor[0, 1], tensor[0, 0]
    return {
        "the same": is_replicated(tensor, 1, world),
        "constant along the dimension": is_replicated(torch.ones(3, 4), 1, world),
        "two values swapped on one rank": is_replicated(swapped, 1, world),
        "of another type on one rank": is_replicated(tensor.to(torch.float16 if rank else torch.bfloat16), 1, world),
    }


def test_replicated_tensors_are_told_from_shards() -> None:
    for answers in run_ranks(_agreement_on_rank, 2):
        assert answers.pop("the same") is True
        assert not any(answers.values()), answers
