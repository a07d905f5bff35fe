"""Print what was trained on several ranks: `python -m tests.parallel.table`; `--write` puts the table in the docs.

Every row is run: real processes on CPU (gloo), with a plan and without. A cell is "yes" if on all ranks the weights
after five steps are to the bit those without a plan, and the measured peak is within 1 % of the prediction, and within
the budget.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.parallel.ranks import HERE, ROOT, run_ranks

sys.path.insert(0, str(HERE))  # the workers' own modules

from trying import Outcome
from ways import WAYS

PAGE = ROOT / "docs" / "guides" / "many-gpus.md"
BEGIN = "<!-- ranks: python -m tests.parallel.table --write -->\n"
END = "<!-- end of ranks -->\n"
ENGINES = ("replay", "sac")
THREE = (0.9, 0.8, 0.7)
FULL = ("DDP", "FSDP2 by block", "FSDP2, `reshard_after_forward=False`", "FSDP2, `mp_policy` bfloat16")


def cases(size: int) -> list[tuple[str, str, Sequence[str], Sequence[float]]]:
    """Model, way, engines and budgets (shares of the peak without a plan) of the rows for so many ranks."""
    every = [("Net", way.name, ENGINES, (0.8,)) for way in WAYS if way.ranks == size]
    if size == 2:
        return every
    return [*every, *((model, way, ENGINES, THREE) for model in ("Llama", "ViT") for way in FULL)]


def rows(size: int) -> Iterable[str]:
    """The rows of so many ranks, which are run for it."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = cases(size)
        told = run_ranks("trying_worker.py", Path(folder), size, 3600, json.dumps(wanted))
    for index, (model, way, engines, shares) in enumerate(wanted):
        found = [Outcome(**one) for rank in told for one in rank[index]]
        yield row(way, model, size, len(shares), found, engines)


def row(
    way: str, model: str, size: int, budgets: int, found: Sequence[Outcome], engines: Sequence[str]
) -> str:
    """One row; "no" says what is wrong."""
    cells: list[Any] = [way, model, size, budgets]
    for engine in engines:
        own = [one for one in found if one.engine == engine]
        cells.append("yes" if own and all(one.is_right for one in own) else f"no: {own}")
    off = max((abs(one.off) for one in found), default=0.0)
    return "| " + " | ".join(map(str, [*cells, f"{off:.2%}"])) + " |"


def main() -> None:
    made = [
        "| trained so | model | ranks | budgets | replay | sac | peak off by at most |",
        "|---|---|---|---|---|---|---|",
        *rows(2),
        *rows(4),
    ]
    text = "\n".join(made) + "\n"
    if "--write" in sys.argv[1:]:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2])
    print(text, end="")


if __name__ == "__main__":
    main()
