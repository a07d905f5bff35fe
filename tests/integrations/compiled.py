"""What holds after a run of a trainer under its callback with engine compile."""

from __future__ import annotations

from typing import Any

import pytest


def assert_compiled(callback: Any) -> None:
    """The plan is one of compiled regions, and its measured peak as predicted."""
    assert callback.plan is not None
    assert callback.plan.engine == "compile"
    compiled = callback.plan.record.profile.compiled
    assert compiled is not None
    assert all(region.points for region in compiled.regions)
    assert callback.measured_peak_bytes == pytest.approx(callback.plan.predicted_peak_bytes, rel=0.01)
