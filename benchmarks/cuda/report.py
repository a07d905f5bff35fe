"""The results as Markdown, and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cuda.jobs import MODELS

_COMPILED, _CAPTURED = "ours compiled", "captured"
_TITLES = {"gpt": "GPT-2 medium's shape", "llama": "a Llama"}


def render(results: Mapping[str, Any], missing: list[str]) -> str:
    """All tables; missing measurements are marked."""
    parts = [
        "# Predicted and measured",
        _facts("Environment", results.get("environment")),
        "MB is 10^6 bytes. Peaks are those of a whole step with AdamW, parameters and optimizer state included. "
        "Reserved is what CUDA's caching allocator takes from the device over three steps, and allocated the most that "
        "it hands out in them, with what no plan counts (workspaces that cuBLAS keeps). Times are medians by the wall "
        "clock. Gradients are compared by sums of their bits, under deterministic algorithms.",
        *(part for name in MODELS for part in _model(name, results)),
        _facts("Copies, GB/s", _scaled(results.get("bandwidth"), 1e-9)),
        _selfcheck(results.get("selfcheck")),
        _largest(results.get("gpt/largest batch")),
        _costs(results.get("engine costs")),
        _table(results.get("device table")),
    ]
    if missing:
        parts += ["## Not measured", "Run the command again to go on with: " + ", ".join(missing) + "."]
    return "\n\n".join(filter(None, parts)) + "\n"


def draw(results: Mapping[str, Any], path: Path) -> bool:
    """Draw extra time against peak, predicted and measured; False without a drawing library or without results."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), MODELS, strict=True):
        none = results.get(f"{name}/none", {})
        rows = [r for r in _ours(name, results) if "step_s" in r]
        axes.set(xlabel="measured peak, MB", ylabel="extra step time, %", title=_TITLES[name])
        if "step_s" not in none or not rows:
            continue
        peaks = [row["peak_bytes"] / 1e6 for row in rows]
        axes.plot(peaks, [100 * (row["step_s"] / none["step_s"] - 1) for row in rows], "o-k", label="ours")
        predicted = [100 * _predicted(row, results[f"{name}/profile"], none) for row in rows]
        axes.plot(peaks, predicted, ":k", label="ours, predicted")
        for label, row in _others(name, results).items():
            if "step_s" in row:
                extra = 100 * (row["step_s"] / none["step_s"] - 1)
                axes.plot([row["peak_bytes"] / 1e6], [extra], "s", label=label)
        axes.locator_params(axis="x", nbins=6)
        axes.legend(fontsize="x-small")
    figure.savefig(path, dpi=120)
    return True


def _model(name: str, results: Mapping[str, Any]) -> list[str]:
    about, none = results.get(f"{name}/profile"), results.get(f"{name}/none", {})
    if about is None:
        return []
    if "error" in about:
        return [f"## {_TITLES[name]}", f"It could not be profiled: {about['error']}"]
    clocks = ""
    if about["host_s"] is not None:
        clocks = f" Host {1e3 * about['host_s']:.1f} ms, device {1e3 * about['device_s']:.1f} ms."
    head = (
        f"{about['model']}, {about['parameters'] / 1e6:.3g} million parameters, {about['dtype']}, {about['sample']}; "
        f"{about['ops']} ops. Predicted step {1e3 * about['predicted_step_s']:.2f} ms, measured "
        f"{_ms(none)}.{clocks} Profiled and prepared in {about['seconds']:.1f} s."
    )
    return [
        f"## {_TITLES[name]}",
        head,
        _goals(name, results),
        _ours_table(name, results),
        _others_table(name, results),
        _compiled_table(name, results),
        _captured_table(name, results),
    ]


_PEAK, _POINTS = 0.005, 0.02
_MISSED = "NOT met"


def _goals(name: str, results: Mapping[str, Any]) -> str:
    """What is expected of the plans, and whether it holds."""
    none = results.get(f"{name}/none", {})
    rows = [row for row in _ours(name, results) if "error" not in row]
    if not rows or "step_s" not in none:
        return ""
    off = [row["peak_bytes"] / row["predicted_peak_bytes"] - 1 for row in rows]
    over = sum(row["peak_bytes"] > row["budget_bytes"] for row in rows)
    about = results[f"{name}/profile"]
    points = [row["step_s"] / none["step_s"] - 1 - _predicted(row, about, none) for row in rows]
    worst, times = max(off, key=abs), max(points, key=abs)
    again = results.get(f"{name}/none again", {}).get("step_s", none["step_s"])
    noise = abs(again / none["step_s"] - 1)
    rivals = [row for label, row in _others(name, results).items() if _is_eager(label) and "step_s" in row]
    slower, contested = 0, 0
    for row in rows:
        fitting = [rival["step_s"] for rival in rivals if rival["peak_bytes"] <= row["budget_bytes"]]
        contested += bool(fitting)
        slower += bool(fitting) and row["step_s"] > min(fitting) * (1 + noise)
    equal = sum(row.get("bits") == none.get("bits") for row in rows)
    goals = [
        ("gradients equal to the bit", equal == len(rows), f"{equal} of {len(rows)} plans"),
        ("peak within 0.5 % of the predicted one", abs(worst) <= _PEAK, f"at most {worst:+.2%}"),
        ("never over the budget", not over, f"{over} of {len(rows)} plans over it"),
        ("extra time within two points", abs(times) <= _POINTS, f"at most {100 * times:+.1f} points"),
        (
            "at least as fast as every eager rival that fits",
            not slower,
            f"slower at {slower} of {contested} budgets, beyond noise of {noise:.1%}",
        ),
    ]
    lines = [_line(goal, "met" if met else _MISSED, numbers) for goal, met, numbers in goals]
    return "\n".join([*_header("goal", "", "measured"), *lines])


def _predicted(row: Mapping[str, Any], about: Mapping[str, Any], none: Mapping[str, Any]) -> float:
    """Predicted extra seconds as a share of the measured step, whose optimizer's time no plan counts."""
    return (row["predicted_step_s"] - about["predicted_step_s"]) / none["step_s"]


def _is_eager(label: str) -> bool:
    return not label.startswith("compiled")


def _ours(name: str, results: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = _labelled(name, results, "ours ").items()
    return [row for label, row in rows if not label.startswith(_COMPILED)]


def _others(name: str, results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    left_out = ("profile", "largest batch", "ours ", _CAPTURED)
    return {k: row for k, row in _labelled(name, results, "").items() if not k.startswith(left_out)}


def _labelled(name: str, results: Mapping[str, Any], start: str) -> dict[str, dict[str, Any]]:
    """A model's results whose label begins so, by label."""
    found = {key.partition("/")[2]: row for key, row in results.items() if key.startswith(f"{name}/")}
    return {label: row for label, row in found.items() if label.startswith(start)}


def _ours_table(name: str, results: Mapping[str, Any]) -> str:
    none = results.get(f"{name}/none", {})
    lines = _header(
        "budget MB",
        "peak MB: predicted",
        "measured",
        "off",
        "allocated MB",
        "reserved MB: predicted",
        "measured",
        "time: predicted",
        "measured",
        "gradients",
    )
    for row in _ours(name, results):
        if "error" in row:
            lines.append(_line(_mb(row, "budget_bytes"), row["error"].replace("|", "/"), *[""] * 8))
            continue
        off = row["peak_bytes"] / row["predicted_peak_bytes"] - 1
        lines.append(
            _line(
                _mb(row, "budget_bytes"),
                _mb(row, "predicted_peak_bytes"),
                _mb(row, "peak_bytes"),
                f"{off:+.2%}",
                _mb(row, "allocated_bytes"),
                _mb(row, "predicted_reserved_bytes"),
                _mb(row, "reserved_bytes"),
                f"{_predicted(row, results[f'{name}/profile'], none):+.1%}" if "step_s" in none else "",
                _overhead(row, none),
                "equal" if row["bits"] == none.get("bits") else "differ",
            )
        )
    return "\n".join(lines)


def _others_table(name: str, results: Mapping[str, Any]) -> str:
    none = results.get(f"{name}/none", {})
    lines = _header("strategy", "peak MB", "reserved MB", "time", "fastest plan of ours in its peak")
    for label, row in _others(name, results).items():
        if "error" in row:
            lines.append(_line(label, "", "", row["error"].replace("|", "/"), ""))
            continue
        fitting = [r for r in _ours(name, results) if r.get("peak_bytes", 2**62) <= row["peak_bytes"]]
        best = min(fitting, key=lambda r: r["step_s"], default=None)
        lines.append(
            _line(
                label,
                _mb(row, "peak_bytes"),
                _mb(row, "reserved_bytes"),
                f"{_ms(row)}, {_overhead(row, none)}",
                "none" if best is None else _overhead(best, none),
            )
        )
    return "\n".join(lines)


def _compiled_table(name: str, results: Mapping[str, Any]) -> str:
    rows, none = _labelled(name, results, _COMPILED), results.get(f"{name}/none", {})
    if not rows:
        return ""
    lines = _header(
        "engine compile, budget MB", "peak MB: predicted", "measured", "off", "reserved MB", "time"
    )
    for label, row in rows.items():
        if "error" in row:
            lines.append(_line(label, row["error"].replace("|", "/"), *[""] * 4))
            continue
        lines.append(
            _line(
                _mb(row, "budget_bytes"),
                _mb(row, "predicted_peak_bytes"),
                _mb(row, "peak_bytes"),
                f"{row['peak_bytes'] / row['predicted_peak_bytes'] - 1:+.2%}",
                _mb(row, "reserved_bytes"),
                f"{_ms(row)}, {_overhead(row, none)}",
            )
        )
    return "\n".join(lines)


def _captured_table(name: str, results: Mapping[str, Any]) -> str:
    rows, none = _labelled(name, results, _CAPTURED), results.get(f"{name}/{_CAPTURED}, none", {})
    if not rows:
        return ""
    lines = _header("forward and backward as a CUDA graph", "pool MB", "time", "gradients")
    for label, row in rows.items():
        if "error" in row:
            lines.append(_line(label, "", row["error"].replace("|", "/"), ""))
            continue
        equal = "equal" if row["bits"] == results.get(f"{name}/none", {}).get("bits") else "differ"
        lines.append(_line(label, _mb(row, "pool_bytes"), f"{_ms(row)}, {_overhead(row, none)}", equal))
    return "\n".join(lines)


def _selfcheck(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    if "error" in found:
        return f"## Selfcheck\n\n{found['error']}"
    verdict = "Every plan kept its promises." if found["ok"] else "NOT every plan kept its promises."
    lines = _header(
        *(
            "plan",
            "budget MB",
            "predicted MB",
            "measured MB",
            "time: predicted",
            "measured",
            "gradients, buffers",
        )
    )
    for model in found["models"]:
        for row in model["rows"]:
            planned = bool(row["budget_bytes"])  # the others promise nothing
            lines.append(
                _line(
                    f"{model['title'].partition(',')[0]}: {row['name']}",
                    _mb(row, "budget_bytes") if planned else "",
                    _mb(row, "predicted_peak_bytes") if planned else "",
                    _mb(row, "measured_peak_bytes"),
                    f"{row['predicted_overhead']:+.1%}" if planned else "",
                    f"{row['overhead']:+.1%}",
                    "equal" if row["equal"] else "differ",
                )
            )
    return "\n\n".join(["## Selfcheck", verdict, "\n".join(lines)])


def _largest(found: Mapping[str, Any] | None) -> str:
    if found is None or "error" in found:
        return _facts("Largest batch", found)
    rows: dict[str, Any] = {"budget": f"{_mb(found, 'budget_bytes')} MB"}
    measured = found.get("ours, measured", {})
    rows |= {
        f"{name}, predicted": n for name, n in found.items() if isinstance(n, int) and name != "budget_bytes"
    }
    if measured:
        fits = "fits" if measured.get("within") else _MISSED
        text = measured.get("error") or f"{_mb(measured, 'peak_bytes')} MB measured, {fits}"
        rows[f"ours, {measured['batch']} rows carried out"] = text
    return _facts("Largest batch", rows)


def _table(found: Mapping[str, Any] | None) -> str:
    if found is None or "error" in found:
        return _facts("Device table", found)
    rows: dict[str, Any] = {"entries": found["entries"]}
    for name, rate in found["matrix_flops"].items():
        if name:
            rows[f"matrix products, {name}"] = f"{rate / 1e12:.3g} TFLOP/s"
    rows["bandwidth"] = f"{found['bandwidth'] / 1e9:.3g} GB/s"
    rows["launch"] = f"{1e6 * found['launch_s']:.2f} us"
    return _facts("Device table", rows)


def _costs(found: dict[str, Any] | None) -> str:
    if found is None or "error" in found:
        return _facts("Engine costs", found)
    rows = {
        f"{engine}, {part}": f"{1e6 * s:.2f} us"
        for engine, parts in found.items()
        for part, s in parts.items()
    }
    return _facts("Engine costs", rows)


def _facts(title: str, found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    rows = [_line(str(name), str(value).replace("|", "/")) for name, value in found.items()]
    return "\n".join([f"## {title}", "", *_header("what", "value"), *rows])


def _scaled(found: Mapping[str, Any] | None, factor: float) -> dict[str, Any] | None:
    if found is None or "error" in found:
        return None if found is None else dict(found)
    return {name: f"{factor * value:.2f}" for name, value in found.items()}


def _overhead(row: Mapping[str, Any], none: Mapping[str, Any]) -> str:
    return f"{row['step_s'] / none['step_s'] - 1:+.1%}" if "step_s" in none and "step_s" in row else ""


def _ms(row: Mapping[str, Any]) -> str:
    return f"{1e3 * row['step_s']:.2f} ms" if "step_s" in row else "not yet"


def _mb(row: Mapping[str, Any], name: str) -> str:
    if row.get(name) is None:
        return ""
    return f"{row[name] / 1e6:.1f}" if row[name] >= 1e8 else f"{row[name] / 1e6:.4g}"


def _header(*cells: str) -> list[str]:
    return [_line(*cells), "|---" * len(cells) + "|"]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
