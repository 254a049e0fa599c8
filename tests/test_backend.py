import contextlib
import copy
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerance import assert_close
from torch import nn

import mmqc
import mmqc.backend
from mmqc.backend import GraphRecord, backend, collect_records
from mmqc.nn.linear import QuantLinear, RMSNorm
from mmqc.nn.modality import ModalityContext
from mmqc.solvers import Quantized

pytestmark = pytest.mark.usefixtures("integer_products")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def fresh_dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(mmqc.backend, "_told", set())
    yield
    torch._dynamo.reset()


def linear(n: int, k: int, scales: int = 1, **more: Any) -> QuantLinear:
    codes = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    input_scale = torch.tensor([0.03, 0.1][:scales])
    quantized = Quantized(codes, torch.rand(n) * 0.01)
    return QuantLinear.from_parts(quantized, weight_bits=8, activation_bits=8, bias=torch.randn(n), input_scale=input_scale, **more)


class Block(nn.Module):
    """Embedding, norm, gated MLP: two scales in front, an online Hadamard behind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(50, 64), RMSNorm(64)
        self.up, self.down = linear(96, 64, 2), linear(64, 96, hadamard=True)
        self.up.modality = ModalityContext.attach(self, (7, 8))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 20, (batch, length))


# --- what becomes of a graph ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrap", "grad"), [(lambda m: m.compile(backend=backend) or m, False), (lambda m: torch.compile(m, backend=backend), True)]
)
def test_backend__compiled_equals_eager(wrap: Callable[[nn.Module], nn.Module], grad: bool) -> None:
    model = Block()
    compiled = wrap(copy.deepcopy(model))
    with torch.set_grad_enabled(grad), collect_records() as records:
        for length in (9, 12, 17):
            batch = ids(2, length)
            assert_close(compiled(batch), model(batch))
        known = len(records)
        assert_close(compiled(batch := ids(3, 33)), model(batch))
        assert_close(compiled(batch := ids(3, 21)), model(batch))
    quantized = [r for r in records if r.quantized]
    assert len(quantized) <= 4, "the first call, whose hooks are new; one static graph; one for each axis that turned out dynamic"
    assert len(records) - known <= 2
    assert all(r.how == "mmqc" and r.kernels.count("extern _int_mm") == 2 for r in quantized)
    assert {r.how for r in records if not r.quantized} <= {"eager"}


def test_backend__gradient_reaches_the_embedding_past_quantized_layers() -> None:
    model = Block()
    compiled = torch.compile(copy.deepcopy(model), backend=backend)
    batch = ids(2, 9)
    model(batch).sum().backward()
    compiled(batch).sum().backward()
    assert_close(compiled.embed.weight.grad, model.embed.weight.grad)


def test_backend__record_of_a_quantized_graph() -> None:
    model = Block()
    model.compile(backend=backend)
    with torch.no_grad(), collect_records() as records:
        model(ids(2, 9))
    (record,) = [r for r in records if r.quantized]
    assert record.ops == {"norm_quantize": 1, "scaled_matmul_epilogue": 1, "hadamard_quantize": 1, "scaled_matmul": 1}
    assert any(k.startswith("cpp_fused") and "quantize" in k for k in record.kernels)
    assert record.compile_seconds > 0
    assert record.fallbacks == []
    assert [r.index for r in records] == list(range(len(records)))
    assert "extern _int_mm" in str(record)


def test_backend__cached_compilation_has_the_same_record() -> None:
    model, batch = Block(), ids(2, 9)

    def record() -> GraphRecord:
        torch._dynamo.reset()
        with torch.no_grad(), collect_records() as records:
            torch.compile(model, backend=backend)(batch)
        return next(r for r in records if r.quantized)

    first, second = record(), record()
    assert (first.kernels, first.ops, first.fallbacks) == (second.kernels, second.ops, second.fallbacks)


def test_backend__glue_runs_as_it_is() -> None:
    compiled = torch.compile(lambda x: (x + 1).relu().cumsum(0), backend=backend)
    with collect_records() as records:
        assert compiled(torch.zeros(3)).tolist() == [1, 2, 3]
    assert [(r.how, r.kernels, r.quantized) for r in records] == [("eager", [], False)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x @ x,
        lambda x: torch.nn.functional.linear(x, x),
        lambda x: x.matmul(x),
        lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    ],
)
def test_backend__heavy_float_graphs_go_to_inductor(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(8, 8)
    with collect_records() as records:
        assert_close(torch.compile(function, backend=backend)(x), function(x))
    assert [(r.how, r.quantized) for r in records] == [("inductor", False)]
    assert records[0].kernels


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="there is one limit, of the process")
@pytest.mark.parametrize(("limit", "programs"), [(None, 10), (3, 3)])
def test_backend__more_kinds_of_calls_than_dynamo_allows_by_itself(
    limit: int | None, programs: int, without_inductor: None
) -> None:
    """Beyond its limit Dynamo runs a model eagerly; a limit that the caller has set stays."""
    layer = linear(16, 32)

    class Kinds(nn.Module):
        def forward(self, x: torch.Tensor, kind: int) -> torch.Tensor:
            return layer(x) * (kind, 1)[0]

    model, x = torch.compile(Kinds(), backend="mmqc", dynamic=False), torch.randn(3, 32)
    config: Any = torch._dynamo.config
    with collect_records() as records, config.patch(recompile_limit=limit) if limit else contextlib.nullcontext():
        for kind in range(10):
            assert_close(model(x, kind), layer(x) * kind)
    assert len(records) == programs


def test_collect_records__nests_and_belongs_to_its_thread() -> None:
    seen: list[int] = []

    def other() -> None:
        with collect_records() as records:
            torch.compile(lambda x: x + 2, backend=backend)(torch.zeros(3))
        seen.append(len(records))

    with collect_records() as outer:
        torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(3))
        with collect_records() as inner:
            torch.compile(lambda x: x + 3, backend=backend)(torch.zeros(3))
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    torch.compile(lambda x: x + 4, backend=backend)(torch.zeros(3))
    assert (len(outer), len(inner), seen) == (2, 1, [1])


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"mode": "default"},
        {"mode": "reduce-overhead"},
        {"mode": "max-autotune-no-cudagraphs"},
        {"options": {"mode": "max-autotune", "token_order": "sequence", "epilogue_fusion": True}},
        {"options": {"token_order": "auto", "cpp.simdlen": 256, "recorded_sizes": 4}},
    ],
)
def test_backend__modes_and_options_are_accepted(arguments: dict[str, Any]) -> None:
    layer, x = linear(16, 32), torch.randn(5, 32)
    with torch.no_grad():
        assert_close(torch.compile(layer, backend=backend, **arguments)(x), layer(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_order": "other"}, "allowed: 'auto', 'gather', 'unified'"),
        ({"collectives": "nccl"}, "allowed: 'backend', 'shared'"),
        ({"token_order": "random"}, "allowed: 'auto', 'sequence', 'modality'"),
        (
            {"no_such_key": 1},
            r"'no_such_key'.*valid keys: attention_order, collectives, config, .*regions, .*max_autotune",
        ),
        ({"recorded_sizes": -1}, "recorded_sizes = -1: a number of sizes to keep, or 0"),
        ({"mode": "fastest"}, "mode = 'fastest' is unknown"),
    ],
)
def test_backend__refuses_options(options: dict[str, Any], message: str) -> None:
    layer = linear(16, 32)
    with pytest.raises(Exception, match=message):
        torch.compile(layer, backend=backend, options=options)(torch.randn(5, 32))


# --- discovery --------------------------------------------------------------------------------------------------------


def test_discovery__found_by_name_without_importing_dynamo() -> None:
    script = (
        "import sys, torch, mmqc\n"
        "assert 'torch._dynamo' not in sys.modules and 'torch._inductor' not in sys.modules\n"
        "assert torch.compile(lambda x: x + 1, backend='mmqc')(torch.zeros(2)).tolist() == [1, 1]\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules, 'glue needs no Inductor'\n"
        "assert 'mmqc' in torch.compiler.list_backends()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=env, cwd=ROOT.anchor, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_discovery__after_dynamo_has_read_the_entry_points() -> None:
    script = (
        "import torch, torch._dynamo; torch._dynamo.list_backends(); import mmqc\nassert 'mmqc' in torch._dynamo.list_backends()"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=env, cwd=ROOT.anchor, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- what needs a value that only data says ---------------------------------------------------------------------------


class Repeated(nn.Module):
    """Rows up to a number, as often as another says: torch cannot say how many these are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        rows, times = numbers
        return self.linear(x[:rows].squeeze(0).repeat(times, 1))


@pytest.fixture
def repeated() -> Iterator[tuple[Any, torch.Tensor, torch.Tensor]]:
    """The model and its inputs, traced with the numbers as symbols."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        yield Repeated().eval(), torch.randn(9, 8), torch.tensor([5, 2])


@pytest.mark.parametrize("whole", [True, False])
def test_uncompiled__runs_as_it_is_and_says_so_once(repeated: Any, caplog: pytest.LogCaptureFixture, whole: bool) -> None:
    model, x, numbers = repeated
    function = model if whole else lambda x, numbers: model.forward(x, numbers)
    compiled = torch.compile(function, backend="mmqc")
    with collect_records() as records:
        for add in (0, 1):
            assert torch.equal(compiled(x, numbers + add), model(x, numbers + add))
    left = [r for r in records if r.how == "uncompiled"]
    names = [r.where.split(" at ")[0].rpartition(".")[2] for r in left]
    assert names == (["forward"] if whole else ["<lambda>", "forward"])
    for record, message in zip(left, caplog.messages, strict=True):
        ((op, reason),) = record.fallbacks
        assert (op, reason.partition(" {")[0]) == ("function", "Pending unbacked symbols")
        assert record.where in message
        assert "only data says" in message


def test_uncompiled__explain_and_fullgraph_tell(repeated: Any) -> None:
    model, x, numbers = repeated
    told = mmqc.explain(model, {"x": x, "numbers": numbers})
    assert [op for _, op, _ in told.fallbacks] == ["function"]
    assert "not compiled, see the fallbacks: 1" in str(told)
    torch._dynamo.reset()  # what it could not compile once Dynamo leaves alone
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="unbacked symbols"), collect_records() as records:
        torch.compile(model, backend="mmqc", fullgraph=True)(x, numbers)
    assert not records


@pytest.mark.parametrize("wrong", [AssertionError, KeyError("unbacked_bindings"), RuntimeError])
def test_uncompiled__other_errors_are_errors(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    from mmqc.lowering import inductor

    def fail(*_: Any) -> None:
        raise wrong

    monkeypatch.setattr(inductor, "compile_graph", fail)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed), torch.no_grad():
        torch.compile(nn.Linear(8, 8), backend="mmqc")(torch.randn(2, 8))
