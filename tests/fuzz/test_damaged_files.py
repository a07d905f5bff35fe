"""Files with random damage: refused as what they are, or good for everything that is done with a file."""

import copy
import json
import random
import re
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import autoac
from autoac_solver.plan.planning import plan_profile
from autoac_solver.plan.recorded.step import step_of
from autoac_solver.records.devices import DeviceTable, on_device
from autoac_solver.records.disk import limits
from autoac_solver.records.errors import AutoacError, ProfileError
from autoac_solver.records.plan import PlanRecord
from autoac_solver.records.profile import Profile
from autoac_solver.show.explanation import explain
from tests.fuzz.check import with_given_times
from tests.fuzz.mutations import damaged, damaged_text
from tests.small_models import batch, make

PROFILES = Path(__file__).resolve().parents[2] / "profiles"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def profile() -> Profile:
    return with_given_times(autoac.profile(make(rounds=2), batch()))


@pytest.fixture(scope="module")
def plan_data(profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    autoac.solve(profile, 200_000, regions=["blocks.0", "blocks.1", "blocks.2"]).save(path)
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def profile_data(profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    profile.save(path)
    return json.loads(path.read_text())


def use_profile(profile: Profile, dice: random.Random) -> None:
    """Everything that is done with a profile; what it cannot be used for is one of our own errors."""
    with suppress(AutoacError):
        record = plan_profile(
            profile,
            dice.choice([1, 100_000, 200_000, 10**12]),
            engine=dice.choice(["replay", "sac"]),
            regions=dice.choice([None, ["blocks.0", "blocks.2"], ["head"], [""]]),
            time_limit_s=2.0,
            gap=0.05,
        )
        assert record.predicted_peak_bytes <= record.budget_bytes
        use_plan(record)


def use_plan(record: PlanRecord) -> None:
    with suppress(AutoacError):  # a changed plan may contradict its profile, or itself
        step = step_of(record)
        assert explain(record)
        assert len(step.decisions.columns)
        assert len(step.timeline.columns)


def outcomes(
    load: Callable[[Path], Any], path: Path, contents: Iterator[bytes], use: Callable[[Any], None]
) -> Counter[str]:
    """Load damaged files; those that load are used."""
    tally: Counter[str] = Counter()
    for content in contents:
        path.write_bytes(content)
        loaded = None
        with suppress(ProfileError):
            loaded = load(path)
        tally["refused" if loaded is None else "loaded"] += 1
        if loaded is not None:
            use(loaded)
    return tally


def values_damaged(data: Any, count: int) -> Iterator[bytes]:
    return (json.dumps(damaged(data, random.Random(seed))).encode() for seed in range(count))


def bytes_damaged(data: Any, count: int) -> Iterator[bytes]:
    return (damaged_text(data, random.Random(seed)) for seed in range(count))


def test_damaged_profiles(profile_data: Any, tmp_path: Path):
    dice = random.Random(3)
    contents = values_damaged(profile_data, 500)
    tally = outcomes(Profile.load, tmp_path / "a.json", contents, lambda profile: use_profile(profile, dice))
    assert min(tally["loaded"], tally["refused"]) > 60, tally


def test_damaged_plans(plan_data: Any, tmp_path: Path):
    tally = outcomes(PlanRecord.load, tmp_path / "a.json", values_damaged(plan_data, 400), use_plan)
    assert min(tally["loaded"], tally["refused"]) > 40, tally


@pytest.mark.parametrize("kind", [Profile, PlanRecord])
def test_damaged_bytes(kind: Any, profile_data: Any, plan_data: Any, tmp_path: Path):
    contents = bytes_damaged(plan_data if kind is PlanRecord else profile_data, 250)
    tally = outcomes(kind.load, tmp_path / "a.json", contents, lambda _: None)
    assert tally["refused"] > 200, tally


def refusal(path: Path) -> str:
    with pytest.raises(ProfileError) as caught:
        Profile.load(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["tape"]["name"].__setitem__(0, "a\x1b[31mb"), r"tape.name\[0\]` is 'a.+x1b.31mb'"),
        (
            lambda data: data["calls"]["fqn"].__setitem__(0, "a" * 20_000),
            r"<= 10000 - at `\$.calls.fqn\[0\]` is 'aaa",
        ),
        (
            lambda data: data.__setitem__("model", "\ud800"),
            r"control characters - at `\$.model` is '.+ud800'",
        ),
        (lambda data: data["storage_table"]["bytes"].__setitem__(0, 10**30), r"table.bytes\[0\]` is 10000"),
        (lambda data: data["storage_table"]["bytes"].__setitem__(slice(2), [2**60] * 2), "bytes of memory"),
        (lambda data: data["tape"]["tick"].reverse(), "is out of order"),
        (lambda data: data["calls"]["parent"].__setitem__(1, -5), "inside of one that is not there"),
        (lambda data: data["tape"]["time_s"].__setitem__(0, 1e300), r"at `\$.tape.time_s\[0\]` is 1e.300"),
        (lambda data: data.__setitem__("end", 10**9 * -1), r">= 0 - at `\$.end` is -1000000000"),
        (lambda data: data["costs"].__setitem__("replay", {"op": 10**400}), r"at `\$.costs\[...\]\[...\]`"),
        (lambda data: data["tape"].__setitem__("more", []), r"unknown field `more` - at `\$.tape`"),
        (
            lambda data: data["tape"]["tick"].pop(),
            r"columns of Op are of different lengths .*tick \d+, module \d+",
        ),
        (lambda data: data["calls"]["views"].__setitem__(1, 10**6), "has fewer views than the calls in it"),
    ],
)
def test_refusals_say_what_is_wrong(
    change: Callable[[Any], None], message: str, profile_data: Any, tmp_path: Path
):
    path, data = tmp_path / "a.json", copy.deepcopy(profile_data)
    change(data)
    path.write_text(json.dumps(data))
    found = refusal(path)
    assert re.search(message, found)
    assert len(found) < 600


def test_names_with_markup_are_names(profile_data: Any, tmp_path: Path):
    path, data = tmp_path / "a.json", copy.deepcopy(profile_data)
    data["model"] = "<script>alert('1')</script> & [red]"
    path.write_text(json.dumps(data))
    assert Profile.load(path).model == data["model"]


def test_what_never_ends_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autoac_solver.records.disk.files.MOST_FILE_BYTES", 2**22)
    assert "is larger than 4.194 MB" in refusal(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": "autoac.profile", "schema": "autoac.profile"}', "an object has the same name twice"),
        ('{"schema": NaN}', "NaN is no number in JSON"),
        ('{"schema": 1e400}', "is none of autoac's files, but 'autoac.profile' was expected"),
        ('{"schema": ' + "9" * 5000 + "}", "is not readable JSON"),
        ('{"a":' * 40 + "1" + "}" * 40, "is nested deeper than 32 levels"),
        ('"' + '\\"' * 2_000_000, "is not readable JSON"),  # in quadratic time it would take a day
    ],
)
def test_json_that_is_refused(text: str, message: str, tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text(text)
    assert message in refusal(path)


def test_refusing_takes_memory_in_proportion_to_the_file(profile_data: Any, tmp_path: Path):
    """Whatever the file claims, at most some sixty times its size."""
    path = tmp_path / "a.json"
    for content in bytes_damaged(profile_data, 60):
        path.write_bytes(content)
        tracemalloc.start()
        with suppress(ProfileError):
            Profile.load(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 60 * len(content) + 2**22


@pytest.mark.parametrize(
    ("piece", "counted"),
    [
        ("[],", "lists and names"),
        ('{"a":1},', "lists and names"),
        ('"%x":%d,', "lists and names"),
        ("1,", "values"),
    ],
)
@pytest.mark.parametrize("part", [1, 0.9])
def test_the_limits_bound_the_memory_of_reading(
    piece: str, counted: str, part: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On a scale of one in 64: no file takes more than some 2 GB, and most are refused before they are parsed."""
    for name in ("MOST_FILE_BYTES", "MOST_VALUES", "MOST_PARTS"):
        monkeypatch.setattr(f"autoac_solver.records.disk.files.{name}", getattr(limits, name) // 64)
    n_pieces = (limits.MOST_VALUES if counted == "values" else limits.MOST_PARTS) // 64
    n_pieces = int(part * n_pieces / (2 if piece.startswith("{") else 1)) + 2 * int(part)
    inside = "".join(piece % (i, i + 300) if "%" in piece else piece for i in range(n_pieces)).removesuffix(
        ","
    )
    path = tmp_path / "a.json"
    path.write_text(f"{{{inside}}}" if "%" in piece else f'{{"a":[{inside}]}}')
    tracemalloc.start()
    message = refusal(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2e9 / 64
    if part == 1:
        assert re.search(f"has more than [0-9,]+ {counted}, the most that is read", message)
        assert peak < 4 * path.stat().st_size + 2**20
    else:
        assert "is none of autoac's files" in message


def test_damaged_cost_tables(profile: Profile, tmp_path: Path):
    data = json.loads((PROFILES / "devices" / "h200.json").read_text())

    def use(table: DeviceTable) -> None:
        with suppress(AutoacError):
            plan_profile(on_device(profile, table), 10**12, time_limit_s=2.0)

    tally = outcomes(DeviceTable.load, tmp_path / "a.json", values_damaged(data, 300), use)
    assert min(tally["loaded"], tally["refused"]) > 20, tally
