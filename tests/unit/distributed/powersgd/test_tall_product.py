import torch
from hypothesis import given, settings, strategies as st

from lightning_dalle.distributed.powersgd.compressor import tall_product

sizes = st.integers(1, 12)


@settings(deadline=None)
@given(sizes, sizes, sizes, st.booleans())
def test_product_is_that_of_the_matrices_in_either_layout(rows: int, columns: int, rank: int, transposed: bool) -> None:
    generator = torch.Generator().manual_seed(rows + 100 * columns)
    shape = (columns, rows) if transposed else (rows, columns)
    matrix = torch.randn(shape, generator=generator, dtype=torch.float64)
    matrix = matrix.T if transposed else matrix
    tall = torch.randn(columns, rank, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(tall_product(matrix, tall), matrix @ tall, rtol=1e-12, atol=1e-12)
