"""Notes on the errors of the user's own step, which keep their types and messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from autoac.step.inputs import without_autocast
from autoac.step.samples import shapes_of
from autoac.step.step import TrainingStep
from autoac_solver.records.errors import AutoacError


def sample_of(step: TrainingStep) -> str:
    """The sample's dtypes and shapes; "" for a callable and for one without tensors."""
    return "" if step.is_whole else shapes_of(step.sample)


def add_note(
    error: BaseException, step: TrainingStep, where: str, planned_for: str = "", is_restored: bool = True
) -> None:
    """Add the sample, where the step failed and what to do to an error of the user's code.

    Args:
        where: such as "in module 'head' while it was recorded".
        planned_for: the sample that a plan was made for, as in `Profile.sample`.
        is_restored: model and sample are as they were before.
    """
    shapes = sample_of(step)
    given = f" with the sample {shapes}" if shapes else ""
    advice = "Does the step run by itself, with this sample?"
    if shapes and planned_for and shapes != without_autocast(planned_for):
        given += f" (the plan was made for {planned_for})"
        advice += " If so, plan for this sample; if not, give the model what the plan was made for."
    state = "; model and sample are as they were" if is_restored else ""
    error.add_note(f"autoac: the step failed {where}{given}{state}. {advice}")


@contextlib.contextmanager
def noted(step: TrainingStep, where: str, planned_for: str, is_restored: bool = True) -> Iterator[None]:
    """Context: errors of the user's code get a note; arguments as for `add_note`."""
    try:
        yield
    except AutoacError:
        raise
    except Exception as error:
        add_note(error, step, where, planned_for, is_restored)
        raise
