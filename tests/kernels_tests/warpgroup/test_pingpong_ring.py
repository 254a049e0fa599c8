"""The order of copies, products and results in warp-specialised kernels, with every warp role in a thread of its own.

Tiles of 64 rows and steps of 8 columns: what is tested is who waits for whom.
"""

import pytest
import torch
import warp_simulator as simulator
from hypothesis import example, given, settings
from hypothesis import strategies as st

pingpong = pytest.importorskip("mmqc.kernels.warpgroup.pingpong_matmul")
tiles = pytest.importorskip("mmqc.kernels.warpgroup.pingpong_tiles")
gated_tiles = pytest.importorskip("mmqc.kernels.warpgroup.pingpong_gated_tiles")
mixed_tiles = pytest.importorskip("mmqc.kernels.warpgroup.pingpong_mixed_tiles")
packed_tiles = pytest.importorskip("mmqc.kernels.warpgroup.packed_tiles")
byte_tiles = pytest.importorskip("mmqc.kernels.warpgroup.byte_tiles")
STEP, COLUMNS = 8, 16  # of a tile


def cut(m: int, n: int, steps: int, programs: int, block_m: int, parts: int, block_n: int = COLUMNS) -> int:
    """The parts of a tile of the last round: as many as asked for where each has a program and a step, else one."""
    rest = -(-m // block_m) * -(-n // block_n) % programs
    fits = rest * parts <= programs and (parts - 1) * -(-steps // parts) < steps
    return parts if rest and fits else 1


def run(
    kernel,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    block_m: int,
    programs: int,
    parts: int,
    sizes: dict,
    constants: dict,
    tile: dict,
    block_n: int = COLUMNS,
    shares: int = 1,
    sums: torch.dtype = torch.int32,
    added: bool = False,
) -> torch.Tensor:
    """What the kernel makes of x and the linears' w by the tile code ``tile``; its counters, and sums added up, are zero again."""
    m, three = len(x), [*weights, *weights[-1:] * 2][:3]
    ys = [torch.full((m, len(w)), float("nan")) for w in weights]
    count = -(-m // block_m) * sum(-(-len(w) // block_n) for w in weights)
    rest = count % programs
    counters = torch.zeros(max(rest, 1), dtype=torch.int32)
    partial = torch.full((max(1, parts * rest * block_m * block_n),), 0 if added else 12345, dtype=sums)
    args = dict.fromkeys(name for name in kernel.arg_names if name.endswith("_ptr")) | dict(
        x_desc=simulator.Described(x, (block_m, STEP)),
        part_ptr=simulator.Pointer(partial),
        counter_ptr=simulator.Pointer(counters),
        M=m,
    )
    for w, y, i in zip(three, [*ys, *ys[-1:] * 2], ("", "1", "2"), strict=False):
        args |= {f"w{i}_desc": simulator.Described(w, (block_n, STEP)), f"N{i}": len(w)}
        args[f"y{i}_desc"] = simulator.Described(y, (block_m // shares, block_n))
    args = {name: value for name, value in args.items() if name in kernel.arg_names}
    shared = dict(HAS_BIAS=False, BLOCK_M=block_m, BLOCK_N=block_n, GROUP_M=2, PROGRAMS=programs, PARTS=parts)
    grid = programs if count >= programs else rest * parts
    simulator.run(kernel, grid, args | sizes, shared | constants, tile)
    assert not counters.any()
    assert not added or not partial.any()
    return torch.cat(ys, 1)


def assert_product(m: int, n: int, k: int, programs: int, stages: int, warps: int, parts: int) -> None:
    """That the kernel's result is x wᵀ."""
    x, w = (torch.randint(-8, 8, (rows, k), dtype=torch.int8) for rows in (m, n))
    constants = dict(
        KIND=0,
        ACTIVATION=0,
        NEXT=False,
        NEXT_KIND=0,
        ROUND=0,
        LOW=0,
        HIGH=0,
        PTX=False,
        RANK=0,
        STAGES=stages,
        WARPS=warps,
        CONSUMERS=8 // warps,
        BLOCK_K=STEP,
        REGISTERS=240,
    )
    tile = {"finish_scaled_tile": lambda acc, *_: acc, "row_scale_tile": lambda *_: None}
    y = run(tiles.scaled_pingpong_kernel, x, [w], 16 * warps, programs, parts, {"K": k}, constants, tile)
    assert torch.equal(y, x.float() @ w.float().t())


every_size = given(
    m=st.integers(1, 200),
    n=st.integers(1, 70),
    k=st.integers(1, 90),
    programs=st.integers(1, 3),
    stages=st.integers(2, 5),
    warps=st.sampled_from([4, 8]),
    parts=st.sampled_from([1, 2, 4]),
)


@settings(max_examples=25)
@every_size
def test_ring__every_size(m, n, k, programs, stages, warps, parts):
    assert_product(m, n, k, programs, stages, warps, cut(m, n, -(-k // STEP), programs, 16 * warps, parts))


@settings(max_examples=15)
@every_size
def test_ring__gate_and_up_of_every_size(m, n, k, programs, stages, warps, parts):
    x, gate, up = (torch.randint(-8, 8, (rows, k), dtype=torch.int8) for rows in (m, n, n))
    block_m = 16 * warps
    parts = cut(m, n, -(-k // STEP), programs, block_m, parts)
    partial = torch.full((parts * programs * block_m * 2 * COLUMNS,), 12345, dtype=torch.int32)
    sizes = {"K": k, "w1_desc": simulator.Described(up, (COLUMNS, STEP)), "part_ptr": simulator.Pointer(partial)}
    constants = dict(KIND=0, ACTIVATION=0, NEXT=False, NEXT_KIND=0, ROUND=0, LOW=0, HIGH=0, PTX=False, BLOCK_N=2 * COLUMNS,
                     BLOCK_K=STEP, STAGES=stages, WARPS=warps, CONSUMERS=8 // warps, REGISTERS=240)  # fmt: skip
    tile = {"scale_tile": lambda acc, *_: acc, "finish_gated_tile": lambda g, u, *_: g - 3 * u, "row_scale_tile": lambda *_: None}
    y = run(gated_tiles.gated_pingpong_kernel, x, [gate], block_m, programs, parts, sizes, constants, tile)
    assert torch.equal(y, x.float() @ gate.float().t() - 3 * x.float() @ up.float().t())


@pytest.mark.parametrize(
    ("m", "n", "k", "programs", "stages", "parts"),
    [
        (64, 16, 8, 4, 2, 1),  # one tile of one step
        (64, 16, 80, 4, 3, 4),  # a cut round alone
        (192, 48, 88, 4, 3, 4),  # rounds, and one tile in four parts, the last one shorter
        (128, 96, 200, 5, 2, 2),  # more steps than slots, the cut tiles those of the second consumer
        (320, 32, 64, 2, 5, 1),
    ],  # many rounds
)
def test_ring__rounds_and_parts(m, n, k, programs, stages, parts):
    assert_product(m, n, k, programs, stages, 4, parts)


def assert_mixed(m: int, n: int, low: int, high: int, programs: int, stages: int, parts: int) -> None:
    """That the kernel's result is 3 x_l w_lᵀ + x_h w_hᵀ, where a change of units multiplies by 3."""
    start = -(-low // STEP) * STEP
    x, w = (torch.randint(-8, 8, (rows, low + high), dtype=torch.int8) for rows in (m, n))
    joined = torch.zeros(n, start + high, dtype=torch.int8)
    joined[:, :low], joined[:, start:] = w[:, :low], w[:, low:]
    constants = dict(STAGES=stages, WARPS=4, CONSUMERS=2, BLOCK_K=STEP, REGISTERS=240)
    tile = {"finish_columns_tile": lambda acc, *_: acc, "change_units_tile": lambda acc, *_: 3 * acc}
    sizes = {"LOW": low, "START": start, "END": start + high}
    y = run(mixed_tiles.mixed_pingpong_kernel, x, [joined], 64, programs, parts, sizes, constants, tile)
    wide = [t.float() for t in (x[:, :low], w[:, :low].t(), x[:, low:], w[:, low:].t())]
    assert torch.equal(y, 3 * (wide[0] @ wide[1]) + wide[2] @ wide[3])


@settings(max_examples=25)
@given(
    st.integers(1, 200),
    st.integers(1, 70),
    st.integers(1, 90),
    st.integers(1, 20),
    st.integers(1, 3),
    st.integers(2, 5),
    st.sampled_from([1, 2, 4]),
)
def test_mixed_ring__every_size(m, n, low, high, programs, stages, parts):
    steps = -(-low // STEP) + -(-high // STEP)
    assert_mixed(m, n, low, high, programs, stages, cut(m, n, steps, programs, 64, parts))


@pytest.mark.parametrize(
    ("m", "n", "low", "high", "programs", "stages", "parts"),
    [
        (64, 16, 8, 8, 4, 2, 1),  # one tile, halves of no step and of one
        (64, 16, 70, 10, 4, 3, 4),  # a cut round alone: parts without a high step, and without a low one
        (192, 48, 88, 16, 4, 3, 4),  # rounds, and one tile in four parts
        (128, 96, 200, 24, 5, 2, 2),  # more steps than slots, the cut tiles those of the second consumer
        (320, 32, 64, 8, 2, 5, 1),  # many rounds, as many for one consumer as for the other
        (320, 48, 64, 8, 3, 5, 1),
    ],  # one tile more for the first
)
def test_mixed_ring__rounds_and_parts(m, n, low, high, programs, stages, parts):
    assert_mixed(m, n, low, high, programs, stages, parts)


def unpack(packed, _ptx):
    """16 (u - 8) of both halves of a byte, as int4_as_int8."""
    wide = packed.to(torch.int32)
    return ((wide & 15) - 8) * 16, ((wide >> 4) - 8) * 16


def scales_at(first: int, count: int) -> torch.Tensor:
    """A scale of each of the rows, or columns, from ``first`` on."""
    return (1 + (int(first) + torch.arange(count)) % 5).float()


def fetch_scales(*args):
    """Of the tile at row, col."""
    row, col, block_m, block_n = args[4], args[5], *args[-2:]
    return scales_at(row, block_m), scales_at(col, block_n), None


PACKED_TILE = {  # in the place of the kernels' own pieces
    "BEHIND": 2,
    "int4_as_int8": unpack,
    "bytes_as_codes": lambda w: w.view(torch.int8),
    "fetch_scales": fetch_scales,
    "keep_units": lambda *_: None,
    "scale_sums": lambda acc, s_x, s_w, _: acc / 16 * s_x[:, None] * s_w[None, :],
    "finish_tile": lambda y, *_: y,
    "change_kept_units": lambda acc, *_: (3 * acc // 16).as_subclass(simulator.Values),
    "finish_kept_tile": lambda acc, *_: acc,
}


def assert_packed(
    m: int,
    n: int,
    stored: int,
    high: int,
    programs: int,
    parts: int,
    shares: int,
    slots: int = 4,
    more_rows: tuple[int, ...] = (),
    added: bool = False,
) -> None:
    """That the kernel's result is x wᵀ of w with 2 ``stored`` columns; with ``high`` others, 3 times that and theirs.

    ``more_rows``: of other linears of the launch.
    """
    rows, n = (n, *more_rows), n + sum(more_rows)
    low = 2 * stored
    x = torch.randint(-8, 8, (m, low + high), dtype=torch.int8)
    codes, more = torch.randint(-8, 8, (n, low)), torch.randint(-8, 8, (n, high), dtype=torch.int8)
    packed = (codes[:, :stored] + 8 + (codes[:, stored:] + 8) * 16).to(torch.uint8)
    sizes = {"STORED": stored, "upper_desc": simulator.Described(x[:, stored:low], (16, STEP))}
    constants = {"SHARES": shares, "SLOTS": slots, "BLOCK_K": STEP}
    if high:
        sizes |= {
            "high_x_desc": simulator.Described(x[:, low:], (16, STEP)),
            "high_desc": simulator.Described(more.view(torch.uint8), (64, STEP)),
            "HIGH": high,
        }
        kernel = packed_tiles.packed_mixed_kernel
    else:
        sizes |= {"stride_w": 0}
        constants |= {"LINEARS": len(rows), "LINES": 0, "ADDED": added}
        constants |= dict(KIND=0, ACTIVATION=0, NEXT=False, NEXT_KIND=0, ROUND=0, LOW=0, HIGH=0, PTX=False, RANK=0)
        kernel = packed_tiles.packed_scaled_kernel
    given, added = (x[:, :stored], list(packed.split(rows)), 16, programs, parts, sizes, constants), added and not high
    y = run(kernel, *given, PACKED_TILE, 64, shares, added=added)
    want = x[:, :low].float() @ codes.float().t()
    scaled = want * scales_at(0, m)[:, None] * torch.cat([scales_at(0, each) for each in rows])[None, :]
    assert torch.equal(y, 3 * want + x[:, low:].float() @ more.float().t() if high else scaled)


def full_parts(parts: int, steps: int, ahead: int) -> int:
    """As many parts, if each has the steps that are copied ahead, for those are in the next item at most; else one."""
    return parts if steps - (parts - 1) * -(-steps // parts) >= ahead else 1


@settings(max_examples=40)
@example(1, 1, 9, 0, 2, 2, 1, 3, [], True)
@given(
    st.integers(1, 50),
    st.integers(1, 200),
    st.integers(1, 90),
    st.integers(0, 30),
    st.integers(1, 8),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.integers(3, 9),
    st.lists(st.integers(1, 100), max_size=2),
    st.booleans(),
)
def test_packed_ring__every_size(m, n, stored, high, programs, parts, shares, slots, more, added):
    ahead = slots - 2
    steps = max(-(-stored // STEP) + -(-high // STEP), ahead)
    parts = full_parts(parts, steps, ahead)
    more = () if high else tuple(more)
    width = 64 * sum(-(-rows // 64) for rows in (n, *more))
    assert_packed(m, n, stored, high, programs, cut(m, width, steps, programs, 16, parts, 64), shares, slots, more, added)


@settings(max_examples=30)
@given(
    st.integers(1, 50),
    st.integers(1, 300),
    st.integers(1, 90),
    st.integers(1, 8),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([4, 8]),
    st.integers(3, 9),
)
def test_byte_ring__every_size(m, n, k, programs, parts, shares, warps, slots):
    block_n, steps = 16 * warps, max(-(-k // STEP), slots - 2)
    parts = cut(m, n, steps, programs, 16, full_parts(parts, steps, slots - 2), block_n)
    x, w = torch.randint(-8, 8, (m, k)).bfloat16(), torch.randint(-8, 8, (n, k), dtype=torch.int8)
    scale = simulator.Pointer(torch.ones(n + block_n))
    constants = {"SHARES": shares, "SLOTS": slots, "BLOCK_K": STEP, "WARPS": warps}
    tile = {"BEHIND": 2, "widen": lambda w, *_: w.bfloat16(), "units": lambda *_: 1.0}
    sizes = {"K": k, "w_scale_ptr": scale}
    y = run(byte_tiles.byte_kernel, x, [w], 16, programs, parts, sizes, constants, tile, block_n, shares, torch.float32)
    assert torch.equal(y, x.float() @ w.float().t())


def test_simulator__finds_a_consumer_that_does_not_wait_for_its_turn(monkeypatch):
    """A parity that is two phases ahead looks like one that is done."""
    wait, turns = simulator.REPLACED["mbarrier"].wait, []

    class Remembered(simulator.Barriers):
        def __init__(self, count):
            super().__init__(count)
            turns.extend(self.each if count == 2 else [])

    monkeypatch.setattr(simulator, "PATIENCE", 2.0)
    monkeypatch.setattr(simulator, "Barriers", Remembered)
    monkeypatch.setattr(simulator.REPLACED["mbarrier"], "wait", lambda b, phase: None if b in turns else wait(b, phase))
    with pytest.raises((AssertionError, RuntimeError, TimeoutError)):
        assert_product(256, 96, 120, 1, 3, 4, 1)


@pytest.mark.parametrize(
    ("kernel", "size"), [(assert_product, (256, 96, 120, 1, 2, 4, 1)), (assert_packed, (50, 200, 90, 0, 1, 1, 1))]
)
def test_simulator__finds_a_slot_that_is_given_back_too_soon(kernel, size, monkeypatch):
    """With one step more under way than the kernel believes, its operands are overwritten."""
    wait = simulator.warpgroup_mma_wait
    late = lambda left, deps: wait(left + 1 if left else 0, deps)  # noqa: E731
    monkeypatch.setitem(simulator.REPLACED, "warpgroup_mma_wait", late)
    with pytest.raises(AssertionError):
        kernel(*size)
