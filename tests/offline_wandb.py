"""W&B without a server, and without traces in the process that ran it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import wandb


@contextmanager
def offline_wandb() -> Iterator[None]:
    """Ends W&B's service process and takes back the variables that it and Lightning's logger set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        try:
            yield
        finally:
            wandb.teardown()
            os.environ.pop("WANDB_SERVICE", None)
