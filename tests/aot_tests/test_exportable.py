"""Whole forwards as exported programs: other shapes than the traced ones, and clear refusals."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from float64 import relative_error
from models import IMAGE, MERGE, PATCH, text_with_images, tiny_qwen2_vl
from quantized_vlm import quantized_vlm
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from transformers.models.qwen2_vl import modeling_qwen2_vl

from mmqc import samples
from mmqc.aot import exportable
from mmqc.aot.exportable import ExportError, derived_shapes, export_program
from mmqc.lowering import segment_attention

SAME = 1e-5  # float32; the same sums in another order
FLIPPED = 3e-2  # of a quantized model: a code or two on the other side of a tie, by those sums

Grid = tuple[int, int, int]


def batch_of(*grids: Grid) -> dict[str, Tensor]:
    grid = torch.tensor(grids)
    pixels = torch.randn(int(grid.prod(-1).sum()), 3 * 2 * PATCH * PATCH, generator=torch.Generator().manual_seed(1))
    text = text_with_images([int(g.prod()) // MERGE**2 for g in grid])
    return {**text, "pixel_values": pixels, "image_grid_thw": grid}


def padded(*grids: Grid) -> dict[str, Tensor]:
    """Two rows: the images, and no image but padding on the left."""
    batch = batch_of(*grids)
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        text = batch[name].clone()
        text[batch["mm_token_type_ids"] > 0] = {"input_ids": 7, "attention_mask": 0}.get(name, 0)
        text[:, :3] = 0 if name != "input_ids" else 7
        batch[name] = torch.cat([batch[name], text])
    return batch


@torch.no_grad()
def error(program: ExportedProgram, model: nn.Module, batches: list[dict[str, Tensor]]) -> float:
    """The largest over the batches."""
    run = program.module()
    return max(relative_error(run(**batch)["logits"], model(**batch).logits) for batch in batches)


def foreign(program: ExportedProgram) -> set[str]:
    """Ops that are not torch's own."""
    ops = {n.target.namespace for n in program.graph.nodes if isinstance(n.target, torch._ops.OpOverload)}
    return ops - {"aten", "prim", "prims"}


def attributes(model: nn.Module) -> dict[str, Any]:
    return {name: {k: id(v) for k, v in m.__dict__.items()} for name, m in model.named_modules()}


# --- models -----------------------------------------------------------------------------------------------------------


@functools.cache
def exported_sample() -> tuple[nn.Module, list[dict[str, Tensor]], ExportedProgram]:
    """The shipped sample, batches with images that were not given to the export, and the program."""
    sample = samples.load("digits-vqa")
    batches = sample.calibration(16)
    smallest = batches.pop(min(range(3, 16), key=lambda i: len(batches[i]["pixel_values"])))
    assert len(smallest["pixel_values"]) == MERGE**2, "one visual token: a size that a trace excludes"
    before = attributes(sample.model)
    program = export_program(sample.model, batches[0], more=[*batches[1:3], smallest])
    assert attributes(sample.model) == before
    return sample.model, batches[3:], program


@pytest.mark.slow
def test_export__sample_on_other_shapes() -> None:
    model, batches, program = exported_sample()
    grids = [b["image_grid_thw"] for b in batches]
    assert {len(g) for g in grids} == {1, 2, 3}
    assert len({b["input_ids"].shape for b in batches}) > 5
    assert any((g[:, 1] != g[:, 2]).any() for g in grids)
    assert error(program, model, batches) < SAME
    assert foreign(program) == set()


@pytest.mark.slow
def test_export__grid_that_does_not_fit_is_refused() -> None:
    _, batches, program = exported_sample()
    batch = {**batches[0], "image_grid_thw": batches[0]["image_grid_thw"] + 2}
    with pytest.raises(RuntimeError, match="does not add up to the number of patches"):
        program.module()(**batch)


@pytest.mark.slow
def test_export__quantized_model_with_padding() -> None:
    model, _ = quantized_vlm()
    program = export_program(model, padded((1, 4, 6), (1, 8, 4)), more=[padded((1, 8, 8)), padded((2, 4, 6), (1, 2, 4))])
    other = [padded((1, 10, 4)), padded((1, 4, 4), (1, 6, 4), (1, 2, 4)), padded((3, 2, 8), (1, 4, 2))]
    assert error(program, model, other) < FLIPPED
    assert foreign(program) == {"mmqc"}
    ops = {str(n.target) for n in program.graph.nodes}
    assert {"mmqc.norm_quantize.default", "mmqc.scaled_matmuls.default", "mmqc.scaled_matmul_epilogue.default"} <= ops


# --- a model of nobody's ----------------------------------------------------------------------------------------------


def coordinates(shape: Tensor, block: int) -> Tensor:
    """Row and column of each patch, image by image."""
    found = []
    for t, h, w in shape.tolist():
        at = torch.cartesian_prod(torch.arange(h), torch.arange(w)).view(h // block, block, w // block, block, 2)
        found += [at.transpose(1, 2).reshape(-1, 2)] * t
    return torch.cat(found)


class Tower(nn.Module):
    """Patches with sines of their places; ``pooled`` and ``looped`` use the images one by one, which no program can."""

    def __init__(self, function: Any = None, then: str = "together") -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.function, self.then = function, then

    def forward(self, patches: Tensor, shape: Tensor) -> Tensor:
        at = self.where(shape)
        y = self.inner(patches) * torch.sin(at.float().sum(-1, keepdim=True))
        lengths = shape.prod(-1).tolist()
        if self.then == "looped":
            return torch.stack([y[:n].sum(0) for n in lengths])
        if self.then == "pooled":
            return torch.stack([piece.sum(0) for piece in torch.split(y, lengths)])
        if self.then == "unrolled":
            return y + sum(row.mean() for row in y)
        return torch.cat(torch.split(y, lengths)).cumsum(0)

    def where(self, shape: Tensor) -> Tensor:
        return coordinates(shape, 3) if self.function is None else self.function(shape)


def tower_batch(*grids: Grid) -> dict[str, Tensor]:
    shape = torch.tensor(grids)
    patches = torch.randn(int(shape.prod(-1).sum()), 6, generator=torch.Generator().manual_seed(1))
    return {"patches": patches, "shape": shape}


TOWER = [tower_batch((1, 3, 6), (1, 9, 3)), tower_batch((1, 6, 6))]


def test_export__knows_no_names() -> None:
    model = Tower()
    program = export_program(model, TOWER[0], more=TOWER[1:])
    batch = tower_batch((2, 3, 9), (1, 12, 6), (1, 3, 3))
    assert relative_error(program.module()(**batch), model(**batch)) < SAME


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda shape: coordinates(shape, 3) + 1, r"nearest is position_ids\(shape, merge=\d, .* the model 1;"),
        (lambda shape: coordinates(shape, 3)[:, :1], r"nearest is .* the model \(45, 1\)"),
        # right for the given batches: no image with more than nine columns
        (lambda shape: coordinates(shape, 3).clamp(max=8), r"nearest is position_ids\(shape, merge=3.* the model 8"),
    ],
)
def test_export__function_that_nothing_follows_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ExportError, match=r"where of Tower\(shape \(2, 3\)\): no index function equals it; .*" + message):
        export_program(Tower(wrong), TOWER[0], more=TOWER[1:])


def test_export__changed_function_of_a_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = modeling_qwen2_vl.get_vision_position_ids

    def get_vision_position_ids(grid_thw: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return plain(grid_thw, *args, **kwargs).flip(-1)

    monkeypatch.setattr(modeling_qwen2_vl, "get_vision_position_ids", get_vision_position_ids)
    model, batch = tiny_qwen2_vl()
    with pytest.raises(ExportError, match=r"get_vision_position_ids of .*\(image_grid_thw \(2, 3\)\): no index function"):
        export_program(model, batch, more=[batch_of((1, 8, 8))])


@pytest.mark.parametrize(
    ("then", "message"),
    [
        ("pooled", "other shapes than the model's"),
        ("looped", "a list of dynamic length is read entry by entry"),
        ("unrolled", r"torch.export: .*Constraints violated"),
    ],
)
def test_export__images_one_by_one_are_refused(then: str, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        export_program(Tower(then=then), TOWER[0], more=TOWER[1:])


# --- what is given ----------------------------------------------------------------------------------------------------


def test_derived_shapes__axes_that_differ() -> None:
    shapes = derived_shapes([batch_of((1, 4, 6), (1, 8, 4)), batch_of((1, 8, 8))])
    assert {name: set(axes) for name, axes in shapes.items()} == {
        "input_ids": {1},
        "attention_mask": {1},
        "mm_token_type_ids": {1},
        "pixel_values": {0},
        "image_grid_thw": {0},
    }


def test_export__traces_a_batch_without_sizes_of_one() -> None:
    program = export_program(Tower(), TOWER[1], more=TOWER[:1])
    assert len(program.range_constraints) == 2
    one, other = tower_batch((1, 3, 3)), tower_batch((1, 3, 9))
    with pytest.raises(ExportError, match="at least two"):
        export_program(Tower(), one, more=[other], dynamic_shapes={"patches": (Dim.DYNAMIC, None), "shape": {0: Dim.AUTO}})


def test_export__batches_of_another_kind_are_refused() -> None:
    batch = {k: v for k, v in TOWER[1].items() if k != "shape"}
    with pytest.raises(ExportError, match="differ in more than sizes"):
        export_program(Tower(), TOWER[0], more=[batch])


@pytest.mark.slow
@pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="the check is left out of the trace before torch 2.12, see graph/tracing.py"
)
def test_export__too_few_placeholders_are_an_error() -> None:
    _, batches, program = exported_sample()
    ids = batches[0]["input_ids"].clone()
    ids[0, int((batches[0]["mm_token_type_ids"][0] > 0).nonzero()[0])] = 20
    assert IMAGE not in ids
    with pytest.raises(RuntimeError):
        program.module()(**{**batches[0], "input_ids": ids})


@pytest.mark.parametrize(
    ("device", "reason", "told"), [("cuda", "queries in float32", True), ("cpu", "a CPU", False), ("cuda", None, False)]
)
def test_export__says_that_a_gpu_computes_a_mask(device, reason, told, monkeypatch, caplog) -> None:
    graph = torch.fx.Graph()
    node = graph.call_function(segment_attention.OP, ())
    with FakeTensorMode():
        node.meta["val"] = torch.empty(1, device=device)
    monkeypatch.setattr(segment_attention, "why_not_packaged", lambda node: reason)
    found = exportable._decompositions(SimpleNamespace(graph=graph))
    assert list(found) == ([] if reason is None else [segment_attention.OP])
    assert ("P x P" in caplog.text and "float32" in caplog.text) is told
