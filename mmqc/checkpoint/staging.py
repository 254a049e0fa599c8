"""Writes a directory beside the one it replaces, and exchanges the two in one step (ADR 22).

A save that is killed, or finds the disk full, leaves the old directory as it was.  Files that the save does not write,
such as a README, are linked into the new one.  What a killed save leaves beside it (``.NAME.saving-...``) goes with the next
save: a directory that is being written is locked, and the lock ends with its process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of renameat2(2)


def weight_files(variant: str | None = None) -> re.Pattern[str]:
    """The names that transformers gives to the weights of one variant: those that a new save makes stale."""
    part = re.escape(f".{variant}") if variant else ""
    kinds = (("model", "safetensors"), ("pytorch_model", "bin"))
    names = [rf"{stem}{part}(-\d{{5}}-of-\d{{5}})?\.{end}|{stem}\.{end}\.index{part}\.json" for stem, end in kinds]
    return re.compile("|".join(names))


@contextlib.contextmanager
def replacing(directory: str | os.PathLike[str], stale: re.Pattern[str]) -> Iterator[Path]:
    """Gives an empty directory to write into; it becomes ``directory`` when the block ends without an exception.

    Args:
        directory: may be missing, may be a symlink to a directory, may hold other files, which stay.
        stale: files of the old directory that go unless they were written again.

    Raises:
        OSError: the disk is full, or ``directory`` cannot be exchanged for another (it is a mount point, or its parent
            cannot be written) and is not empty.
    """
    target = Path(os.path.realpath(directory))
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a file is in the way of the directory to save to", str(target))
    if os.path.ismount(target):
        _refuse_full(target, "it is a mount point")
    target.parent.mkdir(parents=True, exist_ok=True)
    inside = os.path.ismount(target)
    try:
        stage = _beside(target, target if inside else target.parent)
    except PermissionError:
        if not target.is_dir():
            raise
        _refuse_full(target, f"{target.parent} cannot be written")
        stage, inside = _beside(target, target), True
    try:
        with _locked(stage), _locked(target):
            yield stage
            _sync(stage)
            if inside:
                _move(stage, target)
            else:
                _exchange(stage, target, stale)
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))  # what the system said, in the words of another language
        if code is None:
            raise
        number = int(code[1])
        raise OSError(number, f"{os.strerror(number)}, and nothing was saved; what was there is as it was", str(target)) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Whether the directory is there and could be locked, until the block or the process ends."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody has it, or this filesystem has no locks
        locked = False
    else:
        locked = True
    try:
        yield locked
    finally:
        os.close(descriptor)


def _remove_left(target: Path, parent: Path) -> None:
    """Remove what killed saves of ``target`` have left."""
    for path in parent.glob(f".{glob.escape(target.name)}.saving-*"):
        with _locked(path) as dead:
            if dead:
                shutil.rmtree(path, ignore_errors=True)


def _beside(target: Path, parent: Path) -> Path:
    _remove_left(target, parent)
    stage = Path(tempfile.mkdtemp(prefix=f".{target.name}.saving-", dir=parent))
    if target.is_dir():
        shutil.copymode(target, stage)
    else:
        mask = os.umask(0)
        os.umask(mask)
        stage.chmod(0o777 & ~mask)
    return stage


def _refuse_full(target: Path, why: str) -> None:
    if any(target.iterdir()):
        raise OSError(
            errno.EBUSY,
            f"{why}, so what is in it cannot be replaced in one step; save to a new directory instead",
            str(target),
        )


def _sync(directory: Path) -> None:
    for path in (*directory.rglob("*"), directory):
        if not path.is_symlink():
            _sync_entry(path)


def _move(stage: Path, target: Path) -> None:
    """Into an empty directory; config.json last, without which nothing can be loaded."""
    for path in sorted(stage.iterdir(), key=lambda path: path.name == "config.json"):
        path.rename(target / path.name)
    _sync_entry(target)


def _exchange(stage: Path, target: Path, stale: re.Pattern[str]) -> None:
    if not target.exists() and _into_place(stage, target):
        return
    _keep(target, stage, stale)
    _sync_entry(stage)
    if not _rename_exchange(stage, target):
        old = stage.with_name(stage.name + ".old")
        target.rename(old)  # both are whole beside each other if the process ends here
        stage.rename(target)
        old.rename(stage)
    _sync_entry(target.parent)
    _keep(stage, target, stale)  # what somebody else wrote meanwhile


def _into_place(stage: Path, target: Path) -> bool:
    """Whether the name was still free; another process may have been first."""
    try:
        stage.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    _sync_entry(target.parent)
    return True


def _keep(old: Path, new: Path, stale: re.Pattern[str]) -> None:
    for entry in os.scandir(old):
        place = new / entry.name
        if os.path.lexists(place) or stale.fullmatch(entry.name):
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.copytree(entry.path, place, symlinks=True, copy_function=_link)
        else:
            _link(entry.path, place)


def _link(source: str, place: str | os.PathLike[str]) -> None:
    try:
        os.link(source, place, follow_symlinks=False)
    except (OSError, NotImplementedError):  # a filesystem without hard links
        shutil.copy2(source, place, follow_symlinks=False)


def _rename_exchange(one: Path, other: Path) -> bool:
    """Whether the system exchanged the two names; False where it has no such call."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):  # this filesystem, or this kernel
        return False
    raise OSError(code, os.strerror(code), str(other))


def _sync_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
