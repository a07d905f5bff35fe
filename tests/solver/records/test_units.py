import pytest

from autoac_solver import BudgetFormatError, format_bytes, format_seconds, parse_bytes
from autoac_solver.records.units import parse_overhead


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (20_000_000_000, 20_000_000_000),
        ("20GB", 20 * 10**9),
        ("20gb", 20 * 10**9),
        ("20 GB", 20 * 10**9),
        ("  20GB ", 20 * 10**9),
        ("20GiB", 20 * 2**30),
        ("20gib", 20 * 2**30),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("3MB", 3 * 10**6),
        ("3MiB", 3 * 2**20),
        ("2TB", 2 * 10**12),
        ("2TiB", 2 * 2**40),
        ("18.5GiB", 18 * 2**30 + 2**29),
        ("0.1KB", 100),
        ("1.0001KB", 1000),  # rounded down
        ("80%", 800),
        ("62.5 %", 625),
        ("100%", 1000),
    ],
)
def test_parse_bytes(value, expected):
    assert parse_bytes(value, total_bytes=1000) == expected


NOT_AN_AMOUNT = [
    0,
    -1,
    True,
    False,
    None,
    2e10,
    float("nan"),
    "",
    " ",
    "20",
    "20G",
    "20GBs",
    "20B",
    "20 G B",
    "GB",
]
NOT_AN_AMOUNT += [
    "-20GB",
    "0GB",
    "0.0001KB",
    "1e3GB",
    "1_000GB",
    "20,5GB",
    "nan",
    "nanGB",
    "inf",
    "infGB",
    "\u0662GB",
]
NOT_AN_AMOUNT += ["0%", "101%", "-5%", "%"]


@pytest.mark.parametrize("value", NOT_AN_AMOUNT)
def test_everything_else_is_refused_with_what_was_asked_and_what_is_possible(value):
    with pytest.raises(BudgetFormatError) as caught:
        parse_bytes(value, total_bytes=1000)
    assert isinstance(caught.value, ValueError)
    assert repr(value) in str(caught.value)
    assert '"20GB"' in str(caught.value)
    assert "GiB" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (2e10, "write int(20000000000.0)"),
        ("20G ", 'mean "20GB" or "20GiB"?'),
        ("18.5 Gi", 'mean "18.5 GiB"?'),
    ],
)
def test_what_was_probably_meant_is_said(value, hint):
    with pytest.raises(BudgetFormatError) as caught:
        parse_bytes(value)
    assert hint in str(caught.value)


@pytest.mark.parametrize("value", [0.8, -5.0, float("nan"), float("inf")])
def test_of_other_floats_nothing_is_guessed(value):
    with pytest.raises(BudgetFormatError) as caught:
        parse_bytes(value)
    assert "write int" not in str(caught.value)


def test_percentage_of_an_unknown_total_is_refused():
    with pytest.raises(BudgetFormatError, match="'80%' is a share of a total that is not known here"):
        parse_bytes("80%")


def test_numpy_integers_are_bytes():
    numpy = pytest.importorskip("numpy")
    assert parse_bytes(numpy.int64(7)) == 7
    assert type(parse_bytes(numpy.int64(7))) is int


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1 KB = 0.9766 KiB"),
        (5056, "5.056 KB = 4.938 KiB"),
        (999_960, "1 MB = 976.5 KiB"),
        (20 * 10**9, "20 GB = 18.63 GiB"),
        (2**40, "1.1 TB = 1 TiB"),
        (10**19, "10000000 TB = 9094947 TiB"),
        (-5 * 10**9, "-5 GB = -4.657 GiB"),
    ],
)
def test_format_bytes(n_bytes, text):
    assert format_bytes(n_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1e-7, "0.1 us"),
        (0.0123, "12.3 ms"),
        (1.5, "1.5 s"),
        (119.7, "120 s"),
        (125, "2 min 5 s"),
        (-0.5, "-500 ms"),
        (-200, "-3 min 20 s"),
    ],
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    "budget", [10**400, 10**5000, "9" * 5000 + "GB", "1" * 30 + "TB", 2**60 + 1], ids=range(5)
)
def test_more_than_any_device_has(budget):
    with pytest.raises(BudgetFormatError) as caught:
        parse_bytes(budget)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("value", "expected"),
    [("5%", 0.05), (" 12.5 % ", 0.125), (0.05, 0.05), (0, 0.0), (1, 1.0), ("100%", 1.0)],
)
def test_a_slowdown(value, expected):
    assert parse_overhead(value) == pytest.approx(expected)
