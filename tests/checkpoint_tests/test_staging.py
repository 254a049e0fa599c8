"""The old directory or the new one, whole, whatever interrupts."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from safetensors import SafetensorError

from mmqc.checkpoint import staging
from mmqc.checkpoint.staging import replacing, weight_files

STALE = weight_files()
FILES = ("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SAVE = """
import itertools, sys
from mmqc.checkpoint.staging import replacing, weight_files
print(flush=True)
for n in itertools.count(1):
    with replacing(sys.argv[1], weight_files()) as stage:
        for name in sys.argv[2:]:
            (stage / name).write_text(str(n) * 100000)
"""
STUCK = """
import sys, time
from mmqc.checkpoint.staging import replacing, weight_files
with replacing(sys.argv[1], weight_files()) as stage:
    (stage / "config.json").write_text("half")
    print(flush=True)
    time.sleep(100)
"""


def write(directory, text):
    with replacing(directory, STALE) as stage:
        for name in FILES:
            (stage / name).write_text(text)


def fail(directory):
    with replacing(directory, STALE) as stage:
        (stage / "config.json").write_text("new")
        raise OSError(28, "disk full")


def contents(directory):
    return {(directory / name).read_text() for name in FILES}


def test_kill__leaves_one_whole_directory(tmp_path):
    target = tmp_path / "out"
    write(target, "0")
    for _ in range(8):
        child = subprocess.Popen([sys.executable, "-c", SAVE, str(target), *FILES], stdout=subprocess.PIPE)
        child.stdout.readline()
        time.sleep(random.uniform(0, 0.05))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        assert len(contents(target)) == 1


def test_next_save__removes_what_a_killed_one_left_and_nothing_of_a_live_one(tmp_path):
    target = tmp_path / "out"
    write(target, "0")
    child = subprocess.Popen([sys.executable, "-c", STUCK, str(target)], stdout=subprocess.PIPE)
    child.stdout.readline()
    (tmp_path / ".out.mine").mkdir()
    write(target, "1")
    assert len(list(tmp_path.glob(".out.saving-*"))) == 1
    child.kill()
    child.wait()
    child.stdout.close()
    write(target, "2")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out.mine", "out"]
    assert contents(target) == {"2"}


def test_error_while_writing__leaves_the_old_one(tmp_path):
    write(tmp_path / "out", "old")
    with pytest.raises(OSError, match="full"):
        fail(tmp_path / "out")
    assert contents(tmp_path / "out") == {"old"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_full_disk__is_an_error_of_the_system(tmp_path):
    """As safetensors has it, which is written in another language."""
    write(tmp_path / "out", "old")
    words = "Error while serializing: I/O error: No space left on device (os error 28)"
    with pytest.raises(OSError, match="device, and nothing was saved") as caught, replacing(tmp_path / "out", STALE):
        raise SafetensorError(words)
    assert (caught.value.errno, caught.value.filename) == (28, str(tmp_path / "out"))
    with pytest.raises(SafetensorError, match="another"), replacing(tmp_path / "out", STALE):
        raise SafetensorError("another")
    assert contents(tmp_path / "out") == {"old"}


@pytest.mark.parametrize("exchange", [True, False])
def test_symlink__is_followed_and_others_files_stay(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(staging, "_rename_exchange", lambda one, other: False)
    write(tmp_path / "real", "old")
    (tmp_path / "real" / "notes").mkdir()
    (tmp_path / "real" / "notes" / "a.txt").write_text("mine")
    (tmp_path / "real" / "model.safetensors.index.json").write_text("stale")
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert contents(tmp_path / "real") == {"new"}
    assert (tmp_path / "real" / "notes" / "a.txt").read_text() == "mine"
    assert not (tmp_path / "real" / "model.safetensors.index.json").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]


def test_mount_point__is_refused_unless_empty(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path).endswith("disk"))
    write(tmp_path / "disk", "one")
    assert contents(tmp_path / "disk") == {"one"}
    with pytest.raises(OSError, match="mount point"):
        write(tmp_path / "disk", "two")
    assert contents(tmp_path / "disk") == {"one"}
