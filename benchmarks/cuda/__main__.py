"""Hold what is predicted for a GPU against what is measured on one, and write a report.

A second call with the same folder goes on where the first one stopped, whatever stopped it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

import autoac
from autoac.device import current_device, device_for
from autoac_solver.allocator.options import options_in_environment
from autoac_solver.records.disk.files import write_bytes
from benchmarks.cuda.jobs import jobs
from benchmarks.cuda.report import draw, render
from benchmarks.cuda.store import Store
from benchmarks.cuda.training import SIZES

INTERRUPTED = 130


class TimeIsOver(BaseException):
    """The time that the command may take is over. No `Exception`, for a job that catches these must not go on."""


def main(arguments: list[str] | None = None) -> int:
    """Measure what is not measured yet, and write the report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the command itself")
    parser.add_argument("--output", type=Path, default=Path("cuda-results"), help="a folder")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="what runs after so long is broken off (default: 8)"
    )
    parser.add_argument("--only", default="", help="jobs whose names contain this")
    parser.add_argument("--without", nargs="*", default=[], metavar="JOB", help="leave out these jobs")
    parser.add_argument(
        "--again",
        nargs="*",
        default=[],
        metavar="JOB",
        help="measure these again, such as one that has failed",
    )
    given = parser.parse_args(arguments)
    device = current_device(given.device)
    if device is None:
        parser.error("there is no CUDA device here; --device cpu --tiny tries the command itself.")
    if device.type == "cuda":  # deterministic products ask for it; 32 MiB are Hopper's default, too
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    deadline = time.monotonic() + 60 * given.minutes
    name = "tiny" if given.tiny else "full"
    conditions = {
        "device": device_for(device).name() or "CPU",
        "torch": torch.__version__,
        "size": name,
        "allocator": options_in_environment() or "default",
        "autoac": autoac.__version__,
    }
    try:
        store = Store(given.output, conditions)
    except ValueError as error:
        parser.error(str(error))
    every = dict(jobs(device, SIZES[name], given.output, with_table=True))
    unknown = [job for job in (*given.without, *given.again) if job not in every]
    if unknown or not any(given.only in job for job in every):
        parser.error(f"no job is called {', '.join(unknown) or given.only!r}; there are {', '.join(every)}.")
    left = [
        (job, measure)
        for job, measure in every.items()
        if (job not in store or job in given.again) and job not in given.without and given.only in job
    ]
    code = 0
    try:
        with _until(deadline):
            while left:
                job, measure = left[0]
                start = time.monotonic()
                try:
                    result = measure()
                except Exception as error:
                    # A strategy that fails here is a result; what a job has left in pieces must not fail the next.
                    result = {"error": f"{type(error).__name__}: {error}".split("\n")[0]}
                    device_for(device).release_cache()
                store.put(job, result)
                del left[0]
                failed = f": {result['error']}" if "error" in result else ""
                print(f"{job}: {time.monotonic() - start:.1f} s{failed}", flush=True)
    except TimeIsOver:
        print(f"{given.minutes:g} minutes are over", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        code = INTERRUPTED
    missing = [job for job in every if job not in store and job not in given.without]
    picture = given.output / "report.png"
    text = render(store.results, missing)
    if draw(store.results, picture):
        text += f"\n![Extra time against peak]({picture.name})\n"
    else:
        text += "\nNo picture: matplotlib is not installed.\n"
    write_bytes(given.output / "report.md", text.encode())
    more = f"; {len(left)} jobs are left: run the command again" if left else ""
    print(f"written: {given.output / 'report.md'}{more}")
    return code


@contextlib.contextmanager
def _until(deadline: float) -> Iterator[None]:
    """Context in which `TimeIsOver` is raised at a time of `time.monotonic`, where the system has a timer for it."""

    def over(number: int, frame: FrameType | None) -> None:
        raise TimeIsOver

    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeIsOver
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, left_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    sys.exit(main())
