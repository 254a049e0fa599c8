"""What the C++ compiler does once for a machine and a process is done while Dynamo traces the first graph.

    trace ──────────────────────► generated code ──────────────► files
    └► thread: instruction sets ─►┘ waits here    header ───────►┘ and here
Why:     on a fresh machine Inductor precompiles its headers (6 s), in every process it asks for what they include and for the
         processor's instruction sets (1 s and more), and all that time this process waits for other ones.
"""

from __future__ import annotations

import logging
import threading

from torch._inductor.async_compile import get_compile_threads
from torch._inductor.codecache import CppPythonBindingsCodeCache

from mmqc.lowering.instruction_set import find_instruction_sets

logger = logging.getLogger(__name__)
_started: list[threading.Thread] = []
_known = threading.Event()  # the instruction sets


def start() -> None:
    """Begin, once in a process and if it may use a second core; what fails is done again where it is needed."""
    if not _started and get_compile_threads() > 1:
        _known.clear()
        _started.append(threading.Thread(target=_prepare, name="mmqc-compiler", daemon=True))
        _started[0].start()


def wait() -> None:
    """The instruction sets are known, which code is generated for."""
    if _started:
        _known.wait()
    find_instruction_sets()


def is_idle() -> bool:
    """Whether a file that is compiled now does not wait for the header."""
    return not any(thread.is_alive() for thread in _started)


def _prepare() -> None:
    try:
        try:
            find_instruction_sets()
        finally:
            _known.set()
        CppPythonBindingsCodeCache.load_async("int nothing;")  # precompiles the header, and compiles nothing until it is called
    except Exception as error:
        logger.info("the compiler was not prepared: %s", error)
