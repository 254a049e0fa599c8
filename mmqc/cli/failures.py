"""How a command fails: an exception becomes one line on stderr and an exit code of `mmqc.errors`.

    exception                                                            code
    a wrong option or argument                                           USAGE
    no memory left: Python's, torch's, an accelerator's                  MEMORY
    one of mmqc's                                                        its ``exit_code``
    a value, a file or a package, refused by Python or by a library      REFUSED
    anything else: a bug of mmqc, of a library or of the model's code    UNEXPECTED, and the line names its class
    anything, after Ctrl-C                                               130: some libraries' imports make an ImportError of it

With ``--debug`` the traceback comes before the line, whatever the exception is.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from mmqc.distributed import torchrun
from mmqc.errors import MEMORY, REFUSED, UNEXPECTED, USAGE, MmqcError

REFUSALS = (ValueError, OSError, ImportError)
READERS = {"PIL", "_pickle", "httpx", "huggingface_hub", "jinja2", "pickle", "safetensors", "safetensors_rust", "zipfile"}
CLICK_ERROR: type[Exception] = typer.BadParameter.__mro__[2]  # ClickException, which typer keeps in a private module
NO_HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory"  # a RuntimeError of torch's


class OneLineErrors(TyperGroup):
    """A group whose commands fail in one line; ``--debug`` is an option of the group."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The group's own options."""
        with one_line_errors(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """The group's callback, the command's options, the command."""
        with one_line_errors(ctx):
            return super().invoke(ctx)


@contextmanager
def one_line_errors(ctx: Any) -> Iterator[None]:
    """Print what is raised, and exit with its code."""
    with _interrupts() as interrupted:
        try:
            yield
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if interrupted.is_set():
                raise KeyboardInterrupt from error
            if type(error).__name__ == "NoArgsIsHelpError":  # typer prints the help
                raise
            if ctx.params.get("debug"):
                traceback.print_exception(error)
            error = meant(error)
            text = f"{line(error)}; see `{_command(error, ctx)} --help`" if isinstance(error, CLICK_ERROR) else line(error)
            if torchrun.first() or exit_code(error) != USAGE:  # what was typed wrong was typed wrong for all of them
                where = f"rank {os.environ['RANK']}: " if torchrun.started() else ""
                Console(stderr=True, soft_wrap=True, emoji=False).print(f"{where}[red]error:[/red] {escape(text)}")
            raise typer.Exit(exit_code(error)) from error


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Set by Ctrl-C, which goes on to be what it was: a KeyboardInterrupt, unless somebody has a handler."""
    seen, before = threading.Event(), signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        seen.set()
        assert callable(before)
        before(number, frame)

    if not callable(before) or threading.current_thread() is not threading.main_thread():  # ignored, or not ours to hear
        yield seen
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, before)


def _command(error: Any, ctx: Any) -> str:
    """What was called, as typed: "mmqc", "mmqc quantize"."""
    where = getattr(error, "ctx", None)
    return where.command_path if where else " ".join(filter(None, (ctx.command_path, ctx.invoked_subcommand)))


def meant(error: BaseException) -> BaseException:
    """The exception itself, or the one that Dynamo and Inductor wrapped while they compiled."""
    while (inner := getattr(error, "inner_exception", None)) is not None:
        error = inner
    return error


def exit_code(error: BaseException) -> int:
    """See the table above."""
    if isinstance(error, CLICK_ERROR):
        return USAGE
    if _is_memory(error):
        return MEMORY
    if isinstance(error, MmqcError):
        return error.exit_code
    # Libraries have classes on Exception alone; tokenizers raises Exception itself.
    library = type(error).__module__.split(".")[0] in READERS or type(error) is Exception
    return REFUSED if library or isinstance(error, REFUSALS) else UNEXPECTED


def _is_memory(error: BaseException | None) -> bool:
    """Whether it, or what it was raised from, says that memory ran out; torch is asked by name, it may not be imported."""
    while error is not None:
        names = {cls.__name__ for cls in type(error).__mro__}
        if names & {"MemoryError", "OutOfMemoryError"} or NO_HOST_MEMORY in str(error):
            return True
        error = error.__cause__
    return False


def line(error: BaseException) -> str:
    """What is wrong, without line breaks: mmqc's own words in full, of another's the first sentence."""
    name = type(error).__name__
    if isinstance(error, CLICK_ERROR):
        return _joined(error.format_message()).removesuffix(".")  # type: ignore[attr-defined]
    if isinstance(error, MmqcError):
        return _joined(str(error)) or name
    text, rest = _first(str(error))
    more = "; --debug shows the rest" if rest else ""
    if exit_code(error) == UNEXPECTED:
        return f"unexpected {name}: {text or 'without a message'}; --debug shows where"
    if type(error).__module__ == "builtins" or _is_memory(error):
        return (text or name) + more
    return f"{name}: {text}{more}"


def _joined(text: str) -> str:
    return "; ".join(part for part in map(str.strip, text.splitlines()) if part).replace(":; ", ": ")


def _first(text: str) -> tuple[str, bool]:
    """The first line that says something, with those that it announces; and whether there are others."""
    parts = [part.strip() for part in text.splitlines() if part.strip()]
    count = next((n for n, part in enumerate(parts, 1) if not part.endswith((":", ","))), len(parts))
    return " ".join(parts[:count]), count < len(parts)
