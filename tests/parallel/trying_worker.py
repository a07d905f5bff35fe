"""One rank: tries ways to spread models, those that it is told, and writes what came of each."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist
from cases import few_objects
from measured_models import SUBJECTS
from trying import outcomes
from ways import WAYS


def main() -> None:
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    ways = {way.name: way for way in WAYS}
    for subject, way, engines, fractions in json.loads(sys.argv[2]):
        few_objects()
        started = time.monotonic()
        found.append(list(outcomes(SUBJECTS[subject], ways[way], rank, engines, fractions)))
        print(subject, way, f"{time.monotonic() - started:.1f} s", found[-1], flush=True)
    Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # see `end` in tests/second_device.py


if __name__ == "__main__":
    main()
