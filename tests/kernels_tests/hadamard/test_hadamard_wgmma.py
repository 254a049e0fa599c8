"""hadamard_wgmma.py without a device: how rows are cut, the order of its kernel's warps, its launches, its machine code."""

import offline
import pytest
import torch
import warp_simulator as simulator
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_close

kernel = pytest.importorskip("mmqc.kernels.hadamard.hadamard_wgmma")
tiles = pytest.importorskip("mmqc.kernels.hadamard.hadamard_wgmma_tiles")
from mmqc.kernels.hadamard.hadamard_plan import outer_factor  # noqa: E402
from mmqc.kernels.hadamard.hadamard_tiles import ASYMMETRIC, FLOAT, Written  # noqa: E402
from mmqc.kernels.shared.row_scale import row_scale  # noqa: E402
from mmqc.ops.hadamard import reference  # noqa: E402
from mmqc.ops.hadamard_matrix import hadamard_factors  # noqa: E402

WIDTHS = {8192: (64, 0), 10240: (64, 16), 12288: (64, 32), 14336: (128, 0), 18944: (128, 32), 24576: (128, 64)}
M = 600


@pytest.mark.parametrize("n", WIDTHS)
def test_plan__products_of_halves_are_the_transform(n):
    """Y = (A X) (H2 ⊗ H)ᵀ with A's entries halved and H a quarter of B, in float64."""
    p = kernel.matrices(n, torch.device("cpu"), torch.float64)
    t, outer, inner = p.tiling, p.outer, p.inner[:64, :64]
    x = torch.randn(3, n, dtype=torch.float64)
    left, right = (outer[: t.a, : t.a] @ x.view(3, t.a, 128)).chunk(2, -1)
    y = torch.cat([(left + right) @ inner.t(), (left - right) @ inner.t()], -1)
    assert_close(y.view(3, n) * 2 / (outer_factor(t) * n**0.5), reference(x, hadamard_factors(n)))
    assert_close(outer.bfloat16().double(), outer)


@pytest.mark.parametrize(("n", "cut"), WIDTHS.items())
def test_tiling__leaves_room_for_two_rows(n, cut):
    t = kernel.tiling(n)
    found = (t.A1, t.A2)
    assert found == cut
    assert t.R == 1
    for item_bytes in (1, 2):
        blocks, tile = -(-(t.A1 + t.A2) // 64), t.A1 + t.A2
        written = 2 * (3 - item_bytes) * 64 * 128 * item_bytes
        used = 2 * (blocks * 64 * tile + 64 * 64) + written + kernel.slots(t, item_bytes) * 2 * tile * 128
        assert 2 <= kernel.slots(t, item_bytes) <= 6
        assert used <= 231_424


@pytest.mark.parametrize("n", [0, 128, 3584, 4304, 8960, 11008, 27648, 32768])
def test_tiling__of_other_widths_is_none(n):
    """Narrow ones, those with fewer twos than 128, and those whose A has more than 192 rows."""
    assert kernel.tiling(n) is None


def assert_transformed(m: int, a: int, a1: int, a2: int, slots: int, programs: int, ends: bool) -> None:
    """That the kernel's result is A X (H2 ⊗ H)ᵀ of every row; with ``ends``, less what its first reading has found."""
    x, outer = torch.randint(-2, 3, (m, a, 8)).half(), torch.zeros(a1 + a2, a1 + a2).half()
    outer[:a, :a] = torch.randint(-2, 3, (a, a)).half()
    inner, y = torch.randint(-2, 3, (4, 4)).half(), torch.full((m, a, 8), float("nan"))
    blocks = {
        "x_desc": (1, a1, 8),
        "rest_desc": (1, max(a2, 1), 8),
        "y_desc": (1, 4, 8),
        "outer_desc": (4, a1),
        "outer_rest_desc": (4, max(a2, 1)),
        "inner_desc": (4, 4),
    }
    values = {"x_desc": x, "rest_desc": x, "y_desc": y, "inner_desc": inner}
    args = {name: simulator.Described(values.get(name, outer), block) for name, block in blocks.items()}
    args |= dict.fromkeys(("scale_ptr", "row_ptr"))
    args |= {name: simulator.Pointer(torch.zeros(m)) for name in ("token_ptr", "offset_ptr")}
    constants = dict(
        SCALE=1.0,
        A1=a1,
        A2=a2,
        COLUMNS=8,
        SLOTS=slots,
        PLACES=2,
        PROGRAMS=programs,
        REGISTERS=240,
        MODE=(ASYMMETRIC if ends else FLOAT).value,
        KIND=0,
        LOW=0,
        HIGH=0,
        PTX=False,
    )
    replaced = {
        "BLOCK": 4,
        "CONSUMERS": 2,
        "FLOAT": 0,
        "STATIC": 1,
        "widen_ends": lambda y, low, *_: (torch.minimum(low, y.amin(1)), low),
        "find_scale": lambda low, *_: (low.min(), None),
        "codes_of": lambda y, k, low, *_: y - low,
    }
    simulator.run(tiles.hadamard_wgmma_kernel, programs, args | {"M": m, "a": a}, constants, replaced)
    left, right = (outer[:a, :a].float() @ x.float()).chunk(2, -1)
    want = torch.cat([(left + right) @ inner.float().t(), (left - right) @ inner.float().t()], -1)
    least = want.amin((1, 2), keepdim=True).clamp(max=0) if a < a1 + a2 else want.amin((1, 2), keepdim=True)
    assert torch.equal(y, want - least if ends else want)


@settings(max_examples=30)
@given(
    st.integers(1, 40),
    st.sampled_from([(4, 0), (4, 2), (8, 0), (8, 2), (8, 4)]),
    st.integers(2, 6),
    st.integers(1, 3),
    st.booleans(),
)
def test_ring__every_size(m, cut, slots, programs, ends):
    a = sum(cut) - (cut[1] > 1)
    assert_transformed(m, a, *cut, slots, min(programs, m), ends)


def test_simulator__finds_barriers_that_consumers_share(monkeypatch):
    """By slots alone, of which there is an odd number, a consumer takes the phase of the other's row for its own."""
    several = simulator.Barriers.index
    monkeypatch.setattr(simulator, "PATIENCE", 2.0)
    monkeypatch.setattr(simulator.Barriers, "index", lambda self, i: several(self, i % 3 if len(self.each) == 6 else i))
    with pytest.raises((AssertionError, RuntimeError, TimeoutError)):
        assert_transformed(60, 9, 8, 2, 3, 1, False)


def made(n: int | str, what: str):
    """A launch; ``what`` is the kind of result."""
    x = torch.zeros(M, int(n), dtype=torch.bfloat16)
    y = torch.zeros(M, int(n), dtype=torch.bfloat16 if what == "float" else torch.int8)
    given = {
        "static": Written(y, row_scale(torch.ones(1), M)),
        "asymmetric": Written(y, None, torch.ones(M), torch.ones(M), 4),
    }
    return kernel.launch(x, given.get(what, Written(y)))


@pytest.mark.parametrize("what", ["static", "float", "asymmetric"])
@pytest.mark.parametrize("n", WIDTHS)
def test_launch__gives_the_kernel_its_arguments(n, what):
    launch = made(n, what)
    names = set(launch.kernel.arg_names)
    assert set(launch.args) | set(launch.constants) == names
    assert set(launch.outputs) <= set(launch.args)
    assert set(launch.descriptors) == {name for name in names if name.endswith("_desc")}
    for name, block in launch.descriptors.items():
        assert launch.args[name].dim() == len(block)
        assert all(size & (size - 1) == 0 and size <= 256 for size in block)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "what"), [(8192, "asymmetric"), (14336, "static"), (18944, "static"), (18944, "asymmetric"), (24576, "float")]
)
def test_kernel__compiles_to_products_that_queue_up(n, what):
    """Ptxas does not wait for each of them, hardly anything is spilled, and all of it fits the shared memory."""
    told, shared = offline.compiled("test_hadamard_wgmma", n, what)
    assert shared <= 232_448
    assert "serialized" not in told, told
    assert offline.spilled(told) < 128, told


def test_why_not__says_what_it_cannot_do():
    assert "Hopper" in kernel.why_not(torch.zeros(M, 8192, dtype=torch.bfloat16))
