"""A file is the old one or the new one, whole."""

import os
from pathlib import Path

import pytest

from mmqc.report.whole_file import whole_file, write_text


def test_write__makes_folders_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    write_text(path, "one")
    path.chmod(0o640)
    write_text(path, "two")
    assert path.read_text() == "two"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [p.name for p in path.parent.iterdir()] == ["b.json"]


def test_write__an_error_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    write_text(path, "one")

    def fail(rough: Path) -> None:
        rough.write_text("half")
        raise OSError(28, "disk full")

    with pytest.raises(OSError, match="full"), whole_file(path) as rough:
        fail(rough)
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "c.json"):
        pass  # nothing was written
    assert path.read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["b.json"]


def test_write__follows_a_link_and_writes_into_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    write_text(tmp_path / "real" / "b.json", "one")
    (tmp_path / "link.json").symlink_to(Path("real") / "b.json")
    write_text(tmp_path / "link.json", "two")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real" / "b.json").read_text() == "two"
    reading, writing = os.pipe()
    write_text(Path(f"/dev/fd/{writing}"), "three")
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "three"
