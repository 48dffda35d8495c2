"""The checker that jaxtyping's import hook puts around every function of the package under pytest."""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def typechecker(function: Callable[..., Any]) -> Callable[..., Any]:
    """Checks shapes and dtypes only: a wrong plain type has to reach the code's own error, which tests look at.

    jaxtyping hands over a stand-in with the signature of the checked function, so its annotations are free to change.
    """
    function.__annotations__ = {
        name: annotation for name, annotation in function.__annotations__.items() if "jaxtyping." in repr(annotation)
    }
    return _check(function) if function.__annotations__ else function
