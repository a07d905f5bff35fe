"""Each command does what it says, on a tiny model and in this process."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import autoac
from autoac.cli.failures import understand
from autoac.cli.target import Target
from autoac.cli.training import train
from autoac_solver.records.errors import InfeasibleBudgetError, NoPlanInTimeError
from autoac_solver.records.plan import PlanRecord
from autoac_solver.records.profile import Profile
from tests.cli.conftest import FACTORIES, done, invoke
from tests.small_models import batch, make

MODEL = f"{FACTORIES}:small"


def answer(*arguments: Any, code: int = 0) -> dict[str, Any]:
    """The JSON document that a command prints."""
    result = invoke(*arguments, "--json")
    assert result.exit_code == code, result.stderr
    return json.loads(result.stdout)


def peaks(profile: Path) -> tuple[int, int]:
    """The least possible peak and the one with nothing recomputed."""
    least = answer("plan", profile, "--budget", 1, code=3)["error"]["minimum_bytes"]
    return least, answer("plan", profile, "--budget", "1TB")["predicted_peak_bytes"]


@pytest.fixture(scope="session")
def between(recorded: Path) -> int:
    """A budget that takes some recomputation."""
    return sum(peaks(recorded)) // 2


@pytest.fixture(scope="session")
def plan_file(recorded: Path, between: int) -> Path:
    path = recorded.parent / "plan.json"
    done("plan", recorded, "--budget", between, "-o", path)
    return path


# -- profile -------------------------------------------------------------------------------------------------------


def test_profile_writes_what_the_library_reads_and_says_which_budgets_are_possible(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    said = answer("profile", MODEL, "-o", path)
    profile = Profile.load(path)
    assert (said["command"], said["model"], said["output"]) == ("profile", "Blocks", str(path))
    assert said["resident_bytes"] == profile.resident_bytes
    assert said["ops"] == len(profile.tape)
    assert (said["least_peak_bytes"], said["unplanned_peak_bytes"]) == peaks(path)


def test_profile_with_an_optimizer_counts_it(recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    done("profile", f"{FACTORIES}:with_optimizer", "-o", path)
    more = Profile.load(path).resident_bytes - Profile.load(recorded).resident_bytes
    trained = sum(p.numel() * p.element_size() for p in make(blocks=4).parameters())
    assert trained * 2 <= more <= trained * 2 + 1000  # two moments, and the number of steps of each parameter


def test_profile_without_running_it_and_for_a_device_that_is_not_here(recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "fake.json"
    said = answer("profile", MODEL, "-o", path, "--mode", "fake")
    assert (said["device"], said["ops"]) == ("cpu", len(Profile.load(recorded).tape))
    assert any("fake tensors" in note for note in said["notes"])
    said = answer("profile", MODEL, "-o", path, "--device", "h200")
    assert said["device"] == "cuda"
    assert any("H200" in note for note in said["notes"])
    unknown = invoke("profile", MODEL, "-o", path, "--device", "h2000")
    assert unknown.exit_code == 1
    assert "h2000" in unknown.stderr


def test_profile_refuses_an_output_it_cannot_write_before_it_works(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere" / "p.json"):
        assert invoke("profile", MODEL, "-o", path).exit_code == 2


# -- plan ----------------------------------------------------------------------------------------------------------


def test_plan_from_a_file_is_the_librarys_plan(recorded: Path, plan_file: Path, between: int) -> None:
    expected = autoac.solve(Profile.load(recorded), between)
    plan = autoac.Plan.load(plan_file)
    assert plan.regions == expected.regions
    assert plan.budget_bytes == between
    assert plan.predicted_overhead > 0
    said = answer("plan", recorded, "--budget", between)
    assert said["predicted_peak_bytes"] == plan.predicted_peak_bytes <= between
    assert said["predicted_overhead"] == plan.predicted_overhead
    assert said["status"] == "optimal"
    assert said["output"] is None


def test_plan_from_a_plan_takes_the_profile_it_carries(recorded: Path, plan_file: Path, between: int) -> None:
    again, before = (answer("plan", source, "--budget", between) for source in (plan_file, recorded))
    assert again | {"solve_s": 0} == before | {"solve_s": 0}


def test_plans_from_a_plan_follow_its_policies_and_its_engine(recorded: Path, tmp_path: Path) -> None:
    path, again = tmp_path / "plan.json", tmp_path / "again.json"
    policies = [autoac.Policy("MUST_SAVE", op="aten.relu")]
    autoac.solve(Profile.load(recorded), 10**9, engine="sac", policies=policies).save(path)
    done("plan", path, "--budget", 10**9, "-o", again)
    made = autoac.Plan.load(again)
    assert made.engine == "sac"
    assert [applied.policy for applied in made.record.policies] == policies
    assert answer("tradeoff", path, "--points", 2)["engine"] == "sac"
    done("report", path, "-o", tmp_path / "page.html", "--points", 2)
    error = answer("plan", path, "--budget", 1, code=3)["error"]
    assert error["policies"] == [str(policies[0])]
    assert 0 < error["minimum_without_policies_bytes"] <= error["minimum_bytes"]
    assert "Policies that have to be followed; without them" in invoke("plan", path, "--budget", 1).stderr


def test_arguments_that_do_not_go_together_are_usage_errors(recorded: Path) -> None:
    result = invoke("plan", recorded, "--budget", "1GB", "--budget-of", "reserved")
    assert result.exit_code == 2
    assert "budget_of='reserved' is for CUDA" in result.stderr


def test_plan_from_a_model(between: int, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    result = done("plan", MODEL, "--budget", between, "--engine", "sac", "-o", path)
    assert "engine sac (asked for)" in result.stdout
    assert f"Written: {path}" in result.stdout.replace("\n", "")
    assert autoac.Plan.load(path).predicted_peak_bytes <= between


def test_plan_with_named_regions(recorded: Path, between: int) -> None:
    for source in (recorded, MODEL):
        said = answer(
            "plan", source, "--budget", between, "--regions", "blocks.[12]", "--regions", "blocks.3"
        )
        assert said["regions"] == 3
    wrong = invoke("plan", recorded, "--budget", between, "--regions", "layers.*")
    assert wrong.exit_code == 2
    assert "'layers.*' matches no module" in wrong.stderr


def test_headroom(recorded: Path, between: int) -> None:
    said = answer("plan", recorded, "--budget", between, "--headroom", "10KB")
    assert said["headroom_bytes"] == 10_000
    assert said["predicted_peak_bytes"] <= between - 10_000


def test_an_infeasible_budget_with_headroom_says_what_works_with_it(recorded: Path) -> None:
    least, _ = peaks(recorded)
    result = invoke("plan", recorded, "--budget", least, "--headroom", "10KB")
    assert result.exit_code == 3
    assert "with 10 KB = 9.766 KiB of headroom" in result.stderr
    assert result.stderr.splitlines()[-1] == f"hint: --budget {least + 10_000} or more works."
    answer("plan", recorded, "--budget", least + 10_000, "--headroom", "10KB")


def test_an_infeasible_budget_says_what_is_possible(recorded: Path) -> None:
    least, _ = peaks(recorded)
    result = invoke("plan", recorded, "--budget", least - 1)
    assert (result.exit_code, result.stdout) == (3, "")
    first, *_, hint = result.stderr.splitlines()
    assert first.startswith("error: No plan fits a budget of ")
    assert hint == f"hint: --budget {least} or more works."
    assert "It is held by:" in result.stderr
    answer("plan", recorded, "--budget", least)
    failed = answer("plan", recorded, "--budget", least - 1, code=3)["error"]
    assert (failed["kind"], failed["exit_code"], failed["proven"]) == ("infeasible_budget", 3, True)
    assert (failed["budget_bytes"], failed["minimum_bytes"]) == (least - 1, least)


def test_a_least_budget_that_is_not_proven_is_not_called_that() -> None:
    said = understand(InfeasibleBudgetError(1000, 2000, proven=False))
    assert said.line == (
        "No plan for a budget of 1 KB = 0.9766 KiB was found in the time given; "
        "the least peak found is 2 KB = 1.953 KiB."
    )
    assert said.data["proven"] is False


def test_no_plan_in_time(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autoac_solver.optimise.ilp import solve
    from autoac_solver.plan import planning
    from tests.solver.generators import tangled

    problem = tangled(0, n_groups=300, n_instances=2000)

    def too_late(*_: Any, **options: Any) -> Any:
        return solve(problem, 10**9, time_limit_s=options["time_limit_s"])

    with pytest.raises(NoPlanInTimeError):
        too_late(time_limit_s=0.0)
    monkeypatch.setattr(planning, "plan_profile", too_late)
    result = invoke("plan", recorded, "--budget", "1GB", "--time-limit", 0)
    assert result.exit_code == 4
    error, hint = result.stderr.splitlines()
    assert error.startswith("error: No plan within 1 GB = 953.7 MiB was found in ")
    assert (
        hint == "hint: Give the solver more seconds (`autoac plan` has --time-limit), or a larger --budget."
    )
    assert (
        answer("plan", recorded, "--budget", "1GB", "--time-limit", 0, code=4)["error"]["kind"]
        == "no_plan_in_time"
    )


def test_a_plan_made_from_a_plan_has_its_engine_and_says_so(
    recorded: Path, between: int, tmp_path: Path
) -> None:
    first, again, curve = (tmp_path / name for name in ("first.json", "again.json", "curve.json"))
    done("plan", recorded, "--budget", 2 * between, "--engine", "sac", "-o", first)
    reason = "as in the plan that this was made from"
    assert f"engine sac ({reason})" in done("plan", first, "--budget", "1GB", "-o", again).stdout
    assert PlanRecord.load(again).engine_reason == reason
    assert "engine replay (asked for)" in done("plan", first, "--budget", "1GB", "--engine", "replay").stdout
    assert "(auto: eager mode)" in done("plan", recorded, "--budget", "1GB").stdout
    done("tradeoff", first, "--budget", "1GB", "-o", curve)
    loaded = autoac.Tradeoff.load(curve)
    assert (loaded.engine, loaded.engine_reason) == ("sac", reason)


def test_a_plan_in_few_lines_and_in_full(recorded: Path, between: int) -> None:
    short = done("plan", recorded, "--budget", between).stdout.splitlines()
    full = done("plan", recorded, "--budget", between, "--details").stdout.splitlines()
    assert short[-1].startswith("The peak lies at ")
    assert short[-1].endswith(". --details says more.")
    assert len(short) <= 14 < len(full)
    assert [line.split("(HiGHS")[0] for line in short[:5]] == [line.split("(HiGHS")[0] for line in full[:5]]
    assert any(line.startswith("The budget costs") for line in full)


def test_a_budget_that_takes_no_checkpointing_says_so(recorded: Path, between: int) -> None:
    note = "no checkpointing is needed"
    said = answer("plan", recorded, "--budget", "1GB")
    assert not said["is_checkpointing_needed"]
    assert [text for text in said["notes"] if note in text]
    assert note in done("plan", recorded, "--budget", "1GB").stdout
    said = answer("plan", recorded, "--budget", between)
    assert said["is_checkpointing_needed"]
    assert not [text for text in said["notes"] if note in text]
    assert set(Profile.load(recorded).notes) <= set(said["notes"])
    assert said["sample"] == Profile.load(recorded).sample


def test_the_least_memory_for_a_slowdown(recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    said = answer("plan", recorded, "--max-overhead", "10%", "-o", path)
    plan = autoac.solve(Profile.load(recorded), max_overhead=0.1)
    assert said["budget_bytes"] == said["predicted_peak_bytes"] == plan.predicted_peak_bytes
    assert 0 <= said["predicted_overhead"] <= 0.1
    assert answer("plan", recorded, "--max-overhead", "0.1")["budget_bytes"] == plan.budget_bytes
    assert autoac.Plan.load(path).regions == plan.regions
    for options, text in (
        ([], "give one of the two"),
        (["--budget", "1GB", "--max-overhead", "5%"], "give one of the two"),
        (["--max-overhead", "5"], "'--max-overhead': max_overhead is 5.0; write"),
        (["--max-overhead", "little"], "max_overhead is 'little'; write"),
    ):
        refused = invoke("plan", recorded, *options)
        assert refused.exit_code == 2
        assert text in " ".join(refused.stderr.split())


def test_plans_and_profiles_are_json_and_that_is_said_before_the_work(tmp_path: Path) -> None:
    for command in (["plan", "no_such_file.py:f", "--budget", "1GB"], ["profile", "no_such_file.py:f"]):
        result = invoke(*command, "-o", tmp_path / "plan.txt")
        assert result.exit_code == 2
        assert "plan.txt is no .json" in " ".join(result.stderr.split())


def test_factories_take_arguments(recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    said = answer("profile", f"{FACTORIES}:takes_arguments", "--arg", "size=4", "-o", path)
    assert said["ops"] == len(Profile.load(recorded).tape)
    for options, text in (
        (["--arg", "size"], "'size' is no NAME=VALUE."),
        (["--arg", "size=1", "-a", "size=2"], "size is given twice."),
    ):
        refused = invoke("profile", f"{FACTORIES}:takes_arguments", *options, "-o", path)
        assert refused.exit_code == 2
        assert text in refused.stderr
    refused = invoke("profile", f"{FACTORIES}:takes_arguments", "--arg", "width=1", "-o", path)
    assert refused.exit_code == 1
    assert "width" in refused.stderr
    assert "it is for a factory" in invoke("plan", recorded, "--budget", "1GB", "--arg", "size=1").stderr


# -- tradeoff ------------------------------------------------------------------------------------------------------


def test_tradeoff_prints_and_writes_the_curve(recorded: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"curve.{ending}" for ending in ("json", "csv", "png", "svg")]
    said = answer("tradeoff", recorded, "--points", 4, *(part for file in files for part in ("-o", file)))
    rows = said["budgets"]
    assert [rows[0]["budget_bytes"], rows[-1]["budget_bytes"]] == list(peaks(recorded))
    assert not said["interrupted"]
    assert [row["name"] for row in said["by_hand"]][:2] == ["none", "every block"]
    assert said["knee"] in {row["budget_bytes"] for row in rows}
    overheads = [row["overhead"] for row in rows]
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[0] > overheads[-1] == 0
    loaded = autoac.Tradeoff.load(files[0])
    assert loaded.frame["budget_bytes"].tolist() == [row["budget_bytes"] for row in rows]
    with files[1].open() as file:
        assert [int(row["budget_bytes"]) for row in csv.DictReader(file)] == [r["budget_bytes"] for r in rows]
    assert files[2].read_bytes().startswith(b"\x89PNG")
    assert b"</svg>" in files[3].read_bytes()
    assert sorted(tmp_path.iterdir()) == sorted(files)  # and nothing half written


def test_tradeoff_of_a_model_and_given_budgets(recorded: Path, between: int) -> None:
    result = done("tradeoff", MODEL, "--budget", between, "--budget", "1GB", "-v")
    curve, by_hand = result.stdout.split("Predicted for checkpointing by hand")
    assert len([line for line in curve.splitlines() if "MB" in line]) == 2
    assert len([line for line in by_hand.splitlines() if "MB" in line]) == 5
    assert "Profiling: recorded step" in result.stderr
    assert "Planning: budget 2 of 2" in result.stderr
    assert invoke("tradeoff", recorded, "--budget", 1).exit_code == 3


def test_tradeoff_refuses_a_format_it_does_not_know(recorded: Path, tmp_path: Path) -> None:
    result = invoke("tradeoff", recorded, "-o", tmp_path / "curve.xlsx")
    assert result.exit_code == 2
    assert "is none of .json, .csv" in " ".join(result.stderr.split())


# -- report --------------------------------------------------------------------------------------------------------


def test_report_writes_a_page(plan_file: Path, tmp_path: Path) -> None:
    for points in (0, 3):
        path = tmp_path / f"report{points}.html"
        said = answer("report", plan_file, "-o", path, "--points", points)
        assert said["bytes"] == path.stat().st_size
        assert "<html" in path.read_text(encoding="utf-8").lower()
    assert invoke("report", plan_file, "-o", tmp_path / "report.html", "--points", 1).exit_code == 2


def test_report_of_a_curve_solves_nothing(
    plan_file: Path, recorded: Path, between: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve, page = tmp_path / "curve.json", tmp_path / "page.html"
    done("tradeoff", recorded, "--points", 3, "-o", curve)
    monkeypatch.setattr(
        "autoac_solver.show.page.render.plan_budgets", lambda *_, **__: pytest.fail("it solves")
    )
    assert answer("report", curve, "-o", page)["points"] == 3
    assert answer("report", plan_file, "--curve", curve, "-o", page)["points"] == 3
    assert f"{between:,} bytes" in page.read_text(encoding="utf-8")
    for options, text in (
        ([curve, "--points", 5], "the curve has its budgets"),
        ([curve, "--curve", curve], "is a curve itself"),
    ):
        refused = invoke("report", *options, "-o", page)
        assert refused.exit_code == 2
        assert text in refused.stderr
    other = tmp_path / "other.json"
    done("tradeoff", recorded, "--points", 2, "--engine", "sac", "-o", other)
    refused = invoke("report", plan_file, "--curve", other, "-o", page)
    assert refused.exit_code == 2
    assert "engine='replay'" in refused.stderr


def test_report_writes_pages_only(plan_file: Path, tmp_path: Path) -> None:
    for name in ("report.pdf", "report", "report.html.txt"):
        result = invoke("report", plan_file, "-o", tmp_path / name)
        assert result.exit_code == 2
        assert f"{name} is none of .html, .htm." in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


# -- run -----------------------------------------------------------------------------------------------------------


def test_run_trains_as_without_a_plan(plan_file: Path, between: int) -> None:
    torch.manual_seed(7)
    said = answer("run", f"{FACTORIES}:with_loss", "--plan", plan_file, "--steps", 5, "--learning-rate", 0.5)
    torch.manual_seed(7)
    model = make(blocks=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert said["losses"] == losses
    assert losses[-1] < losses[0]
    assert said["is_within_budget"]
    assert said["budget_bytes"] == between
    assert abs(said["measured_peak_bytes"] / said["predicted_peak_bytes"] - 1) < 0.01
    assert len(said["step_times_s"]) == 3
    assert said["verified"] is None


def test_run_plans_verifies_and_trains_with_the_users_optimizer(between: int, recorded: Path) -> None:
    model = f"{FACTORIES}:with_optimizer"
    budget = between + 2 * Profile.load(recorded).resident_bytes
    said = answer("run", model, "--budget", budget, "--verify", "--steps", 3)
    assert said["optimizer"] == "AdamW"
    assert said["verified"]["equal"]
    assert said["verified"]["first_difference"] == ""
    assert abs(said["measured_peak_bytes"] / said["predicted_peak_bytes"] - 1) < 0.01
    shown = done("run", model, "--budget", budget, "--verify", "--steps", 3).stdout
    assert "equal to the bit" in shown
    assert "within it" in shown


def test_run_counts_an_optimizer_that_the_plan_does_not(
    plan_file: Path, recorded: Path, between: int
) -> None:
    """Its state is there before the step, and its step is a part of it, whatever the plan was made for."""
    model = f"{FACTORIES}:with_optimizer"
    said = answer("run", model, "--plan", plan_file, "--steps", 3, code=1)
    trained = sum(p.numel() * p.element_size() for p in make(blocks=4).parameters())
    state = said["optimizer_state_bytes"]
    assert 2 * trained <= state <= 2 * trained + 1000
    assert said["measured_peak_bytes"] - said["predicted_peak_bytes"] == pytest.approx(state, rel=0.01)
    assert (said["is_within_budget"], said["is_optimizer_planned"]) == (False, False)
    shown = invoke("run", model, "--plan", plan_file, "--steps", 3).stdout
    assert "bytes over it" in shown
    assert "the plan was made without AdamW's state, 0.1 MB, which is in the measured peak" in shown

    planned = answer("run", model, "--budget", between + 4 * trained, "--steps", 3)
    assert planned["is_optimizer_planned"]
    assert planned["optimizer_state_bytes"] == state
    without = answer("run", MODEL, "--plan", plan_file, "--steps", 3)
    assert (without["optimizer_state_bytes"], without["is_within_budget"]) == (0, True)


def test_run_measures_a_larger_sample_as_it_is() -> None:
    large = batch().repeat(50, 1)
    plan = autoac.plan(make(), batch(), "1TB")
    with pytest.warns(UserWarning, match="plan was made for"):
        training = train(Target("", make(), large), plan, 3, 0.01, lambda *_: None)
    unplanned = autoac.plan(make(), large, "1TB").record.unplanned_peak_bytes
    assert training.measured_peak_bytes == pytest.approx(unplanned, rel=1e-3)


def test_run_refuses_an_optimizer_of_another_model() -> None:
    other = Target("", make(), batch(), optimizer=torch.optim.SGD(make().parameters()))
    plan = autoac.plan(make(), batch(), "1TB")
    with pytest.raises(autoac.ProfilingError, match="the optimizer has no parameter of this model"):
        train(other, plan, 3, 0.01, lambda *_: None)


def test_run_with_a_sample_that_is_a_step(tmp_path: Path) -> None:
    said = answer("run", f"{FACTORIES}:whole_step", "--budget", "1GB", "--steps", 3)
    assert said["optimizer"] == "the sample's own step"
    assert len(set(said["losses"])) > 1  # dropout: nothing is learned, and no two steps are alike


def test_run_fails_where_the_peak_exceeds_the_budget(plan_file: Path, tmp_path: Path) -> None:
    record = PlanRecord.load(plan_file)
    path = tmp_path / "plan.json"
    dataclasses.replace(record, budget_bytes=record.resident_bytes).save(path)
    result = invoke("run", MODEL, "--plan", path, "--steps", 3)
    assert result.exit_code == 1
    assert "bytes over it" in result.stdout


def test_run_refuses_another_models_plan(plan_file: Path) -> None:
    result = invoke("run", f"{FACTORIES}:without_dropout", "--plan", plan_file)
    assert result.exit_code == 1
    assert "this plan was made for Blocks" in result.stderr
    assert "hint: `autoac plan MODEL --budget ... -o plan.json` makes a plan" in result.stderr


@pytest.mark.parametrize("options", [[], ["--verify"]])
@pytest.mark.parametrize(
    ("factory", "error", "given"),
    [
        ("narrower_sample", "RuntimeError", "float32[3,5]"),
        ("sample_by_a_wrong_name", "TypeError", "y float32[{shape}]"),
    ],
)
def test_run_says_what_the_plan_was_made_for_where_the_step_fails(
    plan_file: Path, options: list[str], factory: str, error: str, given: str
) -> None:
    shape = ",".join(map(str, batch().shape))
    result = invoke("run", f"{FACTORIES}:{factory}", "--plan", plan_file, *options)
    line, hint = result.stderr.splitlines()[-2:]
    assert (result.exit_code, line.partition(" in ")[0].partition(": ")[2][: len(error)]) == (1, error)
    where = "in verify" if options else "in step 1 of training"
    assert hint.startswith(
        f"hint: the step failed {where} with the sample {given.format(shape=shape)} "
        f"(the plan was made for float32[{shape}])"
    )
    assert ("as they were" in hint) == bool(options)  # training has changed the model by then
    assert "plan for this sample" in hint


def test_run_takes_either_a_plan_or_a_budget(plan_file: Path) -> None:
    for options in ([], ["--plan", plan_file, "--budget", "1GB"]):
        result = invoke("run", MODEL, *options)
        assert result.exit_code == 2
        assert "give one of the two" in result.stderr


# -- calibrate and selfcheck ---------------------------------------------------------------------------------------


def test_calibrate_writes_a_table_that_profile_takes(tmp_path: Path):
    table = tmp_path / "here.json"
    found = answer("calibrate", "--size", "tiny", "-o", table)
    assert found["name"] == "here"
    assert found["entries"] > 100
    recorded = answer("profile", f"{FACTORIES}:small", "--device", table, "-o", tmp_path / "p.json")
    assert any("from a cost table whose rates are measured" in note for note in recorded["notes"])


def test_selfcheck_prints_what_was_predicted_and_measured():
    result = done("selfcheck", "--size", "tiny")
    assert result.stdout.count(" plan at ") == 8
    assert "Every plan kept its promises." in result.stdout
    assert "NOT ok" not in result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_a_usage_error():
    result = invoke("selfcheck", "--device", "cuda")
    assert result.exit_code == 2
    assert "there is no CUDA device here" in result.stderr


# -- plan --hf -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model's configuration and no weights."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("configured")
    transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
        attention_dropout=0.1,
    ).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_plan_for_a_configuration_is_followed_by_the_model(configured: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tmp_path / "plan.json"
    sizes = ("--hf", configured, "--batch", 2, "--seq", 32, "--dtype", "float32", "--optimizer", "none")
    said = answer("plan", *sizes, "--budget", 500_000, "-o", path)
    assert said["predicted_peak_bytes"] <= 500_000 < said["unplanned_peak_bytes"]
    plan = autoac.Plan.load(path)
    config = AutoConfig.from_pretrained(configured)
    config.use_cache = False
    ids = torch.randint(64, (2, 32))
    model, sample = AutoModelForCausalLM.from_config(config).train(), {"input_ids": ids, "labels": ids}
    report = plan.verify(model, sample)
    assert report.ok, report


def test_plan_for_a_configuration_on_a_gpu_that_is_not_here(configured: Path, tmp_path: Path) -> None:
    options = ("--seq", 64, "--device", "h200", "--budget", "80%")
    plain = answer("plan", "--hf", configured / "config.json", "--optimizer", "none", *options)
    assert (plain["model"], plain["device"]) == ("LlamaForCausalLM", "cuda")
    assert plain["budget_bytes"] == 112_800_000_000
    trained = answer("plan", "--hf", configured, *options)
    more = answer(
        "plan", "--hf", configured, "--batch", 2, "--dtype", "bfloat16", *options, "-o", tmp_path / "p.json"
    )
    parameters = 2 * 64 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 96 + 2 * 32) + 32
    state = trained["resident_bytes"] - plain["resident_bytes"]
    norms, their_bytes = 5, 4 * 32
    # Two moments of each parameter, in blocks of 512 bytes; all but the norms' fill theirs.
    assert state == 8 * parameters + 2 * norms * (512 - their_bytes)
    assert more["resident_bytes"] < trained["resident_bytes"]
    assert more["unplanned_peak_bytes"] > more["resident_bytes"]
    policies = [
        autoac.Policy("PREFER_SAVE", op=op) for op in ("aten.mm", "aten.add", "aten.mul", "aten.silu")
    ]
    full = autoac.solve(
        autoac.Plan.load(tmp_path / "p.json").record.profile, "1GB", policies=policies
    ).summary()
    assert "two clocks" in full
    assert "reserved" in full
    assert "\n  note " in full
    assert "\n  policy " in full
    assert len(full.splitlines()) <= 14  # and a line that says where the plan was written


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_model_compiled_as_one_region(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("autoac.calibrate.compiled.table.MOST_COMPILED", 1)
    path = tmp_path / "p.json"
    answer("profile", MODEL, "--engine", "compile", "--granularity", "whole", "-o", path)
    profile = Profile.load(path)
    assert profile.compiled is not None
    [region] = profile.compiled.regions
    assert [profile.calls[call].fqn for call in region.calls] == [""]
    assert answer("plan", path, "--engine", "compile", "--budget", "1GB")["engine"] == "compile"
    refused = invoke("plan", path, "--engine", "compile", "--granularity", "whole", "--budget", "1GB")
    assert "give it to `autoac profile`" in " ".join(refused.stderr.split())


def test_plan_for_a_configuration_refuses_what_makes_no_sense(configured: Path, tmp_path: Path) -> None:
    def refused(*arguments: object) -> str:
        result = invoke("plan", "--budget", "1GB", *arguments)
        assert result.exit_code == 2
        return " ".join(result.stderr.split())

    assert "give either MODEL_OR_FILE or --hf" in refused()
    assert "give either MODEL_OR_FILE or --hf" in refused(MODEL, "--hf", configured, "--seq", 4)
    assert "it goes with --hf, --fsdp or --tp only" in refused(MODEL, "--device", "h200")
    assert "it goes with --hf only" in refused(MODEL, "--fsdp", 2, "--seq", 4)
    assert "say how many tokens" in refused("--hf", configured)
    assert "with --hf no step is run" in refused("--hf", configured, "--seq", 4, "--engine", "compile")
    assert "goes with --engine compile only" in refused(MODEL, "--granularity", "whole")
    assert "no file or folder" in refused("--hf", tmp_path / "nowhere", "--seq", 4)
    assert "the model has 64 positions" in refused("--hf", configured, "--seq", 65)
    other = tmp_path / "config.json"
    other.write_text('{"model_type": "vit"}')
    result = invoke("plan", "--budget", "1GB", "--hf", other, "--seq", 4)
    assert result.exit_code == 1
    assert "causal language models" in result.stderr


def test_plan_for_a_configuration_runs_no_code_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "ours", "auto_map": {"AutoConfig": "ours.Config", "AutoModelForCausalLM": "ours.Model"}}'
    )
    (tmp_path / "ours.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    result = invoke("plan", "--budget", "1GB", "--hf", tmp_path, "--seq", 4, answer="y\n")
    assert result.exit_code == 1
    assert not list(tmp_path.rglob("ran"))
