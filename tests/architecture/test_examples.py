import doctest
import importlib

import pytest

from tests.architecture.tree import modules

WITH_EXAMPLES = [name for name, file in modules().items() if ">>>" in file.read_text()]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_of_docstrings_run(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert outcome.attempted > 0
    assert outcome.failed == 0
