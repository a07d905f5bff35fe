"""Partitioners: they choose the values a compiled region saves for backward. Imported only if something is compiled.

A partitioner holds only the point's name, so it can be copied and pickled. Its `uuid` identifies its choices:
inductor's and AOTAutograd's caches include it in their keys, and never use one point's code for another.
"""

from __future__ import annotations

from typing import Any

import torch

from autoac.execute.compiled.survey import Survey, survey
from autoac.torch_private import partitioner
from autoac.torch_private.partitioner import CustomPartitionerFn, JointGraph, hash_of_files, partitioned
from autoac_solver.records.compiled import kept_ops, torchs_budget


class PointPartitioner(CustomPartitionerFn):
    """Saves for backward the values that a point selects.

    Args:
        point: the point's name.
    """

    def __init__(self, point: str) -> None:
        self.point = point

    def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        return partitioned(self._kept, gm, joint_inputs, **kwargs)

    def _kept(self, graph: JointGraph) -> list[Any]:
        budget = torchs_budget(self.point)
        return graph.kept_with(kept_ops(self.point)) if budget is None else graph.kept_by_torch(budget)

    def uuid(self) -> Any:
        return self.point, hash_of_files((__file__, partitioner.__file__))


class Surveyed(Exception):
    """Raised instead of compiling; carries the survey."""

    def __init__(self, found: Survey) -> None:
        super().__init__("surveyed")
        self.found = found


class Surveyor(CustomPartitionerFn):
    """Surveys a region's graph for points it could be compiled at; compiles nothing.

    Args:
        most, never: as for `survey`.

    Raises:
        Surveyed: always.
    """

    def __init__(self, most: int, never: frozenset[str]) -> None:
        self.most, self.never = most, never

    def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        def look(graph: JointGraph) -> list[Any]:
            raise Surveyed(survey(graph, self.most, self.never))

        return partitioned(look, gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        return None  # never to be found in a cache
