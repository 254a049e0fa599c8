"""Which modules are x Wᵀ + b: read by class, or proved by a recording; the others say why not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from mmqc.checkpoint.linear_like import NotLinearError, looks_linear, read_linear

K, N = 6, 6  # square: no shape tells a weight from its transpose


class Own(nn.Linear):
    """A subclass with a forward of its own."""

    def __init__(self, compute: Callable[[nn.Linear, Tensor], Tensor], bias: bool = True) -> None:
        super().__init__(K, N, bias)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


class Plain(nn.Linear):
    """A subclass that changes nothing."""


def normed(module: nn.Module) -> nn.Module:
    return weight_norm(module)


LINEARS: dict[str, Callable[[], nn.Module]] = {
    "nn.Linear": lambda: nn.Linear(K, N),
    "subclass": lambda: Plain(K, N, bias=False),
    "Conv1D": lambda: Conv1D(N, K),
    "FalconLinear": lambda: FalconLinear(K, N),
    "FalconLinear without bias": lambda: FalconLinear(K, N, bias=False),
    "keywords": lambda: Own(lambda m, x: F.linear(input=x, weight=m.weight, bias=m.bias)),
    "turned twice": lambda: Own(lambda m, x: x @ m.weight.T.mT + m.bias),
    "flattened": lambda: Own(lambda m, x: F.linear(x.reshape(-1, K), m.weight).view(*x.shape[:-1], N) + m.bias),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(K, N), "weight", 0.5),
    "pruned bias": lambda: prune.random_unstructured(nn.Linear(K, N), "bias", 0.5),
    "weight norm, old": lambda: normed(nn.Linear(K, N)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(K, N)),
    "spectral norm, old": lambda: spectral_norm(nn.Linear(K, N)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(K, N)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(K, N)),
}


@pytest.mark.parametrize("kind", LINEARS)
def test_linear_like__reads_what_the_module_computes(kind: str) -> None:
    torch.manual_seed(0)
    module = LINEARS[kind]().train()
    state = {n: t.clone() for n, t in module.state_dict().items()}
    assert looks_linear(module)
    read = read_linear(module)
    assert module.training
    assert all(torch.equal(t, state[n]) for n, t in module.state_dict().items())
    x = torch.randn(2, 3, K)
    torch.testing.assert_close(F.linear(x, read.weight, read.bias), module.eval()(x))
    assert read.transposed == (kind in ("Conv1D", "turned twice"))


@pytest.mark.parametrize("kind", ["Conv1D", "FalconLinear", "turned twice"])
def test_linear_like__a_square_weight_on_the_meta_device_has_its_orientation(kind: str) -> None:
    assert read_linear(LINEARS[kind]().to("meta")).transposed == (kind != "FalconLinear")


def test_linear_like__a_stale_pruned_weight_is_computed_anew() -> None:
    module = prune.l1_unstructured(nn.Linear(K, N), "weight", 0.5)
    with torch.no_grad():
        module.weight_orig.mul_(2)
    assert torch.equal(read_linear(module).weight, module.weight_orig * module.weight_mask)


def hooked(register: str) -> nn.Linear:
    module = nn.Linear(K, N)
    getattr(module, register)(lambda *args: None)
    return module


def with_attribute(name: str, value: object, base: Callable[[], nn.Module] = lambda: nn.Linear(K, N)) -> nn.Module:
    module = base()
    setattr(module, name, value)
    return module


class Called(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().__call__(x) * 2


class CalledInside(nn.Linear):
    def _call_impl(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super()._call_impl(x) * 2


OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "residual": (lambda: Own(lambda m, x: F.linear(x, m.weight, m.bias) + x), "does more than x W"),
    "scaled": (lambda: Own(lambda m, x: F.linear(x, m.weight, m.bias) * 1.0001), "does more"),
    "bias ignored": (lambda: Own(lambda m, x: F.linear(x, m.weight)), "does more"),
    "bias twice": (lambda: Own(lambda m, x: F.linear(x, m.weight, m.bias) + m.bias), "does more"),
    "constant": (lambda: Own(lambda m, x: F.linear(x, m.weight, m.bias) + 1e-9), "does more"),
    "two products": (lambda: Own(lambda m, x: F.linear(F.linear(x, m.weight), m.weight, m.bias)), "does more"),
    "tuple": (lambda: Own(lambda m, x: (F.linear(x, m.weight, m.bias), x)), "does more"),
    "input turned": (lambda: Own(lambda m, x: (F.linear(x.transpose(0, 1), m.weight, m.bias)).transpose(0, 1)), "does more"),
    "patched": (lambda: with_attribute("forward", lambda x: x), "its forward was replaced"),
    "called": (lambda: Called(K, N), "__call__ of its own"),
    "called inside": (lambda: CalledInside(K, N), "_call_impl of its own"),
    "call replaced": (lambda: with_attribute("_call_impl", lambda x: x), "_call_impl of its own"),
    "state dict": (lambda: hooked("register_state_dict_post_hook"), "state-dict hook"),
    "state dict, loaded": (lambda: hooked("register_load_state_dict_post_hook"), "load-state-dict hook"),
    "another parameter": (lambda: with_attribute("lora", nn.Parameter(torch.ones(1))), "it holds lora beside weight and bias"),
    "a child": (lambda: with_attribute("inner", nn.Linear(1, 1)), "it holds inner"),
    "complex": (lambda: nn.Linear(K, N, dtype=torch.complex64), "its weight is complex64"),
    "no inputs": (lambda: nn.Linear(0, N), "its weight is empty"),
    "attention": (lambda: nn.MultiheadAttention(K, 2).out_proj, "the module that holds it reads its weight"),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("kind", OTHERS)
def test_linear_like__others_say_why(kind: str) -> None:
    make, reason = OTHERS[kind]
    module = make()
    assert looks_linear(module)
    with pytest.raises(NotLinearError, match=reason):
        read_linear(module)


@pytest.mark.parametrize("module", [nn.Embedding(4, 4), nn.LayerNorm(4), nn.Conv1d(4, 4, 1), nn.Bilinear(2, 2, 2), nn.Sequential()])
def test_linear_like__what_is_something_else(module: nn.Module) -> None:
    assert not looks_linear(module)


def test_linear_like__users_hooks_do_not_see_the_proof() -> None:
    module, seen = FalconLinear(K, N), []
    module.register_forward_hook(lambda *args: seen.append(args))
    read_linear(module)
    assert not seen
    module(torch.ones(1, K))
    assert len(seen) == 1


def test_linear_like__the_proof_leaves_the_random_numbers_alone() -> None:
    module = Conv1D(N, K)
    before = torch.get_rng_state()
    read_linear(module)
    assert torch.equal(torch.get_rng_state(), before)
