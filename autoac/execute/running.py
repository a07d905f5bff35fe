"""Contexts of a region's first and second run, in which planned modules inside of the region run without their plan."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


class _Running(threading.local):
    """Nesting depths of runs in this thread: a backward in a second run may begin another."""

    first = 0
    second = 0


_running = _Running()


@contextlib.contextmanager
def first_run() -> Iterator[None]:
    """Context in which a region's code runs in forward."""
    _running.first += 1
    try:
        yield
    finally:
        _running.first -= 1


@contextlib.contextmanager
def second_run() -> Iterator[None]:
    """Context in which a region's code runs again for its backward."""
    _running.second += 1
    try:
        yield
    finally:
        _running.second -= 1


def in_first_run() -> bool:
    """Whether this code is part of a region's first run."""
    return not torch.compiler.is_compiling() and _running.first > 0


def in_second_run() -> bool:
    """Whether this code is part of a region's second run: module calls in it do not count as the step's."""
    return not torch.compiler.is_compiling() and _running.second > 0
