"""Starts this package's workers as the ranks of one job, and brings back what they tell."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
_CRASHES = {-signal.SIGABRT, -signal.SIGBUS, -signal.SIGSEGV}


def run_ranks(
    worker: str, folder: Path, size: int = 2, timeout_s: float = 420.0, *arguments: str
) -> list[Any]:
    """What each rank wrote, None for one that wrote nothing; all of them are over within the time.

    Args:
        worker: file beside this one, called with the path that it is to write JSON to.
        arguments: others to call it with.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "solver", HERE)))
    common = {**os.environ, "PYTHONPATH": path, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common["PYTHONFAULTHANDLER"] = "1"  # a crash leaves each thread's stack in the log
    started = []
    for rank in range(size):
        command = [
            sys.executable,
            "-W",
            "ignore",
            str(HERE / worker),
            str(folder / f"{rank}.json"),
            *arguments,
        ]
        environment = {**common, "RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
        with (folder / f"{rank}.log").open("w") as log:
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    until = time.monotonic() + timeout_s
    try:
        while any(process.poll() is None for process in started):
            crashed = [rank for rank, process in enumerate(started) if process.poll() in _CRASHES]
            hang = not crashed and time.monotonic() > until
            if hang:
                for process in started:
                    process.send_signal(signal.SIGABRT)  # each rank's log says where it waits
                    process.wait()
            if crashed or hang:
                logs = "\n".join(log_of(folder, rank) for rank in crashed or range(size))
                raise AssertionError(
                    f"ranks {crashed} crashed:\n{logs}" if crashed else f"the ranks hang:\n{logs}"
                )
            time.sleep(0.1)
    finally:
        for process in started:
            process.kill()
            process.wait()
    found = [folder / f"{rank}.json" for rank in range(size)]
    return [json.loads(file.read_text()) if file.exists() else None for file in found]


def log_of(folder: Path, rank: int) -> str:
    """The end of what this rank printed."""
    lines = (folder / f"{rank}.log").read_text().splitlines()
    return "\n".join(line for line in lines if not line.startswith("Extension modules:"))[-6000:]
