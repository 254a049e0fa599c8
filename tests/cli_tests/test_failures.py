"""Every kind of error, raised by every command: one line on stderr, its exit code, and the traceback with --debug only."""

import ast
import contextlib
import functools
import importlib
import os
import pickle
import re
import signal
import zipfile
from pathlib import Path

import forked
import jinja2
import pytest
import torch
import typer.main
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from PIL import Image, UnidentifiedImageError
from safetensors import SafetensorError
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InductorError

import mmqc
from mmqc.aot.index_find import ExportError
from mmqc.cli import app as cli
from mmqc.cli import failures
from mmqc.errors import MEMORY, REFUSED, UNEXPECTED, USAGE, MmqcError
from mmqc.graph.record import RecordError
from mmqc.graph.runner import PassError
from mmqc.samples.checkpoint import BYTES

PACKAGE = Path(mmqc.__file__).parent
GROUP = typer.main.get_command(cli.app)


def leaves(command, path=()):
    """Every command and subcommand, with the words that call it."""
    for name, child in getattr(command, "commands", {}).items():
        yield from leaves(child, (*path, name)) if hasattr(child, "commands") else [((*path, name), child)]


LEAVES = dict(leaves(GROUP))


# --- the errors -------------------------------------------------------------------------------------------------------


@functools.cache
def error_classes():
    """The classes of mmqc whose name, or whose base's name, ends in Error."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and any(re.search(r"Error$", n) for n in (node.name, *map(ast.unparse, node.bases))):
                module = ".".join(("mmqc", *path.relative_to(PACKAGE).with_suffix("").parts))
                found.append(getattr(importlib.import_module(module), node.name))
    return found


def plain(cls):
    """An instance, whatever arguments its constructor takes."""
    return type(cls.__name__, (cls,), {"__init__": lambda self, *words: None})("the words")


def raised_from(error, cause):
    error.__cause__ = cause
    return error


NO_MEMORY = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate it"
OTHERS = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nframe #0"), MEMORY),
    (MemoryError(), MEMORY),
    (RuntimeError(NO_MEMORY), MEMORY),
    (raised_from(RecordError("the words"), torch.OutOfMemoryError("CUDA out of memory")), MEMORY),
    (BackendCompilerFailed(print, torch.OutOfMemoryError("CUDA out of memory"), None), MEMORY),
    (BackendCompilerFailed(print, PassError("the words"), None), REFUSED),
    (ValueError("a value"), REFUSED),
    (OSError(2, "No such file or directory", "a/file"), REFUSED),
    (ImportError("a package is missing:\npip install it\nand more"), REFUSED),
    (ModuleNotFoundError("No module named 'sklearn'"), REFUSED),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), REFUSED),
    (SafetensorError("Error while deserializing header: incomplete metadata, file not fully covered"), REFUSED),
    (UnidentifiedImageError("cannot identify image file 'a.png'"), REFUSED),
    (Image.DecompressionBombError("Image size exceeds the limit"), REFUSED),
    (jinja2.TemplateSyntaxError("unexpected '}'", 3), REFUSED),
    (HFValidationError("Repo id must be a string"), REFUSED),
    (EntryNotFoundError("no such entry"), REFUSED),
    (zipfile.BadZipFile("File is not a zip file"), REFUSED),
    (pickle.UnpicklingError("invalid load key"), REFUSED),
    (Exception("Model missing. at line 1 column 2"), REFUSED),  # tokenizers
    (typer.BadParameter("not this one", param_hint="--w"), USAGE),
    (RuntimeError("shape '[-1, 3, 2, 14, 14]' is invalid for input of size 11904"), UNEXPECTED),
    (InductorError(RuntimeError("C++ compile error\n\nCommand:\ng++\n"), None), UNEXPECTED),
    (KeyError("language"), UNEXPECTED),
    (IndexError("list index out of range"), UNEXPECTED),
    (TypeError("unsupported operand"), UNEXPECTED),
    (AttributeError("no attribute"), UNEXPECTED),
    (AssertionError("Torch not compiled with CUDA enabled"), UNEXPECTED),
    (NotImplementedError(), UNEXPECTED),
    (ZeroDivisionError("division by zero"), UNEXPECTED),
    (EOFError("Ran out of input"), UNEXPECTED),
    (RecursionError("maximum recursion depth exceeded"), UNEXPECTED),
]


def test_errors__every_error_of_mmqc_has_the_one_root():
    classes = error_classes()
    assert {"PassError", "OutOfMemoryError", "ConfigError", "DataError", "MmqcError"} <= {cls.__name__ for cls in classes}
    assert [cls for cls in classes if not issubclass(cls, MmqcError)] == []
    assert {cls.__name__ for cls in classes if cls.exit_code != REFUSED} == {"OutOfMemoryError"}


# --- every command ----------------------------------------------------------------------------------------------------


def run(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        GROUP.main([*words], prog_name="mmqc")
    return stop.value.code, capsys.readouterr()


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_command__fails_in_one_line(path, monkeypatch, capsys):
    def fail():
        raise error

    monkeypatch.delenv("MMQC_DEBUG", raising=False)
    monkeypatch.setattr(LEAVES[path], "params", [])
    monkeypatch.setattr(LEAVES[path], "callback", fail)
    for error, code in (*((plain(cls), cls.exit_code) for cls in error_classes()), *OTHERS):
        got, told = run(capsys, *path)
        assert (got, told.out) == (code, ""), repr(error)
        assert re.fullmatch(r"error: \S.*\n", told.err), repr(error)
        got, debug = run(capsys, "--debug", *path)
        assert (got, debug.out) == (code, ""), repr(error)
        assert debug.err.endswith(told.err), repr(error)
        assert "Traceback (most recent call last)" in debug.err
        assert "in fail\n    raise error\n" in debug.err
        assert type(error).__name__ in debug.err.removesuffix(told.err)


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_command__is_interrupted_without_a_word(path, monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(LEAVES[path], "params", [])
    monkeypatch.setattr(LEAVES[path], "callback", interrupt)
    code, told = run(capsys, "--debug", *path)
    assert (code, told.out, told.err) == (130, "", "")


def test_command__is_interrupted_where_a_library_makes_another_error_of_it(monkeypatch, capsys):
    def interrupt():
        with contextlib.suppress(BaseException):  # as packages do that are imported by halves
            signal.raise_signal(signal.SIGINT)
        raise ImportError("cannot import name 'PreTrainedModel' from partially initialized module")

    path = next(iter(LEAVES))
    monkeypatch.setattr(LEAVES[path], "params", [])
    monkeypatch.setattr(LEAVES[path], "callback", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background would ignore it
    try:
        code, told = run(capsys, *path)
        assert (code, told.out, told.err) == (130, "", "")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_group__its_own_callback_and_options_fail_in_one_line(monkeypatch, capsys):
    assert run(capsys, "--nosuch") == (USAGE, ("", "error: No such option: --nosuch; see `mmqc --help`\n"))
    assert run(capsys, "nosuch") == (USAGE, ("", "error: No such command 'nosuch'; see `mmqc --help`\n"))
    assert run(capsys, "quantize", "--xyz") == (USAGE, ("", "error: No such option: --xyz; see `mmqc quantize --help`\n"))
    code, told = run(capsys)  # no arguments: the help
    assert code == USAGE
    assert "Usage: mmqc " in told.out + told.err
    assert "error:" not in told.err

    def no_torch(**options):
        raise ImportError("libtorch.so: cannot open shared object file")

    monkeypatch.setattr(GROUP, "callback", no_torch)
    assert run(capsys, "passes") == (REFUSED, ("", "error: libtorch.so: cannot open shared object file\n"))


def test_debug__is_an_environment_variable_too(monkeypatch, capsys):
    monkeypatch.setenv("MMQC_DEBUG", "1")
    code, told = run(capsys, "passes", "--recipe", "nosuch")
    assert code == USAGE
    assert told.err.startswith("Traceback (most recent call last)")
    assert "in make_config" in told.err


# --- the line ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("short"), "short"),
        (ValueError(), "ValueError"),
        (MemoryError(), "MemoryError"),
        (KeyError("language"), "unexpected KeyError: 'language'; --debug shows where"),
        (NotImplementedError(), "unexpected NotImplementedError: without a message; --debug shows where"),
        (
            RuntimeError("CUDA error: an assert\nFor debugging\n"),
            "unexpected RuntimeError: CUDA error: an assert; --debug shows where",
        ),
        (
            ImportError("\nIt needs PIL. Install it with:\n`pip install pillow`\nThen restart"),
            "It needs PIL. Install it with: `pip install pillow`; --debug shows the rest",
        ),
        (SafetensorError("header too large"), "SafetensorError: header too large"),
        (PassError("a pass\n  needs a fact"), "a pass; needs a fact"),
        (ExportError(["one", "two"]), "not exported: one; two"),
    ],
)
def test_line__says_what_is_wrong(error, line):
    assert failures.line(error) == line


def test_line__of_what_the_compiler_wrapped_is_that_of_the_error_itself():
    inner = PassError("the words")
    assert failures.meant(BackendCompilerFailed(print, InductorError(inner, None), None)) is inner


# --- a real one -------------------------------------------------------------------------------------------------------


DAMAGED = r"error: {}: a file of its weights is damaged \(.*\); copy the model again"


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """The shipped sample with half of its weights' file."""
    folder = tmp_path_factory.mktemp("damaged")
    sample = PACKAGE / "samples" / "digits_vqa"
    weights = (sample / BYTES).read_bytes()
    (folder / "config.json").write_bytes((sample / "config.json").read_bytes())
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    return folder


def test_process__a_damaged_checkpoint(damaged):
    words = ["-m", "mmqc.cli", "eval", str(damaged), "--sample", "digits-vqa"]
    environment = {k: v for k, v in os.environ.items() if k != "MMQC_DEBUG"} | {"PYTHONPATH": str(PACKAGE.parent)}
    done = forked.run(*words, env=environment)
    assert done.returncode == REFUSED, done.stderr
    assert done.stdout == ""
    assert re.match(DAMAGED.format(re.escape(str(damaged))), done.stderr.splitlines()[-1])
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr


def test_debug__a_damaged_checkpoint(damaged, capsys):
    code, told = run(capsys, "--debug", "eval", str(damaged), "--sample", "digits-vqa")
    assert code == REFUSED
    assert "SafetensorError: Error while deserializing" in told.err
    assert "in load_model" in told.err
    assert re.match(DAMAGED.format(re.escape(str(damaged))), told.err.splitlines()[-1])
