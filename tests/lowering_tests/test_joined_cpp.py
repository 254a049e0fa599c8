"""C++ kernels that are compiled together compute what they do alone, and are told apart."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.compile_worker.subproc_pool import SubprocException
from torch._inductor.utils import fresh_cache

from mmqc.lowering import joined_cpp
from mmqc.lowering.joined_cpp import Kernel, ended, joined, joined_kernels, shared, shares_of, waiting_at_the_end

HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
BODY = 'extern "C" void kernel(float* out, const int64_t n) {{ for (int64_t i = 0; i < n; i++) out[i] = {value}; }}'


def kernel(value: str, extra: str = "") -> Kernel:
    return Kernel(("float*", "const int64_t"), HEADER + extra + BODY.format(value=value))


def test_compiled__each_by_its_number() -> None:
    kernels = [kernel(f"{i}.5f * i") for i in range(5)] + [kernel("float(helper())", "static int helper() { return 7; }\n")]
    functions = ended(shares_of(kernels, 2, None))
    for i, k in enumerate(kernels):
        out = torch.full((4,), float("nan"))
        functions[k](out, 4)
        assert torch.equal(out, torch.full((4,), 7.0) if i == 5 else (i + 0.5) * torch.arange(4.0))


def test_compiled__together_with_a_helper_behind_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Kernel, "alone")
    guarded = "#ifndef HELPER\n#define HELPER\nstatic int helper() { return 7; }\n#endif\n"
    kernels = [kernel(f"float(helper()) + {i}", guarded) for i in range(3)]
    functions = ended(shares_of(kernels, 1, None))
    for i, k in enumerate(kernels):
        out = torch.zeros(2)
        functions[k](out, 2)
        assert torch.equal(out, torch.full((2,), 7.0 + i))


def test_compiled__what_does_not_compile_together_is_compiled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A specialization of a template of torch's cannot stand in a namespace."""
    odd = kernel("2.0f", "namespace c10 { struct Odd {}; }\ntemplate <> struct std::hash<int*[7]> { int x; };\n")
    kernels = [kernel("1.0f"), odd]
    said: list[str] = []
    monkeypatch.setattr(joined_cpp.logger, "info", lambda *words: said.append(words[0]))
    functions = ended(shares_of(kernels, 1, None))
    assert len(said) == 1
    assert "do not compile together" in said[0]
    for k, value in zip(kernels, (1.0, 2.0), strict=True):
        out = torch.zeros(3)
        functions[k](out, 3)
        assert torch.equal(out, torch.full((3,), value))


def test_compiled__an_error_of_another_process() -> None:
    def submit(work: Callable[[], Any]) -> Future[Any]:
        del work
        failed: Future[Any] = Future()
        failed.set_exception(SubprocException("C++ compile error"))
        return failed

    k, out = kernel(f"float({time.time_ns()})"), torch.zeros(1)  # never compiled before
    ended(shares_of([k], 1, submit))[k](out, 1)
    assert out.item() > 0


def test_shared__evenly() -> None:
    kernels = [kernel(f"{'1 + ' * n}0") for n in range(9)]
    shares = shared(kernels, 3)
    assert sorted(k.source for share in shares for k in share) == sorted(k.source for k in kernels)
    sizes = [sum(len(k.source) for k in share) for share in shares]
    assert max(sizes) < 1.2 * min(sizes)
    assert [len(share) for share in shared(kernels[:2], 3)] == [1, 1, 0]


def test_joined__headers_once_and_first() -> None:
    text = joined([kernel("1.0f").text(), kernel("2.0f").text()])
    assert text.count("#include <torch/csrc/inductor/cpp_prefix.h>") == text.count("#include <Python.h>") == 1
    assert text.rindex("#include") < text.index("namespace number_0")


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("threads", [1, 2])
def test_joined_kernels__a_graph_is_a_file_for_each_process_that_compiles(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[int] = []
    monkeypatch.setattr(joined_cpp, "get_compile_threads", lambda: threads)
    pool = ThreadPoolExecutor(threads)
    monkeypatch.setattr(joined_cpp.AsyncCompile, "submit", pool.submit)  # never in the caller's thread, which holds a lock
    together: Any = joined_cpp.joined
    monkeypatch.setattr(joined_cpp, "joined", lambda texts: (files.append(len(texts)), together(texts))[1])
    weight = torch.randn(16, 16)

    def function(x: Tensor) -> Tensor:
        for _ in range(3):
            x = (torch.relu(x) * 2 + 1) @ weight
        return x.softmax(-1)

    torch._dynamo.reset()
    x = torch.randn(8, 16)
    with fresh_cache(), joined_kernels():
        got = torch.compile(function)(x)
    assert len(files) == threads
    assert sum(files) > 1
    torch.testing.assert_close(got, function(x))


@pytest.mark.slow
@pytest.mark.parametrize("header", [True, False], ids=["header", "no header yet"])
def test_joined_cpp__parts_of_a_graph_wait_at_the_end(header: bool) -> None:
    x = torch.randn(7)
    with fresh_cache(), ThreadPoolExecutor(2) as pool:
        waits: list[Any] = []
        scopes = [{"f": kernel(f"{value}"), "other": value} for value in (3, 4)]

        class Async:
            submit = staticmethod(pool.submit)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(joined_cpp, "_wait", lambda self, scope: waits.append(scope))
            patch.setattr(joined_cpp, "get_compile_threads", lambda: 2)
            patch.setattr(joined_cpp.early_compiler, "is_idle", lambda: header)
            with waiting_at_the_end():
                for scope in scopes:
                    joined_cpp._compile_and_wait(Async(), scope)  # type: ignore[arg-type]
                assert not waits
                parts: Any = joined_cpp._later.get()
                assert [file.wait is not None for file in parts.files] == [header] * 2
                assert all(isinstance(scope["f"], Kernel) for scope in scopes)
        assert waits == scopes
        for scope in scopes:
            scope["f"](x, 7)
            assert x.tolist() == [scope["other"]] * 7


def test_joined_cpp__an_error_in_a_part_waits_for_nothing() -> None:
    with pytest.raises(ValueError, match="of the caller"), waiting_at_the_end():
        raise ValueError("of the caller")
    assert joined_cpp._later.get() is None
