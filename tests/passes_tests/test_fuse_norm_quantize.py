"""One operation for a residual's sum, the norm behind it and the quantization; equal to the bit."""

from typing import Any

import pytest
import torch
from fusion_cases import compile_and_compare, linear
from torch import Tensor, nn

from mmqc.compiler.record import collect_records
from mmqc.graph import semantic
from mmqc.nn.mixed_linear import MixedLinear
from mmqc.nn.norm import RMSNorm

WIDTH = 24


def reader(width: int, bits: tuple[int, ...] = (4, 8), order: bool = False, **more: Any) -> MixedLinear:
    """A linear in one to three parts with random codes."""
    g = torch.Generator().manual_seed(width)
    widths = {1: [24], 2: [21, 3], 3: [6, 15, 3]}[len(bits)]
    codes = [torch.randint(-8, 8, (width, w), dtype=torch.int8, generator=g) for w in widths]
    return MixedLinear.from_stored(
        codes,
        torch.rand(width, len(bits), generator=g),
        torch.stack([c.sum(1, dtype=torch.int32) for c in codes], 1),
        widths=widths,
        stored=[8] * len(bits),
        activation=bits,
        weight_bits=4,
        order=torch.randperm(WIDTH, generator=g) if order else None,
        **more,
    )


class Llama(nn.Module):
    """The norm of transformers' Llama, which rounds in front of its gain."""

    def __init__(self, plus_one: bool = False) -> None:
        super().__init__()
        self.weight, self.plus_one = nn.Parameter(1 + 0.1 * torch.randn(WIDTH)), plus_one

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        if self.plus_one:  # Gemma's
            return (h * (1.0 + self.weight.float())).type_as(x)
        return self.weight * h.to(x.dtype)


class Block(nn.Module):
    """x + f(n(x)), twice."""

    def __init__(self, norms: Any, readers: Any, between: Any = lambda y: y) -> None:
        super().__init__()
        self.norms, self.readers, self.between = nn.ModuleList(norms), nn.ModuleList(readers), between

    def forward(self, x: Tensor) -> Tensor:
        for norm, read in zip(self.norms, self.readers, strict=True):
            x = x + read(self.between(norm(x)))
        return x


def norms(kind: str) -> nn.Module:
    plain = {"gain": torch.randn(WIDTH), "bias": torch.randn(WIDTH)}
    return {
        "unit": lambda: RMSNorm(WIDTH),
        "gain": lambda: RMSNorm(WIDTH, 1e-5, plain["gain"]),
        "bias": lambda: RMSNorm(WIDTH, 1e-5, plain["gain"], plain["bias"]),
        "llama": Llama,
        "gemma": lambda: Llama(True),
    }[kind]()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["unit", "gain", "bias", "llama", "gemma"])
def test_fuse_norm_quantize__norms_and_their_sums(kind: str, dtype: torch.dtype, without_inductor: None) -> None:
    model = Block([norms(kind) for _ in "ab"], [reader(WIDTH, bits) for bits in ((4, 8), (2, 4, 8))]).to(dtype)
    ops, _ = compile_and_compare(model, torch.randn(2, 3, WIDTH).to(dtype))
    assert ops == {"norm_quantize_per_token": 2, "mixed_matmul": 2}


def test_fuse_norm_quantize__the_second_norm_takes_its_sum_over(without_inductor: None) -> None:
    from mmqc.compiler.record import collect_records

    model, x = Block([norms("llama") for _ in "abc"], [reader(WIDTH, order=True) for _ in "abc"]), torch.randn(5, WIDTH)
    with torch.no_grad(), collect_records() as records:
        got = torch.compile(model, backend="mmqc", fullgraph=True)(x)
        torch.testing.assert_close(got, model(x), rtol=0, atol=0)
    sites = next(p.sites for p in records[0].passes if p.name == "fuse_norm_quantize")
    assert [len(str(site).split(", ")) for site in sites] == [2, 3, 3], "a sum, the norm, the quantization"


class LayerNorm(nn.LayerNorm):
    """With random gain and bias."""

    def __init__(self, vectors: bool = True) -> None:
        super().__init__(32, 1e-5, vectors)
        for p in self.parameters():
            nn.init.normal_(p, 1, 0.1)


WIDE = {
    "unit": lambda: RMSNorm(32),
    "bias": lambda: RMSNorm(32, 1e-5, torch.randn(32), torch.randn(32)),
    "layer": LayerNorm,
    "bare layer": lambda: LayerNorm(False),
    "torch's": lambda: nn.RMSNorm(32),
    "torch's with eps": lambda: nn.RMSNorm(32, 1e-5),
    "torch's bare": lambda: nn.RMSNorm(32, elementwise_affine=False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [semantic.layer_norm, semantic.rms_norm])
def test_fuse_norm_quantize__raised(norm: Any, dtype: torch.dtype) -> None:
    from mmqc.graph.program import Program
    from mmqc.passes.fuse_norm_quantize import FuseNormQuantize

    """As raise_ops leaves them, gain and bias behind what is rounded already."""
    x, r = (torch.randn(3, 32).to(dtype) for _ in "xr")
    gain, bias = ((1 + 0.1 * torch.randn(32)).to(dtype) for _ in "gb")
    graph = torch.fx.Graph()
    nodes = {name: graph.placeholder(name) for name in ("x", "r", "gain", "bias", "scale")}
    values = dict(zip(nodes.values(), (x, r, gain, bias, torch.tensor([0.03])), strict=True))

    def call(function: Any, *args: Any) -> torch.fx.Node:
        node = graph.call_function(function, args)
        values[node] = function(*(values.get(a, a) for a in args))
        return node

    h = call(torch.add, nodes["x"], nodes["r"])
    y = call(torch.add, call(torch.mul, call(norm, h, 1e-5), nodes["gain"]), nodes["bias"])
    q = call(torch.ops.mmqc.quantize.default, y, nodes["scale"], None, 8)
    graph.output((q, h))
    for node, value in values.items():
        node.meta["example_value"] = value
    given = [values[n] for n in nodes.values()]
    want = torch.fx.GraphModule({}, graph)(*given)
    program = Program(graph, {}, given, fragment=True)
    (site,) = FuseNormQuantize().match(program)
    FuseNormQuantize().rewrite(program, site)
    graph.eliminate_dead_code()
    assert next(n.target for n in graph.nodes if n.op == "call_function") is torch.ops.mmqc.norm_quantize.default
    got = torch.fx.GraphModule({}, graph)(*given)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", WIDE)
def test_fuse_norm_quantize__static(kind: str, dtype: torch.dtype, without_inductor: None) -> None:
    model = Block([WIDE[kind]() for _ in "ab"], [linear(32) for _ in "ab"]).to(dtype)
    ops, _ = compile_and_compare(model, torch.randn(2, 3, 32).to(dtype))
    assert ops == {"norm_quantize": 2, "scaled_matmul": 2}


def test_fuse_norm_quantize__static_takes_the_sum_over_and_shares(without_inductor: None) -> None:
    from mmqc.compiler.record import collect_records

    class Readers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = linear(32), linear(16)

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) * self.k(x).repeat(1, 2)

    model, x = Block([LayerNorm(), WIDE["unit"]()], [Readers(), Readers()]), torch.randn(5, 32)
    with torch.no_grad(), collect_records() as records:
        got = torch.compile(model, backend="mmqc", fullgraph=True)(x)
        torch.testing.assert_close(got, model(x), rtol=0, atol=0)
    assert records[0].ops == {"norm_quantize": 2, "scaled_matmuls": 2}
    sites = next(p.sites for p in records[0].passes if p.name == "fuse_norm_quantize")
    assert [len(str(site).split(", ")) for site in sites] == [2, 3]


def test_fuse_norm_quantize__a_layer_norm_by_token_stays(without_inductor: None) -> None:
    class Narrow(nn.LayerNorm):
        def __init__(self) -> None:
            super().__init__(WIDTH)

    ops, misses = compile_and_compare(Block([Narrow()], [reader(WIDTH)]), torch.randn(3, WIDTH))
    assert ops == {"quantize_per_token": 1, "mixed_matmul": 1}
    assert "does not have" in misses["fuse_norm_quantize"][0]
    torch._dynamo.reset()
    gain = torch.rand(32)
    scaled = Block([LayerNorm()], [linear(32)], lambda y: y * gain)
    ops, misses = compile_and_compare(scaled, torch.randn(3, 32))
    assert "rounds in other places" in misses["fuse_norm_quantize"][0], "gain and bias, and another gain"
    torch._dynamo.reset()
    wide = Block([LayerNorm(False)], [linear(32)], lambda y: (y.float() * gain).to(y.dtype)).bfloat16()
    ops, misses = compile_and_compare(wide, torch.randn(3, 32).bfloat16())
    assert "rounds in other places" in misses["fuse_norm_quantize"][0], "rounded, and a gain in float32"


class Twice(nn.Module):
    """Two norms of one sum, and the sum itself read in front of them."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early, self.norms = early, nn.ModuleList([norms("gain"), norms("llama")])
        self.readers = nn.ModuleList([reader(WIDTH), reader(WIDTH, order=True)])

    def forward(self, x: Tensor) -> Tensor:
        h = x + x.sin()
        first = h.cos() if self.early else h
        return first + sum(linear(norm(h)) for norm, linear in zip(self.norms, self.readers, strict=True))


@pytest.mark.parametrize("early", [False, True])
def test_fuse_norm_quantize__a_sum_that_several_read(early: bool, without_inductor: None) -> None:
    ops, _ = compile_and_compare(Twice(early), torch.randn(2, 3, WIDTH))
    assert ops == {"norm_quantize_per_token": 2, "mixed_matmul": 2}


def test_fuse_norm_quantize__refuses(without_inductor: None) -> None:
    fold = lambda y: y.view(-1, WIDTH)  # noqa: E731
    _, misses = compile_and_compare(Block([norms("gain")], [reader(WIDTH)], fold), torch.randn(3, WIDTH))
    assert "a reshape stands between" in misses["fuse_norm_quantize"][0]
    torch._dynamo.reset()

    class Read(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.norms[0](x)
            return self.readers[0](y) + y

    ops, misses = compile_and_compare(Read([norms("gain")], [reader(WIDTH)]), torch.randn(3, WIDTH))
    assert "2 operations read" in misses["fuse_norm_quantize"][0]
    assert ops == {"quantize_per_token": 1, "mixed_matmul": 1}
    torch._dynamo.reset()
    half = Block([norms("gain")], [reader(WIDTH)], lambda y: y.half().float())
    ops, misses = compile_and_compare(half, torch.randn(3, WIDTH))
    assert "rounds in other places" in misses["fuse_norm_quantize"][0]
    torch._dynamo.reset()
    ops, misses = compile_and_compare(Block([nn.Tanh()], [reader(WIDTH)]), torch.randn(3, WIDTH))
    assert misses["fuse_norm_quantize"] == []


@pytest.mark.parametrize("kind", ["bias", "llama"])
def test_fuse_norm_quantize__through_inductor(kind: str) -> None:
    model, x = Block([norms(kind) for _ in "ab"], [reader(WIDTH), reader(WIDTH, (2, 4, 8))]), torch.randn(2, 3, WIDTH)
    torch._dynamo.reset()
    with torch.no_grad():
        got, expected = torch.compile(model, backend="mmqc", fullgraph=True)(x), model(x)
    assert ((got - expected).norm() / expected.norm()).item() < 0.02, "a code or two may fall on the other side"


def test_fuse_hadamard_quantize__by_token(without_inductor: None) -> None:
    class Gated(nn.Module):
        def __init__(self, down: nn.Module) -> None:
            super().__init__()
            self.down = down

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.nn.functional.silu(x) * (x + 1))

    one = reader(8, (4,), hadamard=True)
    ops, _ = compile_and_compare(Gated(one), torch.randn(2, 3, WIDTH))
    assert ops == {"hadamard_quantize_per_token": 1, "mixed_matmul": 1}
    torch._dynamo.reset()
    _, misses = compile_and_compare(Gated(reader(8, hadamard=True)), torch.randn(2, 3, WIDTH))
    assert "in several parts" in misses["fuse_hadamard_quantize"][0]


def test_fuse_norm_quantize__on_a_cpu_a_sum_stays_in_its_layer(without_inductor: None) -> None:
    layers = nn.Sequential(*(Block([norms("llama")] * 2, [reader(WIDTH), reader(WIDTH)]) for _ in range(3))).eval()
    with torch.no_grad(), collect_records() as records:
        torch.compile(layers, backend="mmqc", fullgraph=True)(torch.randn(5, WIDTH))
    (found,) = [p for r in records for p in r.passes if p.name == "fuse_norm_quantize"]
    # Of six norms three have their sum in the same layer; the others, if there is one, in the layer in front.
    assert [site.count(",") for site in found.sites] == [1, 2, 1, 2, 1, 2]
