"""Files: written in one move, through links, with their mode; what cannot be read again is not written."""

import dataclasses
import errno
import os
import stat
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from autoac_solver.records.disk import files
from autoac_solver.records.disk.files import schema_of, write_text
from autoac_solver.records.disk.limits import Text
from autoac_solver.records.disk.schema import checked
from autoac_solver.records.errors import ProfileError
from autoac_solver.records.profile import Profile
from tests.solver.profiles import two_blocks


def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path: Path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_a_private_file_is_private_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, modes = tmp_path / "a", []
    path.touch(0o600)

    def fsync(handle: int) -> None:
        modes.append(stat.S_IMODE(os.fstat(handle).st_mode))

    monkeypatch.setattr(os, "fsync", fsync)
    write_text(path, "text")
    assert modes == [0o600]


def test_a_file_that_is_there_keeps_its_mode_and_a_link_stays_one(tmp_path: Path):
    folder, target, link = tmp_path / "elsewhere", tmp_path / "elsewhere" / "a", tmp_path / "link"
    folder.mkdir()
    target.write_text("before")
    target.chmod(0o600)
    link.symlink_to(target)
    write_text(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir()] == ["a"]


def test_a_link_to_what_is_not_there_yet(tmp_path: Path):
    (tmp_path / "link").symlink_to("new")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "new").read_text() == "text"
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere" / "new")
    with pytest.raises(FileNotFoundError, match=r"lost cannot be written: there is no folder .*nowhere"):
        write_text(tmp_path / "lost", "text")


def test_devices_and_pipes_are_not_replaced(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match=f"{name} cannot be written: it is a device, a pipe or a socket"):
            write_text(tmp_path / name, "text")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert (tmp_path / "link").is_symlink()


def test_a_link_to_itself_stays(tmp_path: Path):
    loop, other = tmp_path / "loop.json", tmp_path / "other.json"
    loop.symlink_to(loop)
    other.symlink_to(loop)
    for path in (loop, other):
        with pytest.raises(OSError, match=r"cannot be written: it is a link that leads to itself"):
            write_text(path, "text")
        assert path.is_symlink()
    assert sorted(tmp_path.iterdir()) == [loop, other]


def test_a_full_disk_is_told_with_the_files_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/plan\.json'") as caught:
        write_text(tmp_path / "plan.json", "text")
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_what_kind_of_file_it_is_takes_no_more_than_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.json"
    for content, expected in (
        ('{"a": [1], "schema": "autoac.plan"}', "autoac.plan"),
        ("[1]", None),
        ("{", None),
    ):
        path.write_text(content)
        assert schema_of(path) == expected
    monkeypatch.setattr(files, "MOST_FILE_BYTES", 2**22)
    with path.open("wb") as file:
        file.truncate(2**33)  # 8 GiB of nothing
    with pytest.raises(ProfileError, match="is larger than"):
        schema_of(path)


@pytest.mark.parametrize(
    "name", ["tab\there", "zero\u200bwidth", "a" * 10_001, "bell\x07", "\ud800", "line\n"]
)
def test_what_could_not_be_read_again_is_not_written(name: str, tmp_path: Path):
    profile = two_blocks()
    calls = tuple(
        dataclasses.replace(call, fqn=name) if call.fqn == "blocks.0" else call for call in profile.calls
    )
    message = r"could not be read again: .* at `\$\.calls\.fqn\[1\]` is .*rename what is"
    with pytest.raises(ProfileError, match=message) as caught:
        dataclasses.replace(profile, calls=calls).save(tmp_path / "a.json")
    assert str(caught.value).isprintable()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["layers.0", "a b", "schön", "名前", "[/x]", '"', "\U0001f600"])
def test_what_is_written_is_read_again(name: str, tmp_path: Path):
    profile = dataclasses.replace(two_blocks(), model=name)
    profile.save(tmp_path / "a.json")
    assert Profile.load(tmp_path / "a.json") == profile


def test_texts_are_what_python_calls_printable():
    """All that is assigned in this Python's Unicode; what is not may be in another's."""
    for point in range(sys.maxunicode + 1):
        character = chr(point)
        refused = not character.isprintable()
        if unicodedata.category(character) != "Cn" and _is_text(character) == refused:
            pytest.fail(f"U+{point:04X} is {'refused' if not refused else 'taken'}")


def _is_text(value: Any) -> bool:
    try:
        checked(value, Text)
    except ValueError:
        return False
    return True
