"""Measured points of compiled regions on disk, beside the compiler's own caches.

The compiler finds compiled code in its caches; compiling from there and measuring still takes seconds for each point.
A region whose graph was measured before on the same machine takes its points from here. What a whole step takes is
measured all the same, see `tried`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from autoac.calibrate.compiled import measured
from autoac.device import device_for, processor
from autoac.execute.compiled.survey import Survey
from autoac.progress import LOGGER
from autoac.torch_private.kernel_flags import kernel_flags
from autoac_solver.allocator.options import options_in_environment
from autoac_solver.records.compiled import CompiledPoint
from autoac_solver.records.disk.files import read_json, write_json
from autoac_solver.records.disk.schema import checked, columns, rows, table
from autoac_solver.records.errors import ProfileError

SCHEMA, SCHEMA_VERSION = "autoac.compiled_points", 2  # 2: what the code alone holds
_FORM = table(CompiledPoint)


class PointsOnDisk:
    """The points of regions with one graph, on this machine.

    Args:
        survey: of the graph.
        inputs: the region's inputs in words.
        device: where they are measured.
    """

    def __init__(self, survey: Survey, inputs: str, device: torch.device) -> None:
        from autoac.torch_private import partitioner

        known = device_for(device)
        on = known.name() or f"{processor()}, {torch.get_num_threads()} of {os.cpu_count()} threads"
        code = partitioner.hash_of_files((partitioner.__file__, measured.__file__)).hex()
        settings = repr(kernel_flags()), partitioner.settings()
        parts = (
            *(survey.graph, *survey.points, inputs),
            *(str(device.type), on, torch.__version__, *settings, code),
            options_in_environment() if known.counts_memory else "",
        )
        name = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        folder = partitioner.cache_folder()
        self._path = None if folder is None else Path(folder) / "autoac" / f"{name}.json"

    def read(self) -> tuple[CompiledPoint, ...] | None:
        """The points, None if there are none; a file that cannot be read counts as none, and a warning is logged."""
        if self._path is None or not self._path.is_file():
            return None
        try:
            return rows(checked(read_json(self._path, SCHEMA, SCHEMA_VERSION), _FORM), CompiledPoint)
        except (ProfileError, ValueError, OSError) as error:
            LOGGER.warning("measured anew: %s", error)
            return None

    def write(self, points: Sequence[CompiledPoint]) -> None:
        """Keep the points for the next process, if the compiler keeps anything; a warning is logged if that fails."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, SCHEMA, SCHEMA_VERSION, columns(points, CompiledPoint), _FORM)
        except OSError as error:  # the points are right all the same
            LOGGER.warning("measured points are not kept: %s", error)
