"""`python -m benchmarks.cuda` runs on CPU with tiny models, so that it does not break where there is a GPU."""

import json
import re
import signal
import time
from pathlib import Path

import pytest
import torch

import autoac
import benchmarks.cuda.__main__
import benchmarks.cuda.jobs
from benchmarks.cuda.__main__ import INTERRUPTED, main
from benchmarks.cuda.jobs import jobs
from benchmarks.cuda.report import render
from benchmarks.cuda.training import SIZES

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = ["--device", "cpu", "--tiny", "--output"]
LEFT_OUT = ["selfcheck", "device table"]


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())["results"]


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # by torch.compile itself
def test_every_job_and_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All but selfcheck and the device's table, which have tests of their own and take long; as compiling does."""
    monkeypatch.setattr(benchmarks.cuda.jobs, "COMPILING", "replay")
    folder = tmp_path / "results"
    names = [name for name, _ in jobs(torch.device("cpu"), SIZES["tiny"], folder, with_table=True)]
    assert main([*TINY, str(folder), "--without", *LEFT_OUT]) == 0
    found = results(folder)
    assert [name for name in names if name not in LEFT_OUT] == list(found)
    failed = {name: result["error"] for name, result in found.items() if "error" in result}
    assert set(failed) <= {"gpt/sac_milp", "llama/sac_milp"}, (
        failed
    )  # torch's planner need not be able to run
    for model in ("gpt", "llama"):
        for number in range(2):
            row = found[f"{model}/ours {number}"]
            # The step's loss is gone before optimizer.step, in the profiled one it is not.
            assert 0 <= row["predicted_peak_bytes"] - row["peak_bytes"] <= 4
            assert row["predicted_peak_bytes"] <= row["budget_bytes"]
            assert row["bits"] == found[f"{model}/none"]["bits"]
            assert row["predicted_reserved_bytes"] is None  # nothing is reserved on CPU
    assert found["gpt/largest batch"]["ours"] >= found["gpt/largest batch"]["none"] >= 1
    assert found["gpt/largest batch"]["ours, measured"]["within"]
    for number in range(2):
        row = found[f"gpt/ours compiled {number}"]
        assert 0 <= row["predicted_peak_bytes"] - row["peak_bytes"] <= 4
        assert row["predicted_peak_bytes"] <= row["budget_bytes"]
    text = (folder / "report.md").read_text()
    for part in (
        "## Environment",
        "## GPT-2 medium's shape",
        "## a Llama",
        "## Engine costs",
        "compiled blocks",
        "| gradients equal to the bit | met |",
        "| never over the budget | met |",
        "| engine compile, budget MB |",
        "MB measured, fits",
    ):
        assert part in text
    assert "Not measured" not in text
    assert (folder / "report.png").exists()

    assert len(re.findall("^[|] gradients equal", text, re.MULTILINE)) == 2

    before = (folder / "results.json").read_bytes()
    assert main([*TINY, str(folder), "--without", *LEFT_OUT]) == 0
    assert (folder / "results.json").read_bytes() == before  # there was nothing left to do


def test_what_time_did_not_suffice_for_is_named_and_taken_up_again(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    assert main([*TINY, str(tmp_path), "--minutes", "0", "--only", "bandwidth"]) == 0
    assert "1 jobs are left" in capsys.readouterr().out
    assert re.search(
        "Run the command again to go on with: .*bandwidth,", (tmp_path / "report.md").read_text()
    )
    assert main([*TINY, str(tmp_path), "--only", "bandwidth"]) == 0
    assert list(results(tmp_path)) == ["bandwidth"]
    report = (tmp_path / "report.md").read_text()
    assert re.search("go on with: environment, ", report)
    assert "bandwidth," not in report
    for wrong in (["--only", "bandwith"], ["--without", "gpt"], ["--again", "gpt"]):
        with pytest.raises(SystemExit):
            main([*TINY, str(tmp_path), *wrong])
        assert re.search("no job is called .*; there are environment, gpt/profile", capsys.readouterr().err)
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--output", str(tmp_path), "--minutes", "0"])
    assert "results of another conditions" in capsys.readouterr().err


def test_a_job_that_has_failed_is_measured_again_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = iter([RuntimeError("busy"), None])

    def once_busy() -> dict:
        if error := next(found):
            raise error
        return {"device": "CPU"}

    monkeypatch.setattr(benchmarks.cuda.__main__, "jobs", lambda *_, **__: [("environment", once_busy)])
    for _ in range(2):
        assert main([*TINY, str(tmp_path)]) == 0
        assert results(tmp_path) == {"environment": {"error": "RuntimeError: busy"}}
    assert main([*TINY, str(tmp_path), "--again", "environment"]) == 0
    assert results(tmp_path) == {"environment": {"device": "CPU"}}


def test_allocator_options_are_a_condition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    assert main([*TINY, str(tmp_path), "--only", "environment"]) == 0
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(SystemExit):
        main([*TINY, str(tmp_path), "--only", "bandwidth"])
    assert "results of another conditions" in capsys.readouterr().err


def test_a_failure_is_a_row(tmp_path: Path):
    row = {"error": "RuntimeError: no | yes"}
    about = {"error": "OutOfMemoryError: far too large"}
    text = render({"gpt/profile": about, "engine costs": row}, ["llama/none"])
    assert "It could not be profiled: OutOfMemoryError" in text
    assert "no / yes" in text


def test_a_job_that_is_broken_off_is_left_and_the_report_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """By Ctrl-C, and by the command's own clock: eight minutes are eight minutes."""
    done = [("environment", lambda: {"device": "CPU"})]
    slow = ("slow", lambda: time.sleep(30))
    interrupted = ("interrupted", lambda: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(benchmarks.cuda.__main__, "jobs", lambda *_, **__: [*done, slow])
    start = time.monotonic()
    assert main([*TINY, str(tmp_path), "--minutes", "0.005"]) == 0
    assert time.monotonic() - start < 20
    assert list(results(tmp_path)) == ["environment"]
    assert "go on with: slow." in (tmp_path / "report.md").read_text()
    monkeypatch.setattr(benchmarks.cuda.__main__, "jobs", lambda *_, **__: [*done, interrupted])
    assert main([*TINY, str(tmp_path)]) == INTERRUPTED
    assert "1 jobs are left: run the command again" in capsys.readouterr().out
    assert "go on with: interrupted." in (tmp_path / "report.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_it_says_what_can_be_done(capsys: pytest.CaptureFixture, tmp_path: Path):
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path)])
    assert "no CUDA device here; --device cpu --tiny" in capsys.readouterr().err


def test_how_far_the_two_clocks_were_off_is_what_was_measured():
    """What the page on GPUs and the limits say of it, from the profile and the results that are kept."""
    folder = ROOT / "benchmarks" / "results" / "h200"
    models = json.loads((folder / "results.json").read_text())["results"]["selfcheck"]["models"]
    small = [
        100 * (row["overhead"] - row["predicted_overhead"])
        for model in models
        for row in model["rows"]
        if row["name"].startswith("plan")
    ]
    large = re.findall(
        r"extra time within two points \| NOT met \| at most \+([\d.]+)", (folder / "report.md").read_text()
    )
    profile = autoac.Profile.load(ROOT / "profiles" / "gpt2-medium-h200.json")
    op_us = 1e6 * profile.lanes.host_s / len(profile.tape)
    for page in ("guides/on-a-gpu.md", "limits.md"):
        text = " ".join((ROOT / "docs" / page).read_text().split())
        assert f"up to {max(map(float, large)):.0f} points" in text
        assert re.search(f"(up to |\\(){max(small):.0f}\\b", text)
    text = (ROOT / "docs" / "guides" / "on-a-gpu.md").read_text()
    assert f"took {op_us:.0f} µs" in text


def test_the_page_says_what_the_report_says():
    """Budgets, peaks and times of the plans in docs/measured.md are those of the results that are kept."""
    results = json.loads((ROOT / "benchmarks" / "results" / "h200" / "results.json").read_text())["results"]
    section = (ROOT / "docs" / "measured.md").read_text().split("## On an H200")[1].split("\n## ")[0]
    parts = {part.partition("\n")[0]: part for part in section.split("### ")}
    for title, expected in (
        ("Engine replay", _replay_rows(results)),
        ("Engine compile", _compiled_rows(results)),
    ):
        budgets = [line for line in parts[title].splitlines() if re.match(r"\| \d{4}", line)]
        assert [re.findall(r"-?\d+\.\d", line) for line in budgets] == expected


def _replay_rows(results: dict) -> list[list[str]]:
    rows = []
    for name in ("gpt", "llama"):
        none, about = results[f"{name}/none"]["step_s"], results[f"{name}/profile"]["predicted_step_s"]
        for number in range(8):
            row = results[f"{name}/ours {number}"]
            rows.append(
                _sizes(row) + _shares((row["predicted_step_s"] - about) / none, row["step_s"] / none - 1)
            )
    return rows


def _compiled_rows(results: dict) -> list[list[str]]:
    rows = []
    for name in ("gpt", "llama"):
        none = results[f"{name}/none"]["step_s"]
        for number in range(6):
            row = results[f"{name}/ours compiled {number}"]
            rows.append(_sizes(row) + _shares(row["step_s"] / none - 1))
    return rows


def _sizes(row: dict) -> list[str]:
    sizes = row["budget_bytes"], row["predicted_peak_bytes"], row["peak_bytes"]
    return [f"{size / 1e6:.1f}" for size in sizes]


def _shares(*shares: float) -> list[str]:
    return [f"{100 * share:.1f}" for share in shares]
