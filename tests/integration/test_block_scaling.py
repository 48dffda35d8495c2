"""What scales of blocks keep of gradients that one global scale loses."""

import pytest

from tests.benchmarks.block_scaling import DEPTH, SETTLING, train
from tests.foreign_module import LIGHTNING_WARNINGS

# Both scales begin too high, so that the first updates are skipped.
pytestmark = [*LIGHTNING_WARNINGS, pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")]


def test_a_global_scale_loses_gradients_that_scales_of_blocks_keep() -> None:
    updates = SETTLING + 10
    lost, kept = train("global", updates).zero_shares[-1], train("per block", updates).zero_shares[-1]
    assert len(lost) == len(kept) == DEPTH
    assert max(lost) >= 0.3
    assert max(kept) < 0.001
