"""Which points a region's graph is said to be worth compiling at."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autoac.execute.compiled.survey import survey
from autoac_solver.records.compiled import kept_ops


@dataclass(frozen=True)
class Op:
    name: str
    flops: int
    bytes: int

    @property
    def overload(self) -> str:
        return f"my.{self.name}.default"


@dataclass(frozen=True)
class Graph:
    """Keeping an op keeps its result and nothing else; torch keeps all, or what is cheap to keep."""

    heavy: tuple[Op, ...]
    draws: bool = False
    is_tagged: bool = False

    @property
    def has_once(self) -> bool:
        return self.draws

    @property
    def text(self) -> str:
        return str(self.heavy)

    def kept_with(self, heavy: Iterable[int]) -> list[Any]:
        return [self.heavy[i] for i in sorted(heavy)]

    def kept_by_torch(self, budget: float) -> list[Any]:
        return [*self.heavy, "more"] if budget == 1 else [self.heavy[0], "more"]

    def is_sound(self, values: Sequence[Any]) -> bool:
        return True

    def kept_bytes(self, values: Sequence[Any]) -> int:
        return sum(100 if value == "more" else value.bytes for value in values)


OPS = (Op("a", 100, 10), Op("b", 10, 10), Op("c", 1000, 10), Op("d", 500, 100))


def test_an_op_that_gives_other_values_when_run_again_is_saved_at_every_point():
    found = survey(Graph(OPS), 9, never={"my.b.default", "my.unknown.default"})
    assert found.points == ("torch:1", "save:1", "save:1,2", "save:0,1,2", "save:0,1,2,3")


def test_what_gives_up_the_fewest_operations_for_a_byte_goes_first():
    found = survey(Graph(OPS, draws=True), 9)
    assert found.heavy == ("a", "b", "c", "d")
    assert found.points == ("torch:1", "save:", "save:2", "save:0,2", "save:0,2,3", "save:0,1,2,3")
    assert found.draws


def test_torchs_budgets_are_proposed_where_nothing_is_random():
    assert survey(Graph(OPS), 9).points[:2] == ("torch:1", "torch:0.8")
    assert survey(Graph(OPS), 3).points == ("torch:1", "save:", "save:0,1,2,3")
    assert survey(Graph(OPS, is_tagged=True), 9).points == ("torch:1",)


def test_of_many_points_the_least_and_the_largest_and_some_between_are_proposed():
    ops = tuple(Op(str(i), i, 10) for i in range(1, 31))
    found = survey(Graph(ops, draws=True), 5)
    sizes = [len(kept_ops(point)) for point in found.points[1:]]
    assert found.points[0] == "torch:1"
    assert sizes == [0, 10, 20, 30]


def test_points_that_keep_the_same_are_one():
    """An op whose result nobody needs makes no other point."""
    found = survey(Graph((Op("a", 10, 10), Op("unused", 10, 0)), draws=True), 9)
    assert len(found.points) == 4  # of ours {}, {a}, both; compared by what is kept, not by size
    same = survey(Graph((Op("a", 10, 10),), draws=True), 9)
    assert same.points == ("torch:1", "save:", "save:0")
