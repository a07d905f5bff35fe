"""What is said when something is wrong: one readable line, a hint, and the right exit code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autoac.cli.output import _console, table
from tests.cli.conftest import FACTORIES, done, invoke


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("model", "'model' names no factory. Write package.module:factory or file.py:factory."),
        (":small", "':small' names no factory"),
        (f"{FACTORIES}:", "names no factory"),
        ("tests/cli/nothing.py:small", "there is no file 'tests/cli/nothing.py'."),
        ("nothing.json", "there is no file 'nothing.json'."),
        ("no_such_package.module:small", "there is no module 'no_such_package.module'"),
        (f"{FACTORIES}:smal", "has no 'smal' (it has small, with_loss, "),
        (f"{FACTORIES}:not_a_function", "is a int, not a function"),
    ],
)
def test_what_names_no_model_is_usage(spec: str, text: str) -> None:
    result = invoke("plan", spec, "--budget", "1GB")
    assert (result.exit_code, result.stdout) == (2, "")
    error, hint = result.stderr.splitlines()
    assert error.startswith("error: Invalid value for 'MODEL': ")
    assert text in error
    assert hint == "hint: `autoac plan --help` says what is possible."


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["plam"], "No such command 'plam'."),
        (["--nonsense"], "No such option: --nonsense"),
        (["plan", "p.json"], "'--budget' or '--max-overhead': give one of the two."),
        (["plan", "p.json", "--budget", "1GB", "--engine", "magic"], "'auto', 'replay', 'sac'"),
        (["tradeoff", "p.json", "--points", "1"], "greater than or equal to 2"),
        (["run", "m.py:f", "--plan", __file__, "--engine", "sac"], "a plan has its engine"),
        (["compare", "m.py:f", "--engine", "magic"], "'replay', 'sac'"),
        (["compare", "m.py:f", "--plot", "curve.doc"], "curve.doc is none of .png, .svg, .pdf"),
    ],
)
def test_wrong_options_are_usage(arguments: list[str], text: str) -> None:
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    error, hint = result.stderr.splitlines()
    assert error.startswith("error: ")
    assert text in error
    assert "--help` says what is possible." in hint


def test_help_without_arguments() -> None:
    result = invoke()
    assert "tradeoff" in result.output


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        ("raises", f"error: {FACTORIES}:raises failed: ValueError in raises ({FACTORIES}, line "),
        ("takes_arguments", "hint: --arg NAME=VALUE passes an argument to the factory."),
        ("returns_a_model", f"error: {FACTORIES}:returns_a_model returned a Blocks."),
        ("returns_four", "returned a tuple of 4."),
        ("returns_no_model", "returned is a str, not a torch.nn.Module."),
        ("misspells", "returned a mapping with the unknown key 'sampel'."),
        ("without_sample", "returned a mapping without the key 'sample'."),
        ("fails_in_forward", f"error: RuntimeError in forward ({FACTORIES}, line "),
    ],
)
def test_what_the_users_code_does_wrong_is_one_line_and_a_hint(factory: str, text: str) -> None:
    result = invoke("plan", f"{FACTORIES}:{factory}", "--budget", "1GB")
    assert (result.exit_code, result.stdout) == (1, "")
    assert text in result.stderr
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["error", "hint"]


def test_verbose_shows_the_trace() -> None:
    plain = invoke("plan", f"{FACTORIES}:fails_in_forward", "--budget", "1GB")
    assert "--verbose shows the traceback." in plain.stderr
    assert "Traceback" not in plain.stderr
    verbose = invoke("plan", f"{FACTORIES}:fails_in_forward", "--budget", "1GB", "-v")
    assert verbose.exit_code == 1
    assert "Traceback (most recent call last)" in verbose.stderr
    assert "and the second" in verbose.stderr
    assert "--verbose shows" not in verbose.stderr


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("import no_such_library\n", "cannot be imported: ModuleNotFoundError in <module> ("),
        ("def f(:\n", "cannot be imported: SyntaxError: "),
        ("1 / 0\n", "line 1): division by zero"),
        ("import sys\nsys.exit(7)\n", "line 2): 7"),
        ("import sys\ndef f(): sys.exit(7)\n", "users_file.py:f failed: SystemExit in f ("),
    ],
)
def test_a_file_that_cannot_be_imported(content: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "users_file.py"
    file.write_text(content)
    result = invoke("profile", f"{file}:f", "-o", tmp_path / "p.json")
    assert result.exit_code == 1
    assert text in result.stderr
    if "no_such_library" in content:
        assert "Is 'no_such_library' installed in this environment" in result.stderr


def test_a_file_finds_its_neighbours_and_keeps_its_hands_off_installed_modules(tmp_path: Path) -> None:
    (tmp_path / "a_neighbour.py").write_text("def factory(): return 1, 2\n")
    file = tmp_path / "json.py"
    file.write_text("from a_neighbour import factory\n")
    result = invoke("profile", f"{file}:factory", "-o", tmp_path / "p.json")
    assert "is a int, not a torch.nn.Module" in result.stderr
    assert sys.modules["json"].__file__ != str(file)


def test_a_module_by_name(tmp_path: Path) -> None:
    result = invoke("plan", "tests.cli.factories:small", "--budget", "1GB")
    assert result.exit_code == 0


@pytest.mark.parametrize("budget", ["20", "20G", "-5", "much", "0"])
def test_budgets_that_are_none(budget: str, recorded: Path) -> None:
    result = invoke("plan", recorded, f"--budget={budget}")
    assert result.exit_code == (3 if budget == "20" else 2), result.stderr
    if budget != "20":
        assert f"{budget}" in result.stderr
        assert '"20GB"' in result.stderr


def test_files_that_are_none_of_ours(tmp_path: Path, recorded: Path) -> None:
    for name, content, text in (
        ("damaged.json", recorded.read_text()[:-20], "is not readable JSON"),
        ("other.json", '{"schema": "else"}', "holds 'else'"),
        ("list.json", "[]", "is none of autoac's files"),
    ):
        path = tmp_path / name
        path.write_text(content)
        result = invoke("plan", path, "--budget", "1GB")
        assert result.exit_code == 1
        assert text in result.stderr
        assert "hint: `autoac profile` and `autoac plan` write the files" in result.stderr
    assert invoke("report", recorded, "-o", tmp_path / "r.html").exit_code == 1  # a profile is no plan
    assert invoke("run", f"{FACTORIES}:small", "--plan", tmp_path / "nothing.json").exit_code == 2


def test_what_json_prints_is_no_file_of_ours(tmp_path: Path, recorded: Path) -> None:
    path = tmp_path / "results.json"
    for command, arguments in (("tradeoff", ["--points", 2]), ("plan", ["--budget", "1GB"])):
        path.write_text(invoke(command, recorded, *arguments, "--json").stdout)
        result = invoke("report", path, "-o", tmp_path / "page.html")
        assert result.exit_code == 1
        assert f"is what `autoac {command} --json` printed" in result.stderr
        written = {"tradeoff": "curve.json", "plan": "plan.json"}[command]
        assert f"`autoac {command} ... -o {written}` writes" in result.stderr
    assert not (tmp_path / "page.html").exists()


def test_missing_libraries_say_how_to_get_them(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("tradeoff", recorded, "--points", 2, "-o", tmp_path / "c.png")
    assert result.exit_code == 1
    assert "error: matplotlib is not installed here." in result.stderr
    assert "pip install 'autoac[plot]'" in result.stderr
    assert not list(tmp_path.iterdir())


def test_names_are_no_markup(capsys: pytest.CaptureFixture[str]):
    """A model's name comes from its code or from a file."""
    shown = table("Trade-off of [link=http://a.b]x[/link] [/x] :smile:", "[bold]name", "n")
    shown.add_row("[red]row[/red]", "1")
    _console().print(shown, markup=False, emoji=False)
    said = "".join(capsys.readouterr().out.split())  # titles are broken to the table's width
    for text in ("[link=http://a.b]x[/link][/x]:smile:", "[bold]name", "[red]row[/red]"):
        assert text in said


HOSTILE = "[/x][link=http://a]b$x^$"
"""A name that is a tag without a beginning, a hyperlink and a formula that does not end, to those who read it so."""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose name is half a tag, with a factory whose classes, module and file have such names."""
    folder = tmp_path_factory.mktemp("hostile") / "["
    folder.mkdir()
    (folder / "x] [link=a]b.py").write_text(
        f"""
import torch
from torch import nn

NAME = {HOSTILE!r}

def forward(self, x):
    return x + torch.tanh(self.get_submodule(NAME)(x))

Block = type(NAME, (nn.Module,), {{"forward": forward}})

def factory(fails=False):
    if fails:
        raise ValueError(NAME)
    model = type(NAME, (nn.Sequential,), {{}})()
    for index in range(2):
        block = Block()
        block.add_module(NAME, nn.Linear(16, 16))
        model.add_module(NAME + str(index), block)
    return model, torch.ones(64, 16)
"""
    )
    model = f"{folder / 'x] [link=a]b.py'}:factory"
    done("profile", model, "-o", folder / "x].json")
    done("plan", folder / "x].json", "--budget", "1GB", "-o", folder / "p].json")
    return folder


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ("profile {0}/x] [link=a]b.py:factory -o {0}/again].json -v", 0, "written     {0}/again].json"),
        ("plan {0}/x].json --budget 1GB --details -o {0}/q].json", 0, "Plan for {name} on cpu"),
        ("plan {0}/x].json --budget 1", 3, "module '{name}0' alone holds"),
        ("tradeoff {0}/x].json --points 2 -o {0}/c].png -v", 0, "{name}, engine"),
        ("report {0}/p].json -o {0}/r].html --points 0", 0, "Written: {0}/r].html"),
        ("run {0}/x] [link=a]b.py:factory --plan {0}/p].json --steps 3 -v", 0, "{name}, engine"),
        ("run {0}/x] [link=a]b.py:factory --plan {0}/p].json --arg fails=1", 1, "b.py, line 14): {name}"),
        ("compare {0}/x] [link=a]b.py:factory --arg fails=1", 1, "{0}/x] [link=a]b.py:factory failed"),
        ("calibrate -o {0}/x]/table.json", 2, "{0}/x]"),
        ("selfcheck --report {0}/x]/report.json", 2, "{0}/x]"),
        ("plan {0}/none].json --budget 1GB", 2, "there is no file '{0}/none].json'"),
        ("report {0}/none].json -o {0}/r].html", 2, "'{0}/none].json' does not exist"),
        ("[/x]", 2, "No such command '[/x]'"),
    ],
)
def test_hostile_names_are_shown_as_they_are(
    arguments: str, code: int, expected: str, hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoac.compare.quiet.restart_if_needed", lambda: None)  # of this process
    result = invoke(*(part.format(hostile) for part in _parts(arguments)))
    assert result.exit_code == code, result.output
    assert expected.format(hostile, name=HOSTILE) in result.output


def _parts(arguments: str) -> list[str]:
    """Words of a command line; the space in the file's name is none between words."""
    return [part.replace("\0", " ") for part in arguments.replace("] [", "]\0[").split(" ")]
