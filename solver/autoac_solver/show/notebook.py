"""HTML of records for Jupyter; importing this module registers it."""

from __future__ import annotations

import pandas as pd

from autoac_solver.draw.html import ENVIRONMENT, shown, svg, table
from autoac_solver.draw.pictures import draw_bars
from autoac_solver.plan import planning  # noqa: F401  (what makes profiles know their peaks)
from autoac_solver.plan.recorded.step import step_of
from autoac_solver.records.asked import answers
from autoac_solver.records.plan import PlanRecord
from autoac_solver.records.profile import Profile
from autoac_solver.show.memory import plot_memory


class Page:
    """A page shown by Jupyter in a sandboxed iframe, which cannot load anything or access the notebook.

    Args:
        html: the whole page.
        height: height of the frame in pixels.
    """

    def __init__(self, html: str, height: int = 900) -> None:
        self.html, self.height = html, height

    def __repr__(self) -> str:
        return f"Page of {len(self.html) / 1e6:.1f} MB, which Jupyter shows; report(path) writes it as a file"

    def _repr_html_(self) -> str:
        return _FRAME.render(html=self.html, height=int(self.height))


_FRAME = ENVIRONMENT.from_string(
    '<iframe srcdoc="{{ html }}" sandbox="allow-scripts" title="Activation checkpointing plan" '
    'style="width: 100%; height: {{ height }}px; border: 0"></iframe>'
)


@answers(Profile)
def profile_html(profile: Profile) -> str:
    """Saved tensors by module class, and time by op."""
    ops = pd.DataFrame({"op": [op.name for op in profile.tape], "time_s": [op.time_s for op in profile.tape]})
    ops = ops.groupby("op")["time_s"].agg(["size", "sum"]).reset_index()
    ops = ops.set_axis(["op", "calls", "time_s"], axis=1).sort_values("time_s", ascending=False)
    saved = profile.saved_by_class
    picture = svg(lambda axes: draw_bars(axes, saved, "saved for backward, by class of module"))
    return shown(repr(profile), *profile.notes, picture, table(saved, 10), table(ops, 10))


@answers(PlanRecord)
def plan_html(record: PlanRecord) -> str:
    """Memory over the planned step, and the amounts saved and recomputed."""
    step = step_of(record)
    frame = step.decisions.groupby("decision", sort=False)["bytes"].agg(["size", "sum"]).reset_index()
    frame.columns = ["decision", "values", "bytes"]
    picture = svg(lambda axes: plot_memory(record, axes))
    where = f"The peak lies at {step.peak_where}."
    return shown(str(record), picture, where, table(frame))
