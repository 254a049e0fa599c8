"""A rank's part of a linear, without vLLM; tests/vllm_tests/test_method.py has vLLM's own linears."""

import pytest
import torch
from tolerance import assert_close

import mmqc
from mmqc import recipes
from mmqc.checkpoint.module_spec import module_spec
from mmqc.nn.linear import HadamardLinear, QuantLinear
from mmqc.nn.modality import ModalityContext
from mmqc.solvers import Quantized
from mmqc.vllm.shard import Stored, build, layout, local_spec
from mmqc.vllm.specs import LINEARS, PluginError, joined
from mmqc.vllm.visual import VisualRows

K, N = 96, 48


def linear(seed=0, group=0, scale=0.03, outliers=None, **options):
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (N, K), generator=g, dtype=torch.int8)
    scales = torch.rand(N, K // group, generator=g) if group else torch.rand(N, generator=g)
    made = Quantized(codes, scales, group_size=group)
    parts = {"input_scale": torch.tensor([scale]), "activation_bits": 8, "outliers": outliers, **options}
    return QuantLinear.from_parts(made, weight_bits=4, **parts)


def spec_of(module):
    spec = module_spec(module)
    assert spec is not None
    return spec


def cut(module, rank, ranks):
    """Its tensors on a rank that splits inputs."""
    stored = layout("x", spec_of(module), [N], ranks)
    return {own: stored[own].columns(tensor, rank, ranks) for own, tensor in module.state_dict().items()}


def inputs(rows=5):
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("same", [True, False])
def test_parts__with_input_scales_of_their_own_are_multiplied_apart(same):
    parts = [linear(0), linear(1, scale=0.03 if same else 0.05), linear(2, scale=0.03 if same else 0.05)]
    spec = joined("qkv", [spec_of(p) for p in parts])
    tensors = {own: torch.cat([p.get_buffer(own) for p in parts]) for own in ("qweight", "weight_scale")}
    tensors["input_scale"] = torch.stack([p.get_buffer("input_scale") for p in parts])
    shard = build("qkv", spec, tensors, [N] * 3)
    assert len(shard.linears) == (1 if same else 2)
    x = inputs()
    assert torch.equal(shard(x), torch.cat([p(x) for p in parts], -1))


@pytest.mark.parametrize("group", [0, 24])
def test_ranks__add_up_to_the_linear(group):
    """In float64 the sums over ranks are those of the whole but for their order."""
    module, x = linear(group=group), inputs().double()
    ranks = [build("x", spec_of(module), cut(module, r, 2), [N], rank=r, ranks=2) for r in range(2)]
    total = sum(shard(part) for shard, part in zip(ranks, x.chunk(2, -1), strict=True))
    assert_close(total, module(x))


@pytest.mark.parametrize("hadamard", [True, 3, 4])
def test_ranks__behind_a_hadamard_read_their_channels_of_the_whole_transform(hadamard):
    """Which is gathered first, unless its blocks are each in one rank's channels."""
    module, x = linear(hadamard=hadamard), inputs().double()
    module.double()

    def gather(part):
        del part
        return x

    apart = None if hadamard == 4 else gather
    ranks = [build("x", spec_of(module), cut(module, r, 2), [N], rank=r, ranks=2, gather=apart) for r in range(2)]
    for shard in ranks:
        shard.double()
    total = sum(shard(part) for shard, part in zip(ranks, x.chunk(2, -1), strict=True))
    assert_close(total, module(x))


@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_ranks__of_a_float_linear_behind_blocks_have_blocks_of_their_own(blocks):
    torch.manual_seed(0)
    module, x = HadamardLinear.from_parts(torch.randn(N, K).double(), None, blocks), inputs().double()
    gather = None if blocks % 2 == 0 else lambda part: x
    ranks = [build("x", spec_of(module), cut(module, r, 2), [N], rank=r, ranks=2, gather=gather) for r in range(2)]
    assert_close(sum(shard.double()(part) for shard, part in zip(ranks, x.chunk(2, -1), strict=True)), module(x))


def test_ranks__keep_the_outliers_of_their_channels():
    kept = (torch.tensor([3, 50, 60]), torch.randn(N, 3))
    module, x = linear(outliers=kept).double(), inputs().double()
    ranks = [build("x", spec_of(module), cut(module, r, 2), [N], rank=r, ranks=2).double() for r in range(2)]
    assert [shard.linears[0].outlier_index.tolist() for shard in ranks] == [[3], [2, 12]]
    total = sum(shard(part) for shard, part in zip(ranks, x.chunk(2, -1), strict=True))
    assert_close(total, module(x))


def test_modality__comes_from_the_buffer_that_is_given():
    module, context = linear(), ModalityContext((4,))
    module.input_scale = torch.tensor([0.02, 0.05])
    module.modality = context
    visual = torch.tensor([True, False, False, True, False])

    class Rows:
        def rows(self, x):
            return visual[: len(x)]

    shard = build("x", spec_of(module), module.state_dict(), [N], visual=Rows())
    with context.during(visual):
        assert torch.equal(shard(inputs()), module(inputs()))


def test_codes__of_a_rank_are_unpacked_cut_and_packed_again():
    stored = Stored((1, 2), torch.uint8, width=4, bits=4)
    whole = linear().qweight[:1, :4]  # eight channels, a stretch of four apart
    low, high = whole & 15, whole >> 4
    assert torch.equal(stored.columns(whole, 0, 2), low[:, :2] | low[:, 2:] << 4)
    assert torch.equal(stored.columns(whole, 1, 2), high[:, :2] | high[:, 2:] << 4)


@pytest.mark.parametrize(("group", "ranks", "words"), [(24, 3, "in groups of 24"), (0, 5, "over 5 ranks")])
def test_split__that_cuts_a_group_or_a_channel_is_refused(group, ranks, words):
    with pytest.raises(PluginError, match=rf"down: 96 channels.*{words}"):
        local_spec("down", spec_of(linear(group=group)), N, ranks)


RECIPES = {
    "mquant": recipes.mquant(4, solver="rtn"),
    "resq": recipes.resq(4, kv_bits=None, solver="rtn"),
    "integer scales": recipes.integer_scale(group_size=64),
    "by token": recipes.rtn(8, activation_bits=8).with_token_scales(),
    "float8": recipes.rtn(8, activation_bits=8).with_float8(),
    "weights": recipes.rtn(3),
    "Hadamards": recipes.rotate(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_graph__of_a_rank_is_one_for_every_number_of_rows(name):
    """vLLM traces a decoder without a break, its rows a symbol."""
    sample, rows = mmqc.samples.load("digits-vqa"), VisualRows(16, (4,))
    mmqc.quantize_(sample.model, RECIPES[name], sample.calibration(1), progress=False)
    rows.note(rows, (torch.tensor([4, 1] * 8),), {})
    found = {str(spec_of(m)): (spec_of(m), m) for m in sample.model.modules() if (module_spec(m) or {}).get("kind") in LINEARS}
    for spec, module in found.values():
        tensors = {own: t for own, t in module.state_dict().items() if own != "bias"}
        shard = build("x", spec, tensors, [module.out_features], bias=module.bias, visual=rows)
        torch._dynamo.reset()
        compiled = torch.compile(shard, backend="aot_eager", fullgraph=True, dynamic=True)
        with torch.no_grad():
            for n in (5, 7, 16):
                x = torch.randn(n, module.in_features)
                assert torch.equal(compiled(x), shard(x))
    assert len(found) > 1
