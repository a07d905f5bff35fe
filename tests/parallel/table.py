"""Print what was trained on several ranks: `python -m tests.parallel.table`; `--write` puts rows into the table in the
docs, a few at a time. `--only` runs some of them; `--missing` those that are not there yet, after a run that was ended.

Every row is run: real processes on CPU (gloo), with a plan and without. A cell is "yes" if on all ranks the weights
after five steps are to the bit those without a plan, and the measured peak is within 1 % of the prediction, and within
the budget.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.parallel.ranks import HERE, ROOT, log_of, run_ranks

sys.path.insert(0, str(HERE))  # the workers' own modules

from trying import Outcome
from ways import WAYS

PAGE = ROOT / "docs" / "guides" / "many-gpus.md"
BEGIN = "<!-- ranks: python -m tests.parallel.table --write -->\n"
END = "<!-- end of ranks -->\n"
ENGINES = ("replay", "sac")
HEAD = (
    "| trained so | model | ranks | budgets | replay | sac | peak off by at most |",
    "|---|---|---|---|---|---|---|",
)
Key = tuple[str, str, str]
"""Way, model and number of ranks."""
Case = tuple[str, str, Sequence[str], Sequence[float]]
THREE = (0.9, 0.8, 0.7)
FULL = (
    "DDP",
    "FSDP2 by block",
    "FSDP2, `reshard_after_forward=False`",
    "FSDP2, `mp_policy` bfloat16",
    "tensor parallelism",
    "tensor parallelism and FSDP2",
)
IN_STAGES = ("two stages, `ScheduleGPipe`", "two stages, `Schedule1F1B`")
AT_ONCE = 4
"""Rows of one job: starting takes long, and the rows of a job that was ended are lost."""


def cases(size: int) -> list[Case]:
    """Model, way, engines and budgets (shares of the peak without a plan) of the rows for so many ranks."""
    every: list[Case] = [
        ("Net", way.name, ENGINES, THREE if way.name in (*FULL, *IN_STAGES) else (0.8,))
        for way in WAYS
        if way.ranks == size
    ]
    # Four ranks for all that takes any number of them.
    real = [way for way in FULL if ranks_for(way) == size]
    return [*every, *((model, way, ENGINES, THREE) for model in ("Llama", "ViT") for way in real)]


def ranks_for(way: str) -> int:
    """The ranks on which a transformers model is spread so."""
    return 2 if way == "tensor parallelism" else 4


def key_of(case: Case, size: int) -> Key:
    return case[1], case[0], str(size)


def run(size: int, wanted: Sequence[Case]) -> dict[Key, str]:
    """These rows of so many ranks, which are run for it in one job."""
    with tempfile.TemporaryDirectory() as folder:
        told = run_ranks("trying_worker.py", Path(folder), size, 3600, json.dumps(wanted))
        if dead := [rank for rank, one in enumerate(told) if one is None]:
            raise RuntimeError(
                "\n".join(f"rank {rank} failed:\n{log_of(Path(folder), rank)}" for rank in dead)
            )
    return {
        key_of(case, size): row(
            case[1], case[0], size, len(case[3]), [Outcome(**one) for rank in told for one in rank[index]]
        )
        for index, case in enumerate(wanted)
    }


def written() -> dict[Key, str]:
    """The rows that the docs have."""
    lines = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    return {(own[1], own[2], own[3]): line for own, line in zip(cells, lines, strict=True)}


def write(found: dict[Key, str]) -> None:
    """Put these rows into the docs, beside those of other ways."""
    every = {**written(), **found}
    order = [(way, model, str(size)) for size in (2, 4) for model, way, _, _ in cases(size)]
    lines = [*HEAD, *(every[key] for key in order if key in every)]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + rest.partition(END)[2])


def row(way: str, model: str, size: int, budgets: int, found: Sequence[Outcome]) -> str:
    """One row; "no" says what is wrong."""
    cells: list[Any] = [way, model, size, budgets]
    for engine in ENGINES:
        own = [one for one in found if one.engine == engine]
        cells.append("yes" if own and all(one.is_right for one in own) else f"no: {own}")
    off = max(abs(one.off) for one in found)
    return "| " + " | ".join(map(str, [*cells, f"{off:.2%}"])) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="", help="a part of a model's and a way's name, as in 'Llama, DDP'")
    parser.add_argument("--missing", action="store_true", help="only rows that the docs do not have")
    asked = parser.parse_args()
    known = written() if asked.missing else {}
    for size in (2, 4):
        wanted = [
            case
            for case in cases(size)
            if asked.only in f"{case[0]}, {case[1]}" and key_of(case, size) not in known
        ]
        for start in range(0, len(wanted), AT_ONCE):
            found = run(size, wanted[start : start + AT_ONCE])
            print(*found.values(), sep="\n", flush=True)
            if asked.write:
                write(found)


if __name__ == "__main__":
    main()
