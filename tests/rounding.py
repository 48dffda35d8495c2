"""How much a result in low precision may differ from the exact one: a few times what plain code loses.

A bar that is written as a number holds on the processor that it was measured on: another one sums in another order and
fuses other products. So a test computes three results of the same inputs: its own, the exact one in float64, and a
plain one in the type of its own. The bar is a small multiple of the plain one's loss, so it belongs to machine and
inputs.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

# The largest of many rounding errors varies with the order of the sums by about two; a lost term costs hundreds.
FACTOR = 4.0

Result: TypeAlias = "Tensor | float | Sequence[Result] | Mapping[str, Any]"


def largest_error(actual: Tensor, exact: Tensor) -> float:
    """Return the largest difference, infinite where one of both is not a number."""
    difference = (actual.detach().double() - exact.detach().double()).abs()
    return difference.nan_to_num(nan=torch.inf).max().item() if difference.numel() else 0.0


def rounding_bar(plain: Tensor, exact: Tensor, factor: float = FACTOR) -> float:
    """Return the largest error that rounding explains.

    To the multiple of the plain code's loss comes a floor, for plain code that is exact by luck. In units in the last
    place of the largest value it is four in single precision, and a half in half precision, which sums in single and
    rounds the result.

    Args:
        plain: What plain code in the type under test makes of the inputs; its type gives the units.
        exact: What float64 makes of the very same (already rounded) inputs.
        factor: How many times the loss of plain code. More than the usual needs a reason beside it.
    """
    assert exact.dtype == torch.float64
    epsilon = torch.finfo(plain.dtype).eps
    largest = exact.detach().abs().max().item() if exact.numel() else 0.0
    loss = largest_error(plain, exact)
    assert loss <= epsilon**0.5 * largest, f"plain code is off by {loss:.2e} of {largest:.2e}: that is no rounding"
    return factor * loss + (4 if plain.dtype == torch.float32 else 0.5) * epsilon * largest


def assert_only_rounded(actual: Result, plain: Result, exact: Result, *, factor: float = FACTOR) -> None:
    """Assert that each tensor of a result differs from the exact one by no more than its `rounding_bar`.

    Lists of numbers, such as the losses of a training, count as one tensor in single precision.
    """
    ours, theirs, references = (dict(_leaves(result)) for result in (actual, plain, exact))
    assert ours.keys() == theirs.keys() == references.keys()
    failed = []
    for name, value in ours.items():
        reference, other = references[name].double(), theirs[name]
        assert value.shape == reference.shape, f"{name} has shape {value.shape} instead of {reference.shape}"
        bar = rounding_bar(other.float() if other.dtype == torch.float64 else other, reference, factor)
        error = largest_error(value, reference)
        if not error <= bar:
            failed.append(f"{name or 'the result'} is off by {error:.2e}, and rounding explains {bar:.2e}")
    assert not failed, "; ".join(failed)


def flattened(state: Mapping[str, Tensor]) -> Tensor:
    """Return all tensors as one vector, where the largest error of small ones alone would be luck."""
    return torch.cat([state[name].flatten() for name in sorted(state)])


def _leaves(result: Result, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(result, Tensor):
        yield name, result
    elif isinstance(result, Mapping):
        for key, part in result.items():
            yield from _leaves(part, f"{name}.{key}" if name else key)
    elif isinstance(result, Sequence) and not all(isinstance(part, float) for part in result):
        for place, part in enumerate(result):
            yield from _leaves(part, f"{name}[{place}]")
    else:
        yield name, torch.as_tensor(result, dtype=torch.float64)
