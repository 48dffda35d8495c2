"""The parts of PowerSGD that run on a device, against the CPU; all of it is skipped where there is no CUDA."""

import os

import pytest
import torch

from lightning_dalle.distributed.powersgd.compressor import orthonormal_basis, tall_product

# Another device can be named to try the tests themselves where there is no CUDA.
DEVICE = os.environ.get("LIGHTNING_DALLE_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("transposed", [False, True])
def test_approximation_of_a_matrix(transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(40, 70, generator=generator, dtype=torch.float64)
    q = torch.randn(40 if transposed else 70, 5, generator=generator, dtype=torch.float64)
    approximations = []
    for device in ("cpu", DEVICE):
        placed = matrix.to(device).T if transposed else matrix.to(device)
        # A basis is unique up to signs, the projection on it is unique.
        basis = orthonormal_basis(tall_product(placed, q.to(device)))
        approximations.append((basis @ tall_product(placed.T, basis).T).cpu())
    torch.testing.assert_close(approximations[0], approximations[1], rtol=1e-9, atol=1e-11)
