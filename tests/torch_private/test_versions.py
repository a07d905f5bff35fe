"""The versions of torch that were tried.

When a test in this folder fails after an update of torch, the function that it names is to be looked at again, before
anything else. When all of them pass, and the whole suite, the version goes into `TRIED_VERSIONS`.
"""

import logging
from collections.abc import Iterator

import pytest
import torch

import autoac
from autoac import torch_private
from tests.small_models import batch, make


@pytest.fixture
def another_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A torch that autoac was not tried with, in a process that has not said so yet."""
    torch_private.note_untried.cache_clear()
    monkeypatch.setattr(torch, "__version__", "99.1.0+cu999")
    yield torch.__version__
    torch_private.note_untried.cache_clear()


def test_this_version_was_tried():
    assert torch_private.is_tried(torch.__version__)
    assert torch.__version__.split("+")[0] in torch_private.TRIED_VERSIONS


def test_an_untried_version_is_noted_once_and_everything_works(
    another_torch: str, caplog: pytest.LogCaptureFixture
):
    model, sample = make(), batch()
    for _ in range(2):
        plan = autoac.plan(model, sample, budget="100GB")
        plan.remove(plan.apply(model))
    [note] = [record for record in caplog.records if record.name == "autoac"]
    assert note.levelno == logging.WARNING
    assert note.getMessage() == (
        "autoac was not tried with torch 99.1.0+cu999, only with 2.13.0, 2.14.1, 2.15.0. It uses private interfaces of "
        "torch, which may have changed: check the plan with plan.verify(model, sample), or install a torch that was "
        "tried."
    )


def test_auto_notes_it_before_a_step_runs(another_torch: str, caplog: pytest.LogCaptureFixture):
    autoac.auto(make(), budget="100GB").remove()
    assert [(record.name, record.levelno) for record in caplog.records] == [("autoac", logging.WARNING)]


def test_a_plan_from_a_file_is_noted_too(another_torch: str, caplog: pytest.LogCaptureFixture):
    model, sample = make(), batch()
    plan = autoac.plan(model, sample, budget="100GB")
    caplog.clear()
    torch_private.note_untried.cache_clear()
    plan.apply(model)
    assert [record.name for record in caplog.records] == ["autoac"]


def test_a_tried_version_is_not_noted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    torch_private.note_untried.cache_clear()
    monkeypatch.setattr(torch, "__version__", torch_private.TRIED_VERSIONS[-1] + "+cpu")
    model, sample = make(), batch()
    autoac.plan(model, sample, budget="100GB").apply(model)
    assert not [record for record in caplog.records if record.name == "autoac"]
