from typing import Any

import pytest

from lightning_dalle.distributed.sequence_plan import SequencePlan


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"outputs": {"last": 1}}, "batch and inputs are both empty"),
        ({"inputs": {"first": {"hidden": 1}}}, "inputs of first are cut, but outputs names no submodule"),
    ],
)
def test_plan_that_cuts_nothing_or_never_joins_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequencePlan(**settings)
