"""The table of `benchmarks.compiled`; what it measures takes the compiler minutes."""

from benchmarks.compiled import CHECKPOINT, ENGINE, REPLAY, TORCH, Row, render


def test_the_best_of_torchs_budgets_that_fits_stands_in_the_table():
    rows = [
        Row("plain", 0, 0, 50_000_000, [2.0, 1.0, 3.0]),
        Row(ENGINE, 20_000_000, 19_900_000, 19_900_000, [2.2]),
        Row(ENGINE, 40_000_000, 38_000_000, 38_100_000, [1.8]),
        Row(REPLAY, 40_000_000, 40_000_000, 40_000_000, [2.1]),
        Row(f"{TORCH} 1", 0, 0, 45_000_000, [1.7]),
        Row(f"{TORCH} 0.5", 0, 0, 39_000_000, [2.0]),
        Row(f"{TORCH} 0", 0, 0, 25_000_000, [2.4]),
        Row(CHECKPOINT, 0, 0, 20_000_000, [2.6]),
    ]
    assert render(rows).splitlines()[2:] == [
        "| 20.0 MB | 19.9 MB : 1.10 (19.9) | - | - | 20.0 MB : 1.30 |",
        "| 40.0 MB | 38.1 MB : 0.90 (38.0) | 39.0 MB : 1.00 (0.5) | 40.0 MB : 1.05 | 20.0 MB : 1.30 |",
    ]
