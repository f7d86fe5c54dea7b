"""A crash or a full disk leaves the old file or the new one, and nothing else."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from gati.errors import StorageError
from gati.files import atomic_write, atomic_write_text, lasting_source


def test_a_write_replaces_the_file_and_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "new" / "manifest.json"
    atomic_write_text(target, "old")
    flushed: list[str] = []
    original = os.fsync

    def fsync(descriptor: int) -> None:
        flushed.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    atomic_write_text(target, "new")
    assert target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]
    assert flushed == ["file", "folder"]  # without the second, a power cut brings the old file back


def test_a_writer_that_dies_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "table.csv"
    atomic_write_text(target, "old")

    def dies(temporary: Path) -> None:
        temporary.write_text("half")
        raise RuntimeError("died")

    with pytest.raises(RuntimeError, match="died"):
        atomic_write(target, dies)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=["disk", "quota"])
def test_a_full_disk_is_one_line_and_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    target = tmp_path / "table.csv"
    atomic_write_text(target, "old")

    def full(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"disk full while writing .*table\.csv: free some space"):
        atomic_write_text(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, "disk full while writing "),
        (errno.EACCES, "cannot write .*: Permission denied; choose"),
    ],
    ids=["full", "forbidden"],
)
def test_what_safetensors_raises_is_one_line_too(tmp_path: Path, code: int, message: str) -> None:
    def fails(temporary: Path) -> None:
        raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(code)} (os error {code})")

    with pytest.raises(StorageError, match=message):
        atomic_write(tmp_path / "cache.safetensors", fails)
    assert list(tmp_path.iterdir()) == []


def test_the_system_error_is_where_safetensors_writes_it(tmp_path: Path) -> None:
    def nowhere(temporary: Path) -> None:
        save_file({"weight": torch.zeros(1)}, temporary.parent / "missing" / temporary.name)

    with pytest.raises(StorageError, match="cannot write .*: No such file or directory"):
        atomic_write(tmp_path / "cache.safetensors", nowhere)


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_a_new_file_is_for_whom_the_user_wants_it_to_be_and_a_written_one_stays_so(
    tmp_path: Path, umask: int, mode: int
) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("{}")
    old.chmod(0o640)
    while_written: list[int] = []

    def by_bytes(temporary: Path) -> None:
        while_written.append(mode_of(temporary))
        temporary.write_bytes(b"[]")

    def by_safetensors(temporary: Path) -> None:
        """It replaces the file by one that is only for its owner."""
        save_file({"weight": torch.zeros(1)}, temporary)

    before = os.umask(umask)
    try:
        for write in (by_bytes, by_safetensors):
            for path in (new, old):
                atomic_write(path, write)
            assert [mode_of(new), mode_of(old)] == [mode, 0o640]
            new.unlink()
    finally:
        os.umask(before)
    assert while_written == [mode, 0o640 & ~umask | 0o600]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_private_file_stays_so_while_it_is_written_again(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("{}")
    old.chmod(0o600)
    seen: list[int] = []
    atomic_write(old, lambda temporary: seen.append(mode_of(temporary)))
    assert seen == [0o600] and mode_of(old) == 0o600


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "elsewhere" / "results.json", tmp_path / "results.json"
    target.parent.mkdir()
    link.symlink_to(target)
    atomic_write_text(link, "{}")
    assert link.is_symlink() and target.read_text() == "{}"


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        atomic_write_text(pipe, "{}")
        assert os.read(reader, 10) == b"{}"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode) and list(tmp_path.iterdir()) == [pipe]


_PRINTS_AROUND = """
import sys
from pathlib import Path
from gati.files import atomic_write_text
print("before")
atomic_write_text(Path(sys.argv[1]), "{}\\n")
print("after")
"""


@pytest.mark.parametrize("place", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
@pytest.mark.parametrize("piped", [True, False])
def test_what_goes_to_standard_output_stands_between_what_is_printed(
    tmp_path: Path, place: str, piped: bool
) -> None:
    """As `gati ... --json /dev/stdout`, with `| jq` or `> file`."""
    command = [sys.executable, "-c", _PRINTS_AROUND, place]
    printed = tmp_path / "printed.txt"
    with printed.open("w") as file:
        file.write("of the shell\n")
        file.flush()
        done = subprocess.run(command, stdout=subprocess.PIPE if piped else file, check=True, text=True)
        file.write("of the shell again\n")
    if piped:
        assert done.stdout == "before\n{}\nafter\n"
    else:
        assert printed.read_text().startswith("of the shell\nbefore\n{}\nafter\n")
    assert list(tmp_path.iterdir()) == [printed]


def test_an_open_pipe_is_written_to_by_its_number(tmp_path: Path) -> None:
    """As the shell's `>(command)`; also through a link."""
    reading, writing = os.pipe()
    link = tmp_path / "results.json"
    link.symlink_to(f"/dev/fd/{writing}")
    try:
        atomic_write_text(Path(f"/dev/fd/{writing}"), "{}")
        atomic_write_text(link, "[]")
        assert os.read(reading, 10) == b"{}[]"
    finally:
        os.close(reading)
        os.close(writing)
    with pytest.raises(StorageError, match="cannot write .*: Bad file descriptor"):
        atomic_write_text(Path(f"/dev/fd/{writing}"), "{}")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("val.npz", "{}/val.npz"),
        (Path("val.npz"), "{}/val.npz"),
        ("bert", "{}/bert"),
        ("data.py:held", "{}/data.py:held"),
        ("../nets.py:build", "{}/../nets.py:build"),
        ("net.pt2", "{}/net.pt2"),  # it need not exist yet
        ("package.module:held", "package.module:held"),
        ("timm:resnet18", "timm:resnet18"),
        (7, "7"),
    ],
)
def test_a_source_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: object, expected: str
) -> None:
    """By one rule, whether it is relative to the working directory or to a file that names it."""
    own, elsewhere = tmp_path / "own", tmp_path / "elsewhere"
    (own / "bert").mkdir(parents=True)
    (own / "val.npz").write_bytes(b"")
    elsewhere.mkdir()
    absolute = expected.format(own).replace(f"{own}/..", str(tmp_path))
    monkeypatch.chdir(own)
    assert lasting_source(source) == absolute
    monkeypatch.chdir(elsewhere)
    assert lasting_source(source, own) == lasting_source(source, Path("../own")) == absolute


@pytest.mark.parametrize("name", ["model.safetensors", "net.pt2", "val.csv.gz", "nets.py"])
def test_a_link_keeps_its_name_if_that_tells_what_the_file_is(tmp_path: Path, name: str) -> None:
    """Libraries named the file that it leads to, without a suffix, and no later command could read that."""
    for target, expected in (("0a1b2c", name), (f"later-{name}", f"later-{name}")):
        (tmp_path / target).touch()
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to(target)
        suffix = ":build" if name.endswith(".py") else ""
        assert lasting_source(f"{tmp_path / name}{suffix}") == f"{tmp_path / expected}{suffix}"


@pytest.mark.parametrize("name", ["best.ckpt", "best"])
def test_a_link_to_a_file_of_the_same_kind_is_that_file(tmp_path: Path, name: str) -> None:
    """A number with a point is no kind: the link would name another file after the next training."""
    (tmp_path / "epoch=3-loss=0.25.ckpt").touch()
    (tmp_path / name).symlink_to("epoch=3-loss=0.25.ckpt")
    assert lasting_source(tmp_path / name) == str(tmp_path / "epoch=3-loss=0.25.ckpt")


def test_the_root_folder_is_no_file() -> None:
    with pytest.raises(StorageError, match="cannot write /: "):
        atomic_write_text(Path("/"), "{}")


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"cannot write .*: .*choose a folder you may write to"):
        atomic_write_text(tmp_path / "file" / "manifest.json", "{}")
