"""The mark that makes a test a cell of the docs' compatibility table, see `tests/features/compatibility.py`."""

import pytest


def feature(name: str, engine: str = "", cell: str = "yes") -> pytest.MarkDecorator:
    """This test shows what a feature of PyTorch's checkpoint engine is under a plan.

    Args:
        name: of the feature, a row of the table.
        engine: of the column; left out, the test is parametrised by `engine`, and is a cell for each.
        cell: what the test shows: "yes", works as in plain torch; "refused", an error says so.
    """
    return pytest.mark.feature(name, engine=engine, cell=cell)
