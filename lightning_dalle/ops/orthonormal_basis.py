"""An orthonormal basis of a matrix's columns by Householder reflections (Ramesh et al. 2021, appendix E)."""

import torch
from jaxtyping import Float
from torch import Tensor

RELATIVE_SHIFT = 1e-6
"""Of the identity that is added first, against the largest entry; absolute, it would outweigh small gradients."""


def orthonormal_basis(matrix: Float[Tensor, "rows rank"]) -> Float[Tensor, "rows rank"]:
    """Orthonormal columns whose span holds the matrix's columns; columns that depend on others are replaced.

    At least single precision, whatever the input's. Needs `rank <= rows` and finite entries. A matrix of zeros gives
    the first columns of the identity.

    Example:
        >>> basis = orthonormal_basis(torch.randn(6, 3))
        >>> bool(torch.allclose(basis.T @ basis, torch.eye(3), atol=1e-6))
        True
    """
    shifted = matrix.to(torch.promote_types(matrix.dtype, torch.float32), copy=True)
    if shifted.numel():
        shifted.diagonal().add_(RELATIVE_SHIFT * shifted.abs().max())
    # LAPACK and cuSOLVER factor by Householder reflections.
    return torch.linalg.qr(shifted).Q
