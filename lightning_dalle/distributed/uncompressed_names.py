"""Which parameters keep their gradients in 32 bits on the wire: embeddings, and what is named."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn


def uncompressed_names(module: nn.Module, patterns: Iterable[str] = ()) -> frozenset[str]:
    """Names, as `named_parameters` gives them, of embeddings, of what is tied to one, and of what a pattern matches.

    Vectors need no naming: they are never compressed.

    Args:
        patterns: Shell-style, against the whole name, as `*_head.weight`.

    Raises:
        ValueError: If a pattern matches no parameter.

    Example:
        >>> network = nn.ModuleDict({"tokens": nn.Embedding(9, 4), "inner": nn.Linear(4, 4), "head": nn.Linear(4, 9)})
        >>> sorted(uncompressed_names(network, ["head.*"]))
        ['head.bias', 'head.weight', 'tokens.weight']
    """
    embeddings = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)}
    excluded = {name for name, parameter in module.named_parameters() if id(parameter) in embeddings}
    places = dict(module.named_parameters(remove_duplicate=False))
    first_names = {id(parameter): name for name, parameter in module.named_parameters()}
    for pattern in patterns:
        matched = [parameter for name, parameter in places.items() if fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(f"pattern {pattern!r} matches no parameter; names are such as {list(places)[:3]}")
        excluded |= {first_names[id(parameter)] for parameter in matched}
    return frozenset(excluded)
