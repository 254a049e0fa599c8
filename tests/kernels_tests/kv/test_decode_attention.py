"""The decode attention kernel against the op's reference, in float64; outside of a mask's span is NaN, and in unwritten memory."""

import device_facts
import offline
import pytest
import torch
from tolerance import assert_close

from mmqc.kernels.shared.plan import Refusal
from mmqc.ops import decode_attention as op

kernel = pytest.importorskip("mmqc.kernels.kv.decode_attention")
pytestmark = pytest.mark.usefixtures("nan_memory")


def outside(mask):
    """What lies in front of the first token that a mask shows, or behind the last."""
    return (mask.cumsum(-1) == 0) | (mask.flip(-1).cumsum(-1).flip(-1) == 0)


FEW = kernel.Config(per_sm=1, tokens=16)


def operands(batch, heads, rows, tokens, width, dtype, device, *, masks=0):
    """``masks``: none, one for the batch, or one for each sequence."""
    g = torch.Generator().manual_seed(hash((batch, heads, rows, tokens, width, masks)) % 2**31)
    q = torch.randn(batch, heads, rows, width, generator=g)
    k, v = (torch.randn(batch, heads, tokens, width, generator=g) for _ in range(2))
    mask = None
    if masks:
        mask = torch.rand(masks, 1, 1, tokens, generator=g) < 0.6
        hidden = outside(mask).transpose(2, 3)
        k, v = k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan)
        mask = mask.to(device)
    return *(x.to(device, dtype) for x in (q, k, v)), mask, width**-0.5


def assert_like_op(given, config=FEW):
    y = kernel.decode_attention(*given, config=config)
    want = op.reference(*(x.double() for x in given[:3]), *given[3:])
    assert y.dtype == given[0].dtype
    assert_close(y, want, given[0].dtype)


@pytest.mark.parametrize("width", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("rows", [1, 4, 7, 16, 33])
def test_decode_attention__rows_and_widths(rows, width, device):
    assert_like_op(operands(2, 2, rows, 67, width, torch.float16, device, masks=2))


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 129, 515])
@pytest.mark.parametrize("masks", [0, 1, 3])
def test_decode_attention__one_to_hundreds_of_tokens(tokens, masks, device):
    for config in (kernel.FEW, kernel.SMALL, kernel.WHOLE, kernel.HALF, FEW, FEW._replace(by_number=True)):
        assert_like_op(operands(3, 2, 7, tokens, 32, torch.float16, device, masks=masks), config)


@pytest.mark.parametrize("tokens", [40, 700])
def test_decode_attention__nothing_seen_is_zeros(tokens, device):
    q, k, v, _, scale = operands(1, 2, 3, tokens, 32, torch.float16, device)
    mask = torch.zeros(1, 1, 1, tokens, dtype=torch.bool, device=device)
    y = kernel.decode_attention(q, torch.full_like(k, torch.nan), v, mask, scale, config=FEW)
    assert y.eq(0).all()


def test_decode_attention__one_stretch_seen(device):
    """Whole parts that see nothing, in front of and behind those that do."""
    given = operands(1, 2, 7, 700, 64, torch.float16, device)
    mask = torch.zeros(1, 1, 1, 700, dtype=torch.bool, device=device)
    mask[..., 333:340] = True
    hidden = outside(mask).transpose(2, 3)
    assert_like_op((given[0], *(x.masked_fill(hidden, torch.nan) for x in given[1:3]), mask, given[4]))


@pytest.mark.parametrize("tokens", [15, 250, 256, 257, 290])
def test_decode_attention__a_tile_for_each_program_or_some(tokens, device):
    """A tile that is all of a program's is read as it is, hidden tokens too; with more of them than are added at once, not."""
    q, k, v, _, scale = operands(1, 2, 5, tokens, 48, torch.float16, device)
    mask = torch.arange(tokens, device=device).sub(tokens // 3).remainder(tokens) < tokens // 2
    hidden = ~mask[:, None]
    given = (q, *(x.masked_fill(hidden, torch.nan) for x in (k, v)), mask[None, None, None], scale)
    want = op.reference(*(x.masked_fill(hidden, 0).double() if x is not q else q.double() for x in (q, k, v)), *given[3:])
    for per_sm in (1, 64):
        y = kernel.decode_attention(*given, config=kernel.Config(per_sm=per_sm, tokens=16))
        assert_close(y, want, torch.float16)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("holes", [False, True])
def test_decode_attention__any_number_of_parts_with_and_without_holes(parts, holes, device):
    q, k, v, _, scale = operands(1, 1, 5, 16 * parts + 40, 48, torch.float16, device)
    mask = torch.zeros(1, 1, 1, k.shape[2], dtype=torch.bool, device=device)
    mask[..., 16 : 16 * parts + 16] = True
    mask[..., 24] = not holes
    k, v = (x.masked_fill(outside(mask).transpose(2, 3), torch.nan) for x in (k, v))
    for by_number in (False, True):
        assert_like_op((q, k, v, mask, scale), kernel.Config(per_sm=16, tokens=16, by_number=by_number))


@pytest.mark.parametrize(("architecture", "width", "whole", "half"), [
    (90, 128, True, True), (90, 64, True, True), (90, 256, False, False), (80, 128, True, True), (86, 128, False, False),
    (86, 64, True, True),
])  # fmt: skip
def test_decode_attention__the_heads_and_the_shared_memory_choose_the_tiles(architecture, width, whole, half):
    with device_facts.pretending(architecture, multiprocessors=lambda _: 132):
        heads = (1, 16, 17, 32, 33, 132, 133, 264, 265, 9999)
        found = [kernel.config_of(n, torch.device("cuda"), 7, width) for n in heads]
    assert found[:4] == [kernel.FEW] * 2 + [kernel.SMALL] * 2
    assert found[4:6] == [kernel.WHOLE if whole else kernel.HALF if half else kernel.SMALL] * 2
    assert found[6:8] == [kernel.HALF if half else kernel.SMALL] * 2
    assert found[8:] == [kernel.SMALL] * 2


def test_decode_attention__a_small_device_has_no_tiles_for_few_heads_that_are_many_there():
    with device_facts.pretending(90, multiprocessors=lambda _: 20):
        assert [last for _, last in kernel.configs(torch.device("cuda"), 7, 128)] == [16, 32, 40, None]


def test_decode_attention__large_scores(device):
    q, k, v, mask, scale = operands(1, 1, 4, 300, 64, torch.float16, device, masks=1)
    assert_like_op((q * 40, k, v, mask, scale))


def test_decode_attention__counters_are_left_at_zero(device):
    given = operands(2, 2, 7, 515, 32, torch.float16, device, masks=2)
    first = kernel.decode_attention(*given, config=FEW)
    assert torch.equal(kernel.decode_attention(*given, config=FEW), first)


def test_decode_attention__refuses_what_it_has_no_tiles_for(device):
    q, k, v, mask, scale = operands(1, 1, 65, 20, 32, torch.float16, device, masks=1)
    assert isinstance(kernel.decode_attention(q, k, v, mask, scale), Refusal)
    q, k, v, mask, scale = operands(1, 1, 1, 20, 288, torch.float16, device, masks=1)
    assert isinstance(kernel.decode_attention(q, k, v, mask, scale), Refusal)


def test_decode_attention__no_tokens_and_no_batch(device):
    assert kernel.decode_attention(*operands(2, 1, 3, 0, 32, torch.float16, device)).eq(0).all()
    assert kernel.decode_attention(*operands(0, 1, 3, 5, 32, torch.float16, device)).shape == (0, 1, 3, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 5, 64])
@pytest.mark.parametrize("tokens", [300, 2048])
def test_decode_attention__heads_of_real_models(batch, tokens, device):
    for heads, rows, width in ((4, 7, 128), (32, 1, 128), (8, 4, 80)):
        given = operands(batch, heads, rows, tokens, width, torch.bfloat16, device, masks=batch)
        assert_like_op(given, None)
        assert torch.equal(kernel.decode_attention(*given), kernel.decode_attention(*given))


def made(architecture, rows, width, heads):
    """A launch on another device, for offline.py."""
    q, k = torch.empty(1, int(heads), int(rows), int(width), dtype=torch.bfloat16), torch.empty(1, 1, 1, 1, dtype=torch.bfloat16)
    part, counter = torch.empty(1), torch.empty(1, dtype=torch.int32)
    with device_facts.pretending(int(architecture), multiprocessors=lambda _: 132):
        config = kernel.config_of(int(heads), q.device, int(rows), int(width))
        return kernel.launch(
            q, k, k, None, q, part, counter, 0.1, heads=(1, int(heads)), tokens=1000, most=4, programs=264, config=config
        )


@pytest.mark.parametrize("heads", [pytest.param(4, marks=pytest.mark.slow), 64, pytest.param(256, marks=pytest.mark.slow), 512])
@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), kernel.MOST_ROWS])
@pytest.mark.parametrize("architecture", device_facts.SHARED)
def test_launch__fits_the_shared_memory_of_every_device(architecture, rows, width, heads):
    found = offline.shared_memory(architecture, "test_decode_attention", architecture, rows, width, heads)
    assert found <= device_facts.SHARED[architecture]


def test_launch__keeps_its_stages_where_they_fit():
    assert made(90, 7, 128, 512).num_stages == made(86, 7, 128, 512).num_stages == kernel.SMALL.stages
    assert made(90, 64, 256, 4).num_stages == kernel.FEW.stages > made(86, 64, 256, 4).num_stages >= 1
