"""The command."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from autoac.device import current_device, device_for
from autoac_solver.records.disk.files import write_bytes
from benchmarks.cuda.jobs import jobs
from benchmarks.cuda.report import draw, render
from benchmarks.cuda.store import Store
from benchmarks.cuda.training import SIZES


def main(arguments: list[str] | None = None) -> int:
    """Measure what is not measured yet, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the command itself")
    parser.add_argument("--output", type=Path, default=Path("cuda-results"), help="a folder")
    parser.add_argument("--minutes", type=float, default=8.0, help="no job is begun after so long")
    parser.add_argument("--only", default="", help="jobs whose names contain this")
    parser.add_argument("--without", nargs="*", default=[], metavar="JOB", help="leave out these jobs")
    given = parser.parse_args(arguments)
    device = current_device(given.device)
    if device is None:
        parser.error("there is no CUDA device here; --device cpu --tiny tries the command itself.")
    deadline = time.monotonic() + 60 * given.minutes
    name = "tiny" if given.tiny else "full"
    conditions = {"device": device_for(device).name() or "CPU", "torch": torch.__version__, "size": name}
    try:
        store = Store(given.output, conditions)
    except ValueError as error:
        parser.error(str(error))
    missing = []
    for job, measure in jobs(device, SIZES[name], given.output, with_table=True):
        if job in store or job in given.without or given.only not in job:
            continue
        if time.monotonic() > deadline:
            missing.append(job)
            continue
        start = time.monotonic()
        try:
            result = measure()
        except Exception as error:
            # A strategy that fails here is a result; what a job has left in pieces must not fail the next.
            result = {"error": f"{type(error).__name__}: {error}".split("\n")[0]}
            device_for(device).release_cache()
        store.put(job, result)
        failed = f": {result['error']}" if "error" in result else ""
        print(f"{job}: {time.monotonic() - start:.1f} s{failed}", flush=True)
    picture = given.output / "report.png"
    text = render(store.results, missing)
    if draw(store.results, picture):
        text += f"\n![Extra time against peak]({picture.name})\n"
    else:
        text += "\nNo picture: matplotlib is not installed.\n"
    write_bytes(given.output / "report.md", text.encode())
    print(f"written: {given.output / 'report.md'}" + (f"; {len(missing)} jobs are left" if missing else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
