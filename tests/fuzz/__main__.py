"""Random models for as long as you like: `PYTHONPATH=.:solver python -m tests.fuzz --hours 1`.

Every round draws other models. The first failure is shrunk and printed with its seed; the exit code is then 1. With
`--go-on`, each failure is printed as it was drawn, and the run goes on.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
import traceback
import warnings
from collections import Counter

os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import torch

from tests.fuzz.check import check_model
from tests.fuzz.models import ModelSpec, models
from tests.fuzz.run import run_examples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=1.0, help="how long at most")
    parser.add_argument(
        "--steps",
        type=int,
        help="stop after so many planned steps; with --opaque, only those of models with such functions count",
    )
    parser.add_argument(
        "--seed", type=int, default=1_000_000, help="of the first round; each takes the next one"
    )
    parser.add_argument("--examples", type=int, default=100, help="models in a round")
    parser.add_argument(
        "--opaque", action="store_true", help="with kernels, flags and threads that torch does not see, too"
    )
    parser.add_argument(
        "--measured", type=float, default=0.5, help="share of the plans whose peak is measured"
    )
    parser.add_argument("--go-on", action="store_true", help="after a failure, without shrinking it")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # Of models that branch on values that noise has changed.
    warnings.filterwarnings("ignore", "the plan is not followed")
    warnings.filterwarnings("ignore", "Use of .* on expanded tensors is deprecated")
    tally: Counter[str] = Counter()
    until, number = time.monotonic() + 3600 * given.hours, given.seed

    def check(spec: ModelSpec) -> None:
        try:
            check_model(spec, tally, given.measured)
        except Exception:
            if not given.go_on:
                raise
            tally["failures"] += 1
            print(f"{traceback.format_exc()}\n{spec!r}", flush=True)

    counted = "planned steps, opaque" if given.opaque else "planned steps"
    while time.monotonic() < until and (given.steps is None or tally[counted] < given.steps):
        gc.freeze()  # all objects are looked through for tensors and leaks: none of those from before concerns it
        try:
            run_examples(
                check,
                given.examples,
                number,
                models(opaque=given.opaque),
                shrink=True,
            )
        except BaseException:
            traceback.print_exc()
            print(f"failed in the round of --seed {number}")
            return 1
        number += 1
        print(
            f"seed {number}: {tally['models']} models, {tally['cases']} cases, {tally[counted]} {counted}, "
            f"{tally['measured']} measured",
            flush=True,
        )
    for what, count in tally.most_common():
        print(f"{count:8} {what}")
    return int(tally["failures"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
