"""Human-readable bytes and seconds."""

from __future__ import annotations


def format_bytes(n_bytes: int) -> str:
    """Decimal and binary units, to four digits: "20 GB = 18.63 GiB"; small numbers as "512 bytes"."""
    if abs(n_bytes) < 1000:
        return f"{n_bytes} byte{'' if abs(n_bytes) == 1 else 's'}"
    return f"{_scaled(n_bytes, 1000, 'B')} = {_scaled(n_bytes, 1024, 'iB')}"


def _scaled(n_bytes: int, base: int, suffix: str) -> str:
    """`n_bytes` in the largest of K, M, G, T that gives a number of at least 1."""
    value = n_bytes / base
    letters = iter("KMGT")
    letter = next(letters)
    while abs(float(f"{value:.4g}")) >= base and (following := next(letters, "")):
        value, letter = value / base, following
    # Beyond the largest unit %.4g would switch to exponents.
    digits = f"{value:.4g}" if abs(value) < 9999 else f"{value:.0f}"
    return f"{digits} {letter}{suffix}"


def format_seconds(seconds: float) -> str:
    """Three digits in a suitable unit: "12.3 ms", "2 min 5 s"."""
    if abs(seconds) >= 120:
        minutes, rest = divmod(round(abs(seconds)), 60)
        return f"{'-' if seconds < 0 else ''}{minutes} min {rest} s"
    for scale, unit in ((1, "s"), (1e3, "ms")):
        if abs(seconds) * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us" if seconds else "0 s"
