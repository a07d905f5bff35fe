"""All families of the corpus, before a release: `PYTHONPATH=.:solver python -m tests.corpus`.

Families may be named; `--library` takes those of one library. The exit code is 1 if the contract is broken anywhere.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
import traceback
import warnings
from collections import Counter

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import torch

from tests.corpus.check import Finding, check
from tests.corpus.families import families


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="families; all if left out")
    parser.add_argument("--library", choices=("transformers", "diffusers"), help="only this one's")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    tally: Counter[str] = Counter()
    for family in families():
        if given.names and family.name not in given.names:
            continue
        if given.library and family.library != given.library:
            continue
        start = time.perf_counter()
        try:
            found = check(family)
        except Exception:
            found = Finding("broken", (traceback.format_exc(),))
        tally[found.kind] += 1
        print(f"{found.kind:16} {family.name} ({time.perf_counter() - start:.0f} s)", flush=True)
        for words in found.words:
            print(f"    {words}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in tally.most_common()))
    return 1 if tally["broken"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
