"""The compressor on two and four ranks, each a replica."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from lightning_dalle.distributed.powersgd import compressor as compressor_module
from lightning_dalle.distributed.powersgd.compressor import PowerSGD
from lightning_dalle.distributed.powersgd.config import PowerSGDConfig
from lightning_dalle.distributed.powersgd.plan import MatrixPlan
from tests.distributed.machines import compressor_of, projected_mean, step
from tests.ranks import run_ranks

SHAPES: dict[str, tuple[int, ...]] = {
    "wide": (6, 40),
    "tall": (40, 6),
    "square": (12, 12),
    "convolution": (8, 4, 3, 3),
    "bias": (7,),
    "scalar": (),
    "empty": (0, 5),
    "excluded": (20, 20),
}
NEVER_TOO_COSTLY = 0.0


def _gradients(rank: int, number: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES.values()]


def _run_steps(rank: int, settings: dict[str, Any], order: list[int], dtype: torch.dtype, steps: int) -> list[Any]:
    replica = order[rank]
    compressor = compressor_of(
        dict(zip(SHAPES, _gradients(0, 0, dtype), strict=True)), settings, excluded=frozenset({"excluded"})
    )
    return [step(compressor, _gradients(replica, number, dtype)) for number in range(steps)]


def _many_cases(rank: int, cases: list[tuple[Any, ...]]) -> list[list[Any]]:
    return [_run_steps(rank, *case) for case in cases]


def _by_step(by_rank: list[list[Any]]) -> list[tuple[Any, ...]]:
    return list(zip(*by_rank, strict=True))


@pytest.mark.parametrize("world_size", [2, 4])
def test_compressor_equals_the_oracle_and_keeps_what_it_misses(world_size: int) -> None:
    order = list(range(world_size))
    double = torch.float64
    cases = [
        (
            {"matrix_approximation_rank": rank, "warm_start": warm, "min_compression_rate": NEVER_TOO_COSTLY},
            order,
            double,
            3,
        )
        for rank, warm in itertools.product([1, 3, 99], [False, True])
    ]
    for case, by_rank in zip(cases, zip(*run_ranks(_many_cases, world_size, cases), strict=True), strict=True):
        initial_q = None
        for ranks in _by_step(list(by_rank)):
            for index, (name, shape) in enumerate(SHAPES.items()):
                before = [answer["before"][index] for answer in ranks]
                means = [answer["means"][index] for answer in ranks]
                mean = torch.stack(before).mean(dim=0)
                for other in means[1:]:
                    torch.testing.assert_close(other, means[0], rtol=0, atol=0)
                if name in ("bias", "scalar", "empty", "excluded"):
                    torch.testing.assert_close(means[0], mean, rtol=1e-6, atol=1e-6)
                    assert ranks[0]["after"][index] is None
                    continue
                after = torch.stack([answer["after"][index] for answer in ranks])
                # The sum over replicas of what is left is what there was less the gradient that was applied.
                identity = torch.stack(before).sum(dim=0) - world_size * means[0]
                torch.testing.assert_close(after.sum(dim=0), identity, rtol=1e-12, atol=1e-12)
                if case[0]["matrix_approximation_rank"] == 99:
                    torch.testing.assert_close(means[0], mean, rtol=1e-12, atol=1e-12)
                if initial_q is not None and len(shape) == 2:
                    q = initial_q[name]
                    expected = projected_mean(before, q, q.shape[1])
                    torch.testing.assert_close(means[0], expected, rtol=1e-9, atol=1e-9)
            total = torch.stack([mean.square().sum() for mean in ranks[0]["means"]]).sum().sqrt()
            assert ranks[0]["norm"] == pytest.approx(float(total), rel=1e-12)
            # Before the step; with a warm start it changes in it.
            initial_q = ranks[0]["initial_q"]


def _low_rank(rank: int) -> Any:
    generator = torch.Generator().manual_seed(rank)
    shared = torch.randn(30, 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    gradient = shared @ torch.randn(3, 50, generator=generator, dtype=torch.float64)
    compressor = compressor_of({"weight": gradient}, {"matrix_approximation_rank": 3})
    answer = step(compressor, [gradient])
    generous = compressor_of({"weight": gradient}, {"matrix_approximation_rank": 8})
    return gradient, answer, step(generous, [gradient])


def test_gradient_of_at_most_the_rank_comes_through_exactly() -> None:
    ranks = run_ranks(_low_rank, 2)
    mean = torch.stack([gradient for gradient, _, _ in ranks]).mean(dim=0)
    for _, *answers in ranks:
        for answer in answers:
            # The identity that is added moves the basis by 1e-6.
            torch.testing.assert_close(answer["means"][0], mean, rtol=1e-4, atol=1e-4)
            assert answer["errors"]["weight"] < 1e-4


def test_runs_are_reproducible_and_the_order_of_ranks_is_rounding() -> None:
    settings = {"matrix_approximation_rank": 2, "min_compression_rate": NEVER_TOO_COSTLY}
    orders = [[0, 1], [0, 1], [1, 0]]
    cases = [(settings, order, torch.float32, 3) for order in orders]
    first, again, swapped = zip(*run_ranks(_many_cases, 2, cases), strict=True)
    for answer, same, other in zip(first[0], again[0], swapped[0], strict=True):
        torch.testing.assert_close(same["means"], answer["means"], rtol=0, atol=0)
        # Two numbers add up to the same in either order.
        torch.testing.assert_close(other["means"], answer["means"], rtol=0, atol=0)
    wide = [(settings, order, torch.float32, 3) for order in ([0, 1, 2, 3], [2, 0, 3, 1])]
    straight, mixed = zip(*run_ranks(_many_cases, 4, wide), strict=True)
    for answer, other in zip(straight[0], mixed[0], strict=True):
        torch.testing.assert_close(other["means"], answer["means"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world_size", [2, 4])
def test_sixteen_bits_on_the_wire_cost_rounding_only(world_size: int) -> None:
    order = list(range(world_size))
    common = {"matrix_approximation_rank": 3, "min_compression_rate": NEVER_TOO_COSTLY, "error_feedback": False}
    cases = [({**common, "wire_format": name}, order, torch.float32, 1) for name in ("fp32", "bf16", "1-6-9")]
    exact, bfloat, paper = zip(*run_ranks(_many_cases, world_size, cases), strict=True)
    for (answer,), (other,) in [*zip(exact, bfloat, strict=True), *zip(exact, paper, strict=True)]:
        assert other["after"] == [None] * len(SHAPES)
        for index, name in enumerate(SHAPES):
            mean, rough = answer["means"][index], other["means"][index]
            if name in ("bias", "scalar", "empty", "excluded"):
                # The order of the sum depends on the message that the tensor is part of.
                torch.testing.assert_close(rough, mean, rtol=1e-6, atol=1e-6)
            else:
                # Seven or nine bits of fraction, in both P and Q; a basis moves more than its products.
                assert (rough - mean).norm() < 0.05 * mean.norm()
                assert not torch.equal(rough, mean)


def _rejected(rank: int, value: float) -> Any:
    compressor = compressor_of(
        {"weight": torch.zeros(20, 30), "bias": torch.zeros(5)}, {"matrix_approximation_rank": 2}
    )
    first = step(compressor, [torch.ones(20, 30) * (rank + 1), torch.ones(5)])
    spoiled = torch.full((20, 30), 0.5)
    bias = torch.ones(5)
    if rank == 1:
        (spoiled if value != 7 else bias)[0] = torch.nan if value == 7 else value
    second = step(compressor, [spoiled, bias])
    third = step(compressor, [torch.zeros(20, 30), torch.zeros(5)])
    return first, second, third


# 7 stands for a NaN in the uncompressed bias instead of the matrix.
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 7.0])
def test_value_that_is_not_finite_on_one_rank_stops_all_and_spoils_no_healthy_buffer(value: float) -> None:
    healthy, spoiled = run_ranks(_rejected, 2, value)
    for first, second, third in (healthy, spoiled):
        assert first["finite"]
        assert third["finite"]
        assert not second["finite"]
        assert second["norm"] == float("inf")
    # A healthy buffer keeps error and gradient; a spoiled one starts again.
    torch.testing.assert_close(healthy[1]["after"][0], healthy[1]["before"][0], rtol=0, atol=0)
    assert (spoiled[1]["after"][0] is None) == (value != 7)
    kept = [ranks[2]["before"][0] for ranks in (healthy, spoiled)]
    assert all(buffer.isfinite().all() for buffer in kept)
    left = torch.stack([ranks[2]["after"][0] for ranks in (healthy, spoiled)]).sum(dim=0)
    torch.testing.assert_close(left, torch.stack(kept).sum(dim=0) - 2 * healthy[2]["means"][0], rtol=1e-5, atol=1e-5)


def _overflowing(rank: int) -> Any:
    compressor = compressor_of({"weight": torch.zeros(20, 30)}, {"matrix_approximation_rank": 2})
    return step(compressor, [torch.full((20, 30), 3e38)])


def test_overflow_of_a_product_is_clamped_and_no_nan_comes_out() -> None:
    for answer in run_ranks(_overflowing, 2):
        assert all(mean.isfinite().all() for mean in answer["means"])
        assert answer["after"][0].isfinite().all()


def _unused(rank: int) -> Any:
    names = {"nobody": torch.zeros(20, 30), "one": torch.zeros(20, 30), "bias": torch.zeros(5), "other": torch.zeros(5)}
    compressor = compressor_of(names, {"matrix_approximation_rank": 20, "min_compression_rate": NEVER_TOO_COSTLY})
    mine: list[Tensor | None] = [None, None, None, None]
    if rank == 0:
        mine[1], mine[2] = torch.ones(20, 30), torch.ones(5)
    return step(compressor, mine)["means"]


def test_tensor_that_no_rank_used_has_no_gradient() -> None:
    for means in run_ranks(_unused, 2):
        assert means[0] is None
        assert means[3] is None
        torch.testing.assert_close(means[1], torch.full((20, 30), 0.5))
        torch.testing.assert_close(means[2], torch.full((5,), 0.5))


def _first_steps(rank: int) -> Any:
    compressor = compressor_of(
        {"weight": torch.zeros(20, 30)}, {"matrix_approximation_rank": 1, "start_powersgd_iter": 2}
    )
    answers = []
    for number in range(3):
        gradient = torch.randn(20, 30, generator=torch.Generator().manual_seed(2 * number + rank))
        answer = step(compressor, [gradient])
        answers.append(
            (
                gradient,
                answer["means"][0],
                compressor.communication.bytes_sent,
                compressor.communication.bytes_uncompressed,
            )
        )
    return answers


def test_first_steps_are_uncompressed_and_bytes_are_counted() -> None:
    by_rank = run_ranks(_first_steps, 2)
    for number, (first, second) in enumerate(zip(*by_rank, strict=True)):
        mean = (first[0] + second[0]) / 2
        assert torch.equal(first[1], second[1])
        assert torch.allclose(first[1], mean, atol=1e-6) == (number < 2)
    # Two flags, then 600 numbers, or P of 20 and Q of 30; between two ranks each number crosses once.
    sent = [answer[2] for answer in by_rank[0]]
    assert sent == [4 * 602, 8 * 602, 8 * 602 + 4 * (2 + 20) + 4 * 30]
    assert [answer[3] for answer in by_rank[0]] == [4 * 600, 8 * 600, 12 * 600]


def _compact_buffer(rank: int) -> Any:
    answers = []
    for name in ("fp32", "bf16", "1-6-9"):
        compressor = compressor_of(
            {"weight": torch.zeros(20, 30)}, {"matrix_approximation_rank": 1, "error_feedback_format": name}
        )
        gradient = torch.randn(20, 30, generator=torch.Generator().manual_seed(rank))
        answers.append((step(compressor, [gradient])["after"][0], compressor.error_feedback.num_bytes))
    return answers


def test_error_feedback_can_be_kept_in_sixteen_bits() -> None:
    for (exact, exact_bytes), (bfloat, bytes_of_bfloat), (paper, bytes_of_paper) in run_ranks(_compact_buffer, 2):
        assert exact_bytes == 2 * bytes_of_bfloat == 2 * bytes_of_paper == 4 * 600
        torch.testing.assert_close(bfloat, exact.to(torch.bfloat16).float(), rtol=0, atol=0)
        # Half a unit in the last of nine bits.
        torch.testing.assert_close(paper, exact, rtol=2**-10, atol=0)


def test_error_feedback_keeps_the_memory_of_the_gradient() -> None:
    assert run_ranks(_memory_of_error, 2) == [True, True]


def _memory_of_error(rank: int) -> bool:
    compressor = compressor_of({"weight": torch.zeros(20, 30)}, {"matrix_approximation_rank": 1})
    gradient = torch.randn(20, 30)
    address = gradient.data_ptr()
    compressor.accept(compressor.reduce([gradient]), [gradient])
    error = compressor.error_feedback.take(0)
    return error is not None and error.data_ptr() == address and compressor.error_feedback.num_bytes == 0


def _local_p(rank: int) -> tuple[Tensor, Tensor]:
    gradient = torch.randn(40, 24, generator=torch.Generator().manual_seed(rank)).bfloat16()
    compressor = compressor_of({"weight": gradient}, {"matrix_approximation_rank": 2, "start_powersgd_iter": 0})
    (matrix,) = compressor.plan.matrices
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compressor_module, "product_dtype", lambda dtype, device: torch.float32)
        p = compressor.local_p(matrix, gradient)
    return p, matrix.matrix_of(gradient).float() @ compressor.initial_q["weight"]


def test_where_bfloat16_is_slow_its_gradients_are_multiplied_in_float32() -> None:
    for p, expected in run_ranks(_local_p, 2):
        # A product in bfloat16 would be off by 2**-9 of the sums of 24 or 40 terms of about 1.
        torch.testing.assert_close(p, expected, atol=1e-5, rtol=0)


def test_seed_and_shard_choose_the_random_q() -> None:
    assert run_ranks(_random_q, 1) == [(True, False, False)]


def _random_q(rank: int) -> tuple[bool, ...]:
    group = distributed.group.WORLD
    assert group is not None
    plans = {"weight": torch.zeros(20, 30)}
    matrix = MatrixPlan(0, "weight", 20, 30, 2, transposed=False)
    first = PowerSGD(plans, PowerSGDConfig(seed=1), group)._draw_q(matrix, 0)
    others = [
        PowerSGD(plans, PowerSGDConfig(seed=seed), group)._draw_q(matrix, shard)
        for seed, shard in ((1, 0), (2, 0), (1, 1))
    ]
    return tuple(torch.equal(first, other) for other in others)
