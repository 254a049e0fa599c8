"""Every answer of the rules is tried out: operands permuted, the operation run, the result compared with the permuted result."""

from typing import Any

import pytest
import torch
from blocks import MODELS
from float64 import Float64, recorded
from tiny_families import FAMILIES
from torch import Tensor, fx, nn
from torch.nn import functional as F

from mmqc.graph.memory import written
from mmqc.graph.program import Program, method_name
from mmqc.graph.sizes import is_sequence
from mmqc.graph.tokens.rules import TokenRules
from mmqc.graph.tokens.uses import Use, attention

o = torch.ops.mmqc


class Operations(nn.Module):
    """Many ways to touch [B, L, K], most of which keep rows apart and some of which do not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
        heads = x.view(2, 6, 2, 4).transpose(1, 2)
        a, b = x.chunk(2, dim=-1)
        c, d = x.split([2, 4], dim=1)
        # fmt: off
        ways = [
            x.softmax(-1), x.softmax(1), x.cumsum(1), x.flip(1), x.roll(1, 1), x.mean(-1, keepdim=True), x.mean(1, keepdim=True),
            x.sum(2), x.amax(1), torch.cat((a, b), -1), torch.cat((c, d), 1), torch.cat((x, x), 0), x[:, :, ::2], x[:, 1:],
            x[:, :, None], x[..., 3], x[0], x[None], x[:, 2], heads.flatten(2), heads.transpose(1, 2).reshape(2, 6, -1),
            x.unflatten(-1, (2, 4)), x.flatten(0, 1), x.unsqueeze(2), x.reshape(2, 2, 3, 8), x.permute(0, 2, 1), x.permute(1, 0, 2),
            x.transpose(0, 1), x * self.table, x * x[:, :1], x + x[:1], torch.where(mask[..., None], x, 0.0),
            x.masked_fill(mask[..., None], 1.0), F.layer_norm(x, (8,)), F.layer_norm(x, (6, 8)), F.rms_norm(x, (8,)),
            self.linear(x), self.linear(x.transpose(1, 2)[..., :1].expand(2, 8, 8)), x @ x.transpose(1, 2),
            x @ self.linear.weight, F.embedding(ids, self.linear.weight), x.index_select(-1, ids[0]), x.index_select(1, ids[0]),
            heads.expand(2, 2, 6, 4), x[:, :, None].expand(2, 6, 3, 8), x.to(torch.float64), x.type_as(x), x.contiguous(),
            F.dropout(x, 0.5, False), torch.clamp(x, -1, 1), x.pow(2), 1 - x, -x, x.squeeze(1), x[mask],
            x.gather(1, ids[..., None]),
            F.scaled_dot_product_attention(heads, heads * 2, heads + 1, attn_mask=(x @ x.transpose(1, 2))[:, None]),
            o.quantize(x, torch.tensor([0.1, 0.2]), mask, 8), o.tag_modality(x, mask), x.sort(1)[0], F.pad(x, (1, 0)),
            F.scaled_dot_product_attention(x, x * 2, x + 1, attn_mask=torch.zeros(6, 6, dtype=x.dtype)),
        ]
        # fmt: on
        return sum(w.double().sum() for w in ways)


def operations() -> Program:
    torch.manual_seed(0)
    batch = {"x": torch.randn(2, 6, 8), "mask": torch.rand(2, 6) > 0.5, "ids": torch.randint(0, 6, (2, 6))}
    return recorded(Operations(), batch)


def run(node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], method_name(node, args))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def moved(value: Any, order: Tensor, use: Use, flat: bool) -> Any:
    if isinstance(value, tuple | list):
        return [moved(v, order, use, flat) for v in value]
    return o.gather_rows(value, order) if flat else o.gather_tokens(value, order, use.axis, use.rank)


def try_out(prog: Program, flat: bool) -> int:
    """How many answers there were; each must hold."""
    env: dict[fx.Node, Any] = {}
    count = 0

    def copied(v: Any) -> Any:  # something may write to it later
        return v.clone() if isinstance(v, Tensor) else [copied(w) for w in v] if isinstance(v, tuple | list) else v

    prog.replay(lambda node, result, args, kwargs: env.__setitem__(node, copied(result)))
    unstable = written(prog)
    for node in prog.graph.nodes:
        value = None if unstable & {node, *node.all_input_nodes} else env.get(node)
        if isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value):
            node.meta["example_value"] = value
            value = value[0]
        for axis in range(1, value.dim() if isinstance(value, Tensor) else 0):
            batch, length = value.shape[0], value.shape[axis]
            uses = TokenRules(batch, length, flat).operands(node, axis)
            if isinstance(uses, str) or attention(node).get("is_causal"):
                continue  # the mask that a causal flag stands for is permuted by the pass
            count += 1
            g = torch.Generator().manual_seed(count)
            rows = (1, batch * length) if flat else (batch, length)
            order = torch.rand(rows, generator=g).argsort(1)
            changed = {n: moved(env[n], order, u, flat) for n, u in uses.items()}
            got, wanted = run(node, {**env, **changed}), moved(env[node], order, Use(axis, value.dim()), flat)
            pairs = zip(got, wanted, strict=True) if is_sequence(node) else [(got, wanted)]
            for actual, expected in pairs:
                torch.testing.assert_close(actual, expected, msg=f"{node.format_node()} along {axis}", equal_nan=True)
    return count


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("case", ["operations", *sorted(MODELS), *sorted(FAMILIES)])
def test_token_rules__every_answer_holds(case: str, flat: bool) -> None:
    prog = operations() if case == "operations" else recorded(*(MODELS[case]() if case in MODELS else FAMILIES[case]()))
    with Float64(), torch.no_grad():
        assert try_out(prog, flat) > 5


def reasons(flat: bool) -> dict[str, str]:
    prog = operations()
    rules = TokenRules(2, 6, flat)
    return {n.name: r for n in prog.graph.nodes if isinstance(r := rules.operands(n, 1), str)}


def test_token_rules__what_mixes_tokens_is_refused_with_a_reason() -> None:
    found = reasons(False)
    assert found["softmax_1"] == "softmax over the tokens"
    assert found["cumsum"] == "cumsum is not known to act on every token by itself"
    assert found["cat_1"] == "tokens are concatenated"
    assert found["layer_norm_1"] == "it normalises over the tokens"
    assert found["index_select_1"] == "tokens are selected"
    assert "view" not in found
    assert reasons(True)["view"] == "view has no rows of tokens" or reasons(True)["view"].startswith("it was told")


def test_token_rules__what_writes_in_place_or_is_unknown_is_refused() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    nodes = [graph.call_method("add_", (x, 1)), graph.call_function(str.strip, (x,)), graph.call_function(len, (x,))]
    for node in (x, *nodes):
        node.meta["shape"] = (2, 6, 8)
    rules = TokenRules(2, 6)
    assert rules.operands(nodes[0], 1) == "add writes in place"
    assert isinstance(rules.operands(nodes[1], 1), str)
    assert isinstance(rules.operands(nodes[2], 1), str)
