import pytest

from lightning_dalle.distributed.context_parallel.plan import SequencePlan


def test_plan_that_cuts_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="batch and inputs are both empty"):
        SequencePlan(outputs={"last": 1})
