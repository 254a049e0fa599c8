"""What the host reads of the inputs runs before the graph: the same numbers, the same errors, and no read left behind a product."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import tiny_qwen2_vl
from quantized_vlm import quantized_vlm
from small_vlm import logits
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from mmqc.compiler.record import collect_records
from mmqc.front.sizes import sizes_vary
from mmqc.graph.program import PassRecord
from mmqc.graph.text import text_diff

IMAGE = 7


@pytest.fixture(autouse=True)
def reads_are_traced() -> Iterator[None]:
    """As the backend has it for a model that is traced with its values."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield
    torch._dynamo.reset()


class Merge(nn.Module):
    """A tower, whose rows go to the placeholders as transformers has it: split sizes and counts are read behind the tower."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 8)

    def forward(self, ids: Tensor, grid: Tensor, patches: Tensor) -> Tensor:
        y = self.tower(patches)
        y = torch.cat(torch.split(y, (grid.prod(-1) // 4).tolist()))
        mask = ids == IMAGE
        self.check(mask, y)
        return self.head(self.embed(ids).masked_scatter(mask[..., None], y))

    def check(self, mask: Tensor, y: Tensor) -> None:
        torch._check(mask.sum().item() * y.shape[-1] == y.numel())


def batch() -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.arange(20)[None].clone()
    ids[0, 3:9] = IMAGE
    return ids, torch.tensor([[1, 4, 6]]), torch.randn(6, 16, dtype=torch.float64)


def compiled(function: Callable[..., Any], *args: Tensor) -> tuple[Any, Callable[..., Any], PassRecord]:
    """The result, the compiled function, and what the pass did."""
    fast = torch.compile(function, backend="mmqc", fullgraph=True, dynamic=False)
    with torch.no_grad(), collect_records() as records:
        y = fast(*args)
    (record,) = (p for p in records[0].passes if p.name == "reorder_reads")
    return y, fast, record


def names(text: str) -> list[str]:
    return [line.split(" = ")[1].split("(")[0] for line in text.splitlines() if " = " in line]


@pytest.mark.slow
def test_reorder_reads__nothing_is_read_behind_a_product() -> None:
    model, args = Merge().double(), batch()
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        y, code = run_and_get_code(torch.compile(model, backend="mmqc", fullgraph=True, dynamic=False), *args)
        assert torch.equal(y, model(*args))
        torch._dynamo.reset()
        _, (plain,) = run_and_get_code(torch.compile(model, fullgraph=True, dynamic=False), *args)
    assert len(code) == 1
    assert ".item()" not in code[0]
    assert plain.rindex(".item()") > plain.index("extern_kernels."), "what the pass is for"


def test_reorder_reads__moves_reads_and_their_checks_alone(without_inductor: None) -> None:
    model, args = Merge().double(), batch()
    y, _, record = compiled(model, *args)
    assert torch.equal(y, model(*args))
    assert len(record.sites) == 2, "a split size and a count"
    assert record.misses == []
    before, after = names(record.before), names(record.after)
    assert after.index("linear") > max(i for i, name in enumerate(after) if name in ("item", "_assert_scalar.default"))
    rest = lambda some: [n for n in some if n not in ("item", "eq", "_assert_scalar.default")]  # noqa: E731
    assert sorted(rest(before)) == sorted(rest(after))
    assert "+split = split" in text_diff(record.before, record.after)


@pytest.mark.parametrize("wrong", ["a placeholder less", "another grid"])
def test_reorder_reads__wrong_counts_raise(without_inductor: None, wrong: str) -> None:
    model, (ids, grid, patches) = Merge().double(), batch()
    _, fast, _ = compiled(model, ids, grid, patches)
    if wrong == "another grid":
        grid = torch.tensor([[1, 6, 4]])
        assert torch.equal(fast(ids, grid, patches), model(ids, grid, patches)), "as many rows, and so right"
        grid = torch.tensor([[1, 2, 4]])
    else:
        ids = ids.clone()
        ids[0, 3] = 1
    with pytest.raises(RuntimeError):
        model(ids, grid, patches)
    with pytest.raises(RuntimeError):
        fast(ids, grid, patches)


def count(ids: Tensor) -> None:
    torch._check((ids == IMAGE).sum().item() == 6)


class Late(nn.Module):
    """A product, and then what ``then`` reads."""

    def __init__(self, then: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(16, 16).double(), then

    def forward(self, ids: Tensor, other: Tensor, x: Tensor) -> Any:
        y = self.linear(x)
        extra = self.then(ids, other, y)
        return y if extra is None else (y, extra)


def of_a_product(ids: Tensor, other: Tensor, y: Tensor) -> None:
    torch._check((y < 1e9).sum().item() == 96)


def of_a_float(ids: Tensor, other: Tensor, y: Tensor) -> None:
    torch._check((ids * 0.5).sum().item() > 0)


def of_what_is_written(ids: Tensor, other: Tensor, y: Tensor) -> None:
    ids.add_(0)
    count(ids)


def of_what_a_view_writes(ids: Tensor, other: Tensor, y: Tensor) -> None:
    other[0].add_(0)
    count(ids)


def of_a_size(ids: Tensor, other: Tensor, y: Tensor) -> Tensor:
    n = (ids == IMAGE).sum().item()
    torch._check(n >= 0)
    return torch.zeros(n)


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        (of_a_product, "it depends on y"),
        (of_a_float, "is no whole number"),
        (of_what_is_written, "the graph writes to l_ids_"),
        (of_what_a_view_writes, "the graph writes to l_ids_"),
        (of_a_size, "which its checks leave open"),
    ],
)
def test_reorder_reads__refuses(without_inductor: None, then: Any, reason: str) -> None:
    ids, _, x = batch()
    model = Late(then)
    other = ids[:, 2:] if then is of_what_a_view_writes else ids.clone()
    y, _, record = compiled(model, ids, other, x)
    assert record.sites == []
    assert reason in str(record.misses[0])
    torch.testing.assert_close(y, model(ids, other, x), rtol=0, atol=0)


def test_reorder_reads__split_sizes_of_which_only_the_sum_is_known_stay(without_inductor: None) -> None:
    model, (ids, _, patches) = Merge().double(), batch()
    grids = torch.tensor([[[1, 4, 4], [1, 2, 4]], [[1, 2, 4], [1, 4, 4]]])
    y, fast, record = compiled(model, ids, grids[0], patches)
    assert record.sites == [], "nor does the count of placeholders move, which is compared with the sum"
    reads = ("item", "item_1", "item_2")
    assert [str(m) for m in record.misses] == [f"{n}: the graph uses {n}, which its checks leave open" for n in reads]
    assert torch.equal(y, model(ids, grids[0], patches))
    assert torch.equal(fast(ids, grids[1], patches), model(ids, grids[1], patches))


def test_reorder_reads__a_step_without_reads_is_left_alone(without_inductor: None) -> None:
    ids, _, x = batch()
    with collect_records() as records:
        torch.compile(Late(lambda *_: None), backend="mmqc", fullgraph=True)(ids, ids.clone(), x)
    assert records[0].passes == []


def test_reorder_reads__a_graph_for_any_size_uses_what_its_checks_compare(without_inductor: None) -> None:
    model, (ids, grid, patches) = Merge().double(), batch()
    with torch.no_grad(), collect_records() as records:
        fast = torch.compile(model, backend="mmqc", fullgraph=True, dynamic=True)
        got = fast(ids, grid, patches)
    (record,) = (p for p in records[0].passes if p.name == "reorder_reads")
    assert [str(site).partition(",")[0] for site in record.sites] == ["item", "item_1"]
    assert "item = " in str(record.sites[0])
    assert torch.equal(got, model(ids, grid, patches))
    ids[0, 9:13] = IMAGE
    larger = ids, torch.tensor([[1, 4, 10]]), torch.randn(10, 16, dtype=torch.float64)
    assert torch.equal(fast(*larger), model(*larger))
    assert len(records) == 1
    for wrong in ((ids, grid, larger[2]), (ids.roll(1).fill_(0), larger[1], larger[2])):  # rows of the split, placeholders
        with pytest.raises(RuntimeError, match="assertion failed"):
            fast(*wrong)


@pytest.mark.slow
@pytest.mark.parametrize(("quantized", "vary"), itertools.product((False, True), (False, "all")))
def test_reorder_reads__a_whole_model(without_inductor: None, quantized: bool, vary: bool | str) -> None:
    model, inputs = quantized_vlm() if quantized else tiny_qwen2_vl()
    with torch.no_grad(), collect_records() as records, sizes_vary(vary):
        expected = logits(model, inputs)
        got = logits(torch.compile(model, backend="mmqc"), inputs)
    (record,) = (p for r in records for p in r.passes if p.name == "reorder_reads")
    assert record.sites
    assert record.misses == []
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
