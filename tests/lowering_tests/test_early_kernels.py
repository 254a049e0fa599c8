import pytest

from mmqc.lowering.early_kernels import early, launched_early

HEAD = """
import triton
@triton_heuristics.pointwise(
    size_hints={'x': 4},
    filename=__file__,
    triton_meta={%s'signature': {'in_ptr0': '*fp32'}, 'device': 1},
    inductor_meta={'kernel_name': 'KERNEL'},
)
"""
BODY = """@triton.jit
def KERNEL(in_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 4
    tl.store(in_ptr0, 1)
"""
HELPER = """@triton.jit
def helper(a, b):
    return a + b

"""
WAIT = "    tl.extra.cuda.gdc_wait()\n    tl.extra.cuda.gdc_launch_dependents()\n"


@pytest.mark.parametrize("helper", ["", HELPER])
@pytest.mark.parametrize("option", ["", "'launch_pdl': False, "])
def test_early__the_kernel_waits_before_anything_else(helper: str, option: str) -> None:
    source = helper + HEAD % option + BODY
    changed = early(source)
    assert changed == helper + HEAD % "'launch_pdl': True, " + BODY.replace("    xnumel", f"{WAIT}    xnumel")
    assert early(changed) == changed


def test_early__a_source_without_options_or_without_a_kernel_stays() -> None:
    assert early(BODY) == BODY
    assert early(HEAD % "") == HEAD % ""


def test_early__who_waits_already_is_launched_early_alone() -> None:
    source = HEAD % "" + BODY.replace("    xnumel", f"{WAIT}    xnumel")
    assert early(source) == source
    assert launched_early(source) == source.replace("triton_meta={", "triton_meta={'launch_pdl': True, ")
