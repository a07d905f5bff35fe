"""`--fsdp`: plans for a rank that is not here, what it holds, and what more or fewer ranks would hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import autoac
from autoac.parallel import FSDP2
from autoac_solver.records.profile import VARIES, Profile
from tests.cli.conftest import FACTORIES, done, invoke
from tests.cli.factories import with_optimizer
from tests.cli.test_commands import answer, configured  # noqa: F401  (a fixture)

MODEL = f"{FACTORIES}:with_optimizer"
BOTH = ("--device", "h200", "--budget", "80%")


def sizes_of(said: dict[str, Any]) -> dict[int, dict[str, int]]:
    return {one["ranks"]: one for one in said["fsdp"]["sizes"]}


@pytest.fixture(scope="module")
def llama(request: pytest.FixtureRequest) -> tuple[Any, ...]:
    """Options for a tiny model's configuration."""
    return ("--hf", request.getfixturevalue("configured"), "--seq", 64, "--dtype", "float32")


def test_a_plan_for_a_rank_says_what_it_holds_and_what_others_would(llama: tuple[Any, ...]) -> None:
    said = answer("plan", *llama, *BOTH, "--fsdp", 8)
    assert sum(said["peak_parts_bytes"].values()) == said["predicted_peak_bytes"]
    assert (said["fsdp"]["ranks"], said["fsdp"]["replicas"]) == (8, 1)
    found = sizes_of(said)
    assert list(found) == [4, 8, 16]
    parts = said["peak_parts_bytes"]
    assert found[8]["parameters_bytes"] == parts["parameters"]
    assert found[8]["optimizer_bytes"] == parts["optimizer"]
    assert found[8]["peak_bytes"] == said["predicted_peak_bytes"]
    assert parts["gathered"] > parts["parameters"]
    assert not [note for note in said["notes"] if note.startswith(VARIES)]
    other = answer("plan", *llama, *BOTH, "--fsdp", 4)
    assert sizes_of(other)[4] == found[4]
    assert sizes_of(other)[8] == found[8]


def test_a_plan_for_a_rank_in_words(llama: tuple[Any, ...], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    shown = done("plan", *llama, *BOTH, "--fsdp", 4, "-o", path).stdout
    summary, _, tables = shown.partition("--details says more.")
    assert summary.startswith("Plan for LlamaForCausalLM on cuda")
    peak, _, others = tables.partition("Other numbers of ranks, with the same plan")
    assert "One of 4 ranks at its peak" in peak
    for part in (
        "parameters",
        "gathered",
        "gradients",
        "optimizer",
        "inputs",
        "activations",
        "other",
        "in all",
    ):
        assert part in peak
    rows = [line.split()[0] for line in others.splitlines() if " MB" in line]
    assert rows == ["2", "4", "8"]
    assert others.rstrip().endswith(f"Written: {path}")
    assert answer("plan", path, "--budget", "1GB")["resident_bytes"] == autoac.Plan.load(path).resident_bytes


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
def test_layers_that_ranks_split(llama: tuple[Any, ...]) -> None:
    def asked(*options: Any) -> dict[str, Any]:
        return answer("plan", *llama, *BOTH, *options)

    split, both, alone = asked("--tp", 2), asked("--tp", 2, "--fsdp", 4), asked("--fsdp", 4)
    assert split["tp"] == {"ranks": 2, "all_ranks": 2}
    assert "fsdp" not in split
    assert both["tp"] == {"ranks": 2, "all_ranks": 8}
    assert [size["ranks"] for size in both["fsdp"]["sizes"]] == [4, 8, 16]
    assert all(size["peak_bytes"] for size in both["fsdp"]["sizes"])
    parameters = [said["peak_parts_bytes"]["parameters"] for said in (split, both, alone)]
    assert parameters[1] < min(parameters[0], parameters[2])
    shown = done("plan", *llama, *BOTH, "--tp", 2).stdout
    assert "One of 2 ranks at its peak" in shown
    assert "Other numbers of ranks" not in shown


def test_fsdp2s_options(llama: tuple[Any, ...]) -> None:
    def parts(*options: Any) -> dict[str, Any]:
        return answer("plan", *llama, *BOTH, "--fsdp", 8, *options)

    plain = parts()
    kept = parts("--no-reshard-after-forward")
    assert kept["peak_parts_bytes"]["gathered"] > plain["peak_parts_bytes"]["gathered"]
    mixed = parts("--param-dtype", "bfloat16", "--reduce-dtype", "float32")
    assert mixed["peak_parts_bytes"]["parameters"] == plain["peak_parts_bytes"]["parameters"]
    assert mixed["peak_parts_bytes"]["activations"] < plain["peak_parts_bytes"]["activations"]
    ahead = parts("--prefetch", 2)
    assert ahead["fsdp"]["prefetch"] == 2
    assert ahead["predicted_peak_bytes"] >= plain["predicted_peak_bytes"]
    offloaded = parts("--cpu-offload")
    assert offloaded["fsdp"]["cpu_offload"]
    assert {offloaded["peak_parts_bytes"][kind] for kind in ("parameters", "gradients", "optimizer")} == {0}
    assert offloaded["predicted_peak_bytes"] < plain["predicted_peak_bytes"]
    assert "optimizer are in the host's memory" in " ".join(offloaded["notes"])
    groups = parts("--replicas", 2, "--optimizer", "none")
    assert groups["peak_parts_bytes"]["optimizer"] == 0
    assert sizes_of(groups)[16]["parameters_bytes"] == sizes_of(plain)[8]["parameters_bytes"]
    whole = parts("--units", "lm_head")  # and so the root has all blocks
    assert whole["peak_parts_bytes"]["gathered"] > plain["peak_parts_bytes"]["gathered"]


def test_a_factorys_model_for_a_rank(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    recorded = answer("profile", MODEL, "--fsdp", 4, "--device", "h200", "-o", path)
    assert list(sizes_of(recorded)) == [2, 4, 8]
    assert {one["peak_bytes"] for one in sizes_of(recorded).values()} == {None}
    planned = answer("plan", MODEL, "--fsdp", 4, *BOTH)
    again = answer("plan", path, *BOTH[2:])
    assert "fsdp" not in again
    given = with_optimizer()
    expected = autoac.profile(**given, mode="fake", parallel=FSDP2(world_size=4), device="h200")
    assert Profile.load(path).storage_table == expected.storage_table
    for said in (planned, again):
        assert said["resident_bytes"] == recorded["resident_bytes"] == expected.resident_bytes
    assert "Other numbers of ranks\n" in "\n".join(
        line.rstrip()
        for line in done("profile", MODEL, "--fsdp", 3, "--device", "h200", "-o", path).stdout.splitlines()
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--fsdp", 0], "'--fsdp': 0 ranks shard nothing: say how many"),
        (["--fsdp", 8, "--engine", "compile"], "does not plan for absent ranks"),
        (["--tp", 0], "'--tp': 0 ranks split nothing"),
        (
            ["--tp", 2, "--fsdp", 4, "--replicas", 2],
            "'--replicas': with --tp the shards are on all ranks of a part",
        ),
        (["--tp", 2, "--units", "blocks.*"], "'--units': it goes with --fsdp only"),
        (["--fsdp", 8, "--replicas", 3], "'--replicas': 8 ranks cannot be 3 groups of the same size"),
        (["--fsdp", 8, "--replicas", 0], "take a divisor of 8"),
        (["--fsdp", 8, "--prefetch", 0], "'--prefetch': Input should be greater than or equal to 1"),
        (["--prefetch", 2], "'--prefetch': it goes with --fsdp only"),
        (["--no-reshard-after-forward"], "say of how many ranks with --fsdp RANKS"),
        (["--units", "blocks.*"], "'--units': it goes with --fsdp only"),
        (["--param-dtype", "bfloat16"], "'--param-dtype': it goes with --fsdp only"),
        (["--cpu-offload"], "'--cpu-offload': it goes with --fsdp only"),
    ],
)
def test_wrong_uses_are_told_before_anything_is_loaded(options: list[Any], text: str, tmp_path: Path) -> None:
    for command in (
        ["plan", "nothing.py:f", "--budget", "1GB"],
        ["profile", "nothing.py:f", "-o", tmp_path / "p.json"],
    ):
        result = invoke(*command, *options)
        assert (result.exit_code, result.stdout) == (2, "")
        assert text in " ".join(result.stderr.split())


def test_what_has_its_ranks_or_cannot_have_them_is_refused(recorded: Path, tmp_path: Path) -> None:
    for arguments, text in (
        (
            ["plan", recorded, "--budget", "1GB", "--fsdp", 8],
            "record one with `autoac profile MODEL --fsdp 8`",
        ),
        (
            ["plan", MODEL, "--budget", "1GB", "--fsdp", 8, "--units", "layers.*"],
            "'layers.*' matches no module",
        ),
        (["plan", MODEL, "--budget", "20G", "--fsdp", 8], "'20G' is not an amount of memory"),
        (
            ["profile", MODEL, "--fsdp", 8, "--mode", "real", "-o", tmp_path / "p.json"],
            "a step of ranks that are not here cannot be run",
        ),
    ):
        result = invoke(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert text in " ".join(result.stderr.split())
