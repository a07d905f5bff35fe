"""The versions of torch that these interfaces were tried with."""

from __future__ import annotations

import functools
import logging

import torch

TRIED_VERSIONS = ("2.13.0", "2.14.1", "2.15.0")
"""Releases with which all tests pass; local parts ("+cpu") do not matter."""


def is_tried(version: str) -> bool:
    """Whether autoac was tried with this version of torch."""
    return version.partition("+")[0] in TRIED_VERSIONS


@functools.cache
def note_untried() -> None:
    """Log one warning per process if its torch was not tried."""
    if not is_tried(torch.__version__):
        logging.getLogger("autoac").warning(
            "autoac was not tried with torch %s, only with %s. It uses private interfaces of torch, which may have "
            "changed: check the plan with plan.verify(model, sample), or install a torch that was tried.",
            torch.__version__,
            ", ".join(TRIED_VERSIONS),
        )
