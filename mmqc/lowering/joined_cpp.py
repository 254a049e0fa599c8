"""The C++ kernels of a graph are compiled together: a file for each process that compiles, not one for each kernel.

    with joined_kernels():  compile_fx(...)        forty kernels in two files on two cores

Why:     a file takes 0.6 s before its first line of code is read: the compiler loads 150 MB of precompiled headers, and links.
How:     each kernel, with the binding that Inductor writes for it, stands in a namespace of its own, its two public names changed
         by macros.  They are collected while Inductor loads its module, and compiled when that waits for them.
Parts:   with waiting_at_the_end():  compile_fx(...) for each part of a graph
         A part's kernels are one file, compiled while the next part's code is generated: from the first of them that comes
         when the header is compiled (early_compiler.py), for which nobody waits before the end.
Else:    the kernels of a file that does not compile are compiled as Inductor would.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.compile_worker.subproc_pool import SubprocException
from torch._inductor.exc import CppCompileError
from torch._inductor.utils import clear_on_fresh_cache

from mmqc.lowering import early_compiler

logger = logging.getLogger(__name__)

INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b.*$", re.MULTILINE)
DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)
ENTRY = CppPythonBindingsCodeCache.entry_function

_wait = AsyncCompile.wait


@contextmanager
def joined_kernels() -> Iterator[None]:
    """What Inductor compiles for the CPU meanwhile is compiled together."""
    with mock.patch.multiple(AsyncCompile, cpp_pybinding=_collect, wait=_compile_and_wait):
        yield


class _Parts:
    """What waits for the kernels of a graph's parts, and their files, begun or not."""

    def __init__(self) -> None:
        self.waits: list[Callable[[], None]] = []
        self.files: list[_Share] = []

    def begin(self) -> None:
        """Have everything compiled that is not yet."""
        for file in self.files:
            file.begin()


_later: ContextVar[_Parts | None] = ContextVar("the parts of a graph that is compiled", default=None)


@contextmanager
def waiting_at_the_end() -> Iterator[None]:
    """Graphs that are compiled meanwhile may be called behind the block, where it waits for their kernels."""
    parts = _Parts()
    token = _later.set(parts)
    try:
        yield
    finally:
        _later.reset(token)
    parts.begin()  # all of them, before one is waited for
    for wait in parts.waits:
        wait()


def when_waited(then: Callable[[], None]) -> None:
    """Call it now, or where the kernels of a part that is being loaded have been waited for."""
    later = _later.get()
    if later is None:
        then()
    else:
        later.waits.append(then)


@dataclass(frozen=True)
class Kernel:
    """One that is not compiled yet; stands in a generated module until that waits for its kernels."""

    types: tuple[str, ...]
    source: str

    def alone(self) -> Callable[..., Any]:
        """Compiled as Inductor does."""
        return CppPythonBindingsCodeCache.load_pybinding(list(self.types), self.source)

    def text(self) -> str:
        """The file that Inductor would write, with what makes a module for Python of it."""
        texts: list[str] = []

        class Writer(CppPythonBindingsCodeCache):
            @classmethod
            def load_async(cls, main_code: str, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
                del args, kwargs
                texts.append(main_code)

        Writer.load_pybinding_async(list(self.types), self.source)
        return texts[0]


@clear_on_fresh_cache
class _Files(CppPythonBindingsCodeCache):
    """Inductor's cache of compiled files, for files of several kernels."""

    cache: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def cache_clear() -> None:
        """For Inductor's fresh caches."""
        _Files.cache.clear()

    @classmethod
    def _load_library_inner(cls, path: str, key: str) -> Any:
        del key  # Inductor sets it
        return _File(path)


class _File:
    """A compiled file; each of its kernels is a module for Python."""

    def __init__(self, path: str) -> None:
        self.path, self.key = path, ""

    def kernel(self, number: int) -> Callable[..., Any]:
        """Load one of them."""
        named = type("Named", (CppPythonBindingsCodeCache,), {"entry_function": f"{ENTRY}_{number}"})
        return getattr(named._load_library_inner(self.path, self.key), ENTRY)


def _collect(self: AsyncCompile, argtypes: Sequence[str], source_code: str) -> Kernel:
    """In the place of ``AsyncCompile.cpp_pybinding``."""
    del self
    return Kernel(tuple(argtypes), source_code)


def _compile_and_wait(self: AsyncCompile, scope: dict[str, Any]) -> None:
    """In the place of ``AsyncCompile.wait``."""
    kernels = [*dict.fromkeys(v for v in scope.values() if isinstance(v, Kernel))]
    threads, later = get_compile_threads(), _later.get()
    submit = self.submit if threads > 1 else None
    files = shares_of(kernels, threads, submit) if later is None else shares_of(kernels, 1, submit)
    if later is not None:
        later.files += files
    if later is None or early_compiler.is_idle():
        for file in files if later is None else later.files:
            file.begin()

    def wait() -> None:
        functions = ended(files)
        for name, value in [*scope.items()]:
            if isinstance(value, Kernel):
                scope[name] = functions[value]
        _wait(self, scope)

    if later is None:
        wait()
    else:
        later.waits.append(wait)


class _Share:
    """Kernels of one file."""

    def __init__(self, kernels: list[Kernel], submit: Callable[..., Any] | None) -> None:
        self.kernels = kernels
        self.wait: Callable[[], Any] | None = None
        text, settings = joined([k.text() for k in kernels]), config.get_config_copy()

        def begin() -> Callable[[], Any]:
            with config.patch(settings):  # the compiler's flags are those of now, whenever it begins
                return _Files.load_async(text, submit_fn=submit)

        self._begin = begin

    def begin(self) -> Callable[[], Any]:
        """Have it compiled, meanwhile if there is something to submit to; what waits for it."""
        self.wait = self.wait or self._begin()
        return self.wait


def shares_of(kernels: Sequence[Kernel], files: int, submit: Callable[..., Any] | None) -> list[_Share]:
    """The kernels in at most so many files, which are not begun."""
    return [_Share(share, submit) for share in shared(kernels, files) if share]


def ended(files: Sequence[_Share]) -> dict[Kernel, Callable[..., Any]]:
    """The kernels as functions."""
    functions: dict[Kernel, Callable[..., Any]] = {}
    for file in files:
        share = file.kernels
        try:
            loaded = file.begin()()
            functions.update({k: loaded.kernel(i) for i, k in enumerate(share)})
        except (CppCompileError, SubprocException) as error:  # the second is the first, of another process
            logger.info("%d kernels do not compile together, and are compiled one by one: %s", len(share), error)
            functions.update({k: k.alone() for k in share})
    return functions


def shared(kernels: Sequence[Kernel], count: int) -> list[list[Kernel]]:
    """As many shares, about as much source in each."""
    shares: list[list[Kernel]] = [[] for _ in range(count)]
    sizes = [0] * count
    for kernel in sorted(kernels, key=lambda k: -len(k.source)):
        least = sizes.index(min(sizes))
        shares[least].append(kernel)
        sizes[least] += len(kernel.source)
    return shares


def joined(texts: Sequence[str]) -> str:
    """One file of several, the headers first; number i's functions end with ``_i``."""
    lines = [*dict.fromkeys(line.strip() for text in texts for line in INCLUDE.findall(text))]
    for i, text in enumerate(texts):
        names = (ENTRY, f"PyInit_{ENTRY}")
        lines += [f"namespace number_{i} {{", *(f"#define {name} {name}_{i}" for name in names)]
        # What a kernel guards against being there twice has to be in every namespace.
        lines += [INCLUDE.sub("", text), *(f"#undef {name}" for name in dict.fromkeys([*names, *DEFINE.findall(text)])), "}"]
    return "\n".join(lines) + "\n"
