"""README and docs: examples run, sessions print the output shown, and all names exist."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoac
from autoac.calibrate.compiled import table
from tests.cli.conftest import invoke, process
from tests.features.compatibility import in_docs
from tests.integrations.test_trl import WORDS, llama, sentences, tokenizer
from tests.project.test_layering import MODULES, ORDER
from tests.real_models import unet

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "solver/README.md"))]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def snippets(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.M | re.S)


# -- the README's quick start ---------------------------------------------------------------------------------


def quick_start_commands() -> list[str]:
    (section,) = re.findall(
        r"^## Quick start\n(.*?)(?=^## |\Z)", (ROOT / "README.md").read_text(), re.M | re.S
    )
    return [block.strip() for block in re.findall(r"^```[a-z]*\n(.*?)^```$", section, re.M | re.S)]


def test_quick_start_has_two_commands():
    demo, tests = quick_start_commands()
    assert demo.endswith("autoac demo")
    assert "pytest" in tests
    for command in (demo, tests):
        assert "\n" not in command
        assert "-c constraints/torch.txt" in command


def test_ci_calls_the_second_command_and_builds_the_docs():
    ci = ROOT / ".ci" / "run"
    assert os.access(ci, os.X_OK)
    assert ci.read_text().splitlines()[-1] == quick_start_commands()[1]
    assert re.search(r"mkdocs build .*--strict", ci.read_text())


def test_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 160
    assert text.count("```sh\n") == 2


def test_version_has_an_entry_in_the_changelog():
    assert f"## {autoac.__version__}" in (ROOT / "CHANGELOG.md").read_text()


# -- examples -------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer with a choice of experts, as the example of policies is about."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 4)
        self.up, self.down = nn.Linear(32, 128, bias=False), nn.Linear(128, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share, _ = self.router(x).softmax(-1).topk(2)
        return x + self.down(F.gelu(self.up(x))) * share.sum(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def theirs(path: Path, folder: Path) -> dict[str, Any]:
    """What a page's examples take as the reader's own: a model, its sample and optimizer, and one of transformers."""
    if path.parent.name == "loops":
        return of_loops(path, folder)
    model = Model()
    return {
        "build_model": Model,
        "model": model,
        "sample": torch.randn(64, 32),
        "optimizer": torch.optim.AdamW(model.parameters()),
        **_of_transformers(folder / "model"),
    }


def _of_transformers(folder: Path) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    ids = torch.randint(64, (2, 16))
    batch = {"input_ids": ids, "labels": ids}
    return {
        "name": str(folder),
        "device": "cpu",
        "batches": [batch] * 2,
        "dataset": [{"input_ids": ids[0], "labels": ids[0]}] * 8,
    }


def of_loops(path: Path, folder: Path) -> dict[str, Any]:
    """For the pages of loops: a model of transformers, in a folder with its tokenizer too, and texts in all forms."""
    torch.manual_seed(0)
    if path.stem == "diffusers":
        return _of_diffusers()
    model = llama().train()
    model.save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    tokens = [torch.randint(4, WORDS, (64,)) for _ in range(16)]
    dataset = [{"input_ids": row, "labels": row} for row in tokens]
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)  # type: ignore[arg-type]
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "batches": list(loader)[:5],
        "loader": loader,
        "dataset": dataset,
        "name": str(folder / "model"),
        "texts": sentences(16),
    }


def _of_diffusers() -> dict[str, Any]:
    """A UNet and images."""
    model = unet().model.train()
    loader = torch.utils.data.DataLoader(torch.rand(16, 3, 16, 16) * 2 - 1, batch_size=4)  # type: ignore[arg-type]
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "batches": list(loader),
        "loader": loader,
    }


def others_warnings(test: Any) -> Any:
    """Lets trainers warn of machines without accelerators, and the like; what autoac warns of is an error."""
    for other in ("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning", *_OURS):
        test = pytest.mark.filterwarnings(other)(test)
    return test


_OURS = ("error:the model is called:UserWarning", "error:.*autoac:UserWarning", "error:.*[Pp]lan:UserWarning")


@pytest.mark.parametrize("path", [path for path in TEXTS if snippets(path)], ids=name_of)
@pytest.mark.usefixtures("fresh_accelerator")
@others_warnings
def test_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One after the other, as a reader runs them; only the model, its sample and its optimizer are theirs."""
    given = theirs(path, tmp_path)
    monkeypatch.setattr(table, "MOST_COMPILED", 2)  # each takes the compiler a while
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    monkeypatch.chdir(tmp_path)
    for snippet in snippets(path):
        exec(compile(snippet, name_of(path), "exec"), given)


def test_there_are_examples_to_run():
    assert len(snippets(ROOT / "README.md")) >= 2
    assert len([path for path in PAGES if snippets(path)]) >= 7


def test_the_readmes_example_trains_the_same_with_and_without_its_plan(tmp_path: Path):
    """At the least budget; parameters after the example are equal to the bit."""
    example = snippets(ROOT / "README.md")[1]
    given = theirs(ROOT / "README.md", tmp_path)

    def parameters(code: str) -> list[torch.Tensor]:
        names = dict(given)
        exec(compile(code, "README.md", "exec"), names)
        assert ("plan" in names) == ("autoac.plan" in code)
        if "plan" in names:
            assert any(region.wrapped for region in names["plan"].regions)
        return list(names["model"].parameters())

    with pytest.raises(autoac.InfeasibleBudgetError) as infeasible:
        parameters(example.replace('"20GB"', "1000"))
    planned = parameters(example.replace('"20GB"', str(infeasible.value.minimum_bytes)))
    plain = parameters(
        "\n".join(line for line in example.splitlines() if not line.startswith(("plan", "print")))
    )
    assert all(torch.equal(one, other) for one, other in zip(planned, plain, strict=True))


def test_what_explain_prints_is_what_the_page_shows():
    plan = autoac.solve(autoac.Profile.load(ROOT / "profiles" / "gpt-8-blocks-cpu.json"), "150MB")
    printed = plan.explain().splitlines()
    blocks = re.findall(
        r"^```text\n(.*?)^```$", (DOCS / "guides" / "reading-a-plan.md").read_text(), re.M | re.S
    )
    assert len(blocks) == 4
    for line in "".join(blocks).splitlines():
        solver_seconds = line.strip().startswith("proved")
        assert line in printed or (solver_seconds and shape(line) in map(shape, printed)), line


# -- the session on the command line --------------------------------------------------------------------------


def session() -> list[tuple[str, list[str]]]:
    """The commands of the command line's page, each with the lines that are shown of what it prints."""
    found: list[tuple[str, list[str]]] = []
    text = (DOCS / "guides" / "command-line.md").read_text()
    for block in re.findall(r"^```console\n(.*?)^```$", text, re.M | re.S):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            elif line.strip() and line != "...":
                found[-1][1].append(line)
    return found


def shape(line: str) -> str:
    """A line without what depends on the machine: its numbers and their units, and the width of its columns.

    And, of torch's planner, what follows its peak and time: it decides by times it measures, and whether its gradients
    are equal, and so whether ours stand beside it, differs from run to run.
    """
    if line.lstrip().startswith("torch sac_milp"):
        line = re.sub(r"(equal|DIFFER).*", "", line)
    line = re.sub(r"[+-]?[0-9][0-9.]*", "N", line)
    line = re.sub(r"N ([mu]?s|[KMG]?B|[KMG]iB|bytes?)\b", "N", line)
    return re.sub(r"\s+|─+", " ", line).strip()


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_the_session_on_the_command_line_is_what_the_commands_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In this process, which measures its engines' costs once; but `compare` restarts the process it runs in."""
    pytest.importorskip("pwlf")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # commands add the folder that a model is in
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    commands = session()
    assert {command.split()[1] for command, _ in commands} == {
        "profile",
        "tradeoff",
        "plan",
        "run",
        "compare",
    }
    for command, shown in commands:
        program, *arguments = shlex.split(command)
        assert program == "autoac"
        if arguments[0] == "compare":
            arguments += ["--rounds", "1"]  # how well its times are known is not what this holds
            done = process(*arguments, cwd=tmp_path)
            code, out, err = done.returncode, done.stdout, done.stderr
        else:
            result = invoke(*arguments)
            code, out, err = result.exit_code, result.stdout, result.stderr
        infeasible = shown[0].startswith("error: No plan fits")
        assert code == (3 if infeasible else 0), err
        printed = {shape(line) for line in (err if infeasible else out).splitlines()}
        for line in shown:
            assert shape(line) in printed, f"{command} does not print {line!r} but\n{out}{err}"


def test_every_command_is_on_its_page():
    from autoac.cli import app

    text = (DOCS / "guides" / "command-line.md").read_text()
    names = {
        command.name or command.callback.__name__ for command in app.registered_commands if command.callback
    }
    assert names
    for name in names:
        assert f"`autoac {name}" in text


# -- tables ---------------------------------------------------------------------------------------------------


def test_compatibility_table_is_what_the_tests_say():
    """In another process: collecting tests from within a test would disturb it."""
    printed = subprocess.run(
        [sys.executable, "-m", "tests.features.compatibility"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed.count("\n") > 30
    assert in_docs() == printed, "run `python -m tests.features.compatibility --write`"


@pytest.mark.parametrize("package", ORDER)
def test_architecture_has_the_packages_in_import_order(package: str):
    text = (DOCS / "architecture.md").read_text()
    table = text.partition(f"<!-- packages of {package} -->")[2].partition("<!-- end -->")[0]
    shown = re.findall(r"^\| `(\w+)` \|", table, re.M)
    assert shown == [name for name in ORDER[package].split() if not name.startswith("_")]


def test_every_public_name_is_in_the_reference():
    text = (DOCS / "api.md").read_text()
    for name in autoac.__all__:
        assert f"::: autoac.{name}\n" in text or name == "__version__", name


# -- what is named is there -----------------------------------------------------------------------------------


def links(path: Path) -> Iterator[str]:
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    yield from re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(path: Path) -> set[str]:
    """As Markdown makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_links_lead_somewhere(path: Path):
    for link in links(path):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        found = (path.parent / target).resolve() if target else path
        assert found.exists(), link
        assert not anchor or anchor in anchors(found), link
        assert DOCS not in path.parents or DOCS in found.parents, f"{link} leads out of the site"


FILE = re.compile(
    r"(?:autoac|solver|tests|benchmarks|profiles|notebooks|examples|docs|constraints|\.ci)/[\w./-]*"
    r"|[A-Z]+\.md|pyproject\.toml|mkdocs\.yml"
)
MODULE = re.compile(r"(?:autoac|autoac_solver|tests|benchmarks)(?:\.\w+)+")


def is_named_thing(dotted: str) -> bool:
    """Whether a dotted name is a module, or something that can be got from one."""
    parts = dotted.split(".")
    if parts[0] in ("tests", "benchmarks"):
        path = ROOT / Path(*parts)
        return path.with_suffix(".py").exists() or (path / "__init__.py").exists()
    if dotted in MODULES or f"{dotted}.__init__" in MODULES:
        return True
    if parts[0] == "autoac" and parts[1] in autoac.__all__:
        found: Any = autoac
        for part in parts[1:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_files_and_modules_that_are_named_exist(path: Path):
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    for code in re.findall(r"`([^`\n]+)`", text):
        for word in re.split(r"[\s(),=]+", code):
            if FILE.fullmatch(word):
                assert (ROOT / word).exists(), word
            elif MODULE.fullmatch(word):
                assert is_named_thing(word), word


def test_things_that_are_not_there_are_noticed():
    assert is_named_thing("autoac.policies.SAVE_TOP_K")
    assert is_named_thing("autoac.record.recorder")
    assert is_named_thing("tests.features.compatibility")
    for missing in ("autoac.policies.NO_SUCH", "autoac.no_such", "autoac_solver.nothing", "tests.no_such"):
        assert not is_named_thing(missing)
        assert MODULE.fullmatch(missing)
    assert FILE.fullmatch("autoac/step/untouched.py")
    assert FILE.fullmatch("solver/autoac_solver/build")


# -- pictures and the site ------------------------------------------------------------------------------------


def test_pictures_are_made_by_their_script(tmp_path: Path):
    """The same files, and those that show no solved plan with the same bytes."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "solver")])}
    script = DOCS / "pictures" / "make.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, env=environment)
    made = {file.name for file in tmp_path.iterdir()}
    assert made == {file.name for file in script.parent.glob("*.svg")}
    copied = (script.parent / "measured.svg").read_bytes()
    assert copied == (ROOT / "benchmarks" / "results" / "gpt.svg").read_bytes()
    shown = "".join(page.read_text() for page in PAGES)
    assert all(f"pictures/{name})" in shown for name in made)


@pytest.mark.slow
def test_site_is_built_without_a_warning_and_asks_for_nothing(tmp_path: Path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", f"--site-dir={tmp_path}"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        loaded = re.findall(
            r"<(?:script|link|img)\b[^>]*?(?:src|href)=\"?(https?:[^\"\s>]+)", page.read_text()
        )
        assert not loaded, page
