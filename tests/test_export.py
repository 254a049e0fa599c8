"""Packages that run without Python: equal to the model on other shapes, in a process that has neither mmqc nor transformers."""

import functools
import gc
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from models import IMAGE, VIDEO, randomise, tiny_qwen2_vl
from other_batches import other_batches
from quantized_vlm import quantized_vlm
from tiny_families import FAMILIES
from tolerance import assert_close
from torch import Tensor, nn
from torchao.quantization import Float8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, IntxWeightOnlyConfig, PerGroup
from torchao.quantization import quantize_ as torchao_quantize_

import mmqc
from mmqc.aot.exportable import export_program
from mmqc.aot.index_find import ExportError
from mmqc.aot.packed_programs import steps_of
from mmqc.aot.programs import Seam, Whole, cache_shape, find_seam
from mmqc.aot.sensitivity import relative_error
from mmqc.aot.step_batches import Steps
from mmqc.aot.variants import fixed_images, variants
from mmqc.aot.weights import Weights
from mmqc.lowering.package import grouped_mm, load_program, python_ops
from mmqc.nn.modality import visual_token_ids

LOADS = """if True:
    import sys
    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("mmqc", "transformers"):
                raise ImportError(name)
    sys.meta_path.insert(0, Blocked())
    import torch
    from torch._inductor.package import load_package
    cases = torch.load(sys.argv[2])
    run = load_package(sys.argv[1], "model")
    torch.save([run(**case) for case in cases], sys.argv[3])
"""


def run_elsewhere(package: Path, cases: list[dict[str, Tensor]]) -> list[Tensor]:
    """The whole forward in a process that can import neither mmqc nor transformers."""
    with tempfile.TemporaryDirectory() as folder:
        given, got = Path(folder) / "given.pt", Path(folder) / "got.pt"
        torch.save(cases, given)
        subprocess.run([sys.executable, "-I", "-c", LOADS, str(package), str(given), str(got)], check=True)
        return torch.load(got)


@torch.no_grad()
def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return Whole(model)(**batch)


# --- the default suite's one package ----------------------------------------------------------------------------------


def test_export__package_equals_the_model_in_another_process(tmp_path: Path) -> None:
    model, batch = tiny_qwen2_vl(depth=1, layers=1)
    package = mmqc.export(model, batch, tmp_path / "model.pt2", programs=["model"])
    cases = other_batches(batch)
    for case, got in zip(cases, run_elsewhere(package, cases), strict=True):
        assert_close(got, logits(model, case))
    weights = [weakref.ref(p) for p in model.parameters()]
    del model
    gc.collect()
    assert not any(weight() is not None for weight in weights), "torch keeps what was traced last"


# --- the parts, without a compiler ------------------------------------------------------------------------------------


@functools.cache
def steps() -> tuple[Steps, dict[str, Tensor]]:
    model, batch = tiny_qwen2_vl()
    return Steps(model, find_seam(model, batch), cache_shape(model, batch)), batch


@torch.no_grad()
def test_steps__together_are_the_forward() -> None:
    split, batch = steps()
    for case in (batch, *other_batches(batch)):
        got, expected = split.run(split.modules(), case), split.expected(case)
        for a, b in zip(got, expected, strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("family", ["llava", "internvl", "olmo2", "gpt_neox", "mixtral"])
@torch.no_grad()
def test_steps__go_on_from_positions_that_count_padding(family: str) -> None:
    model, batch = FAMILIES[family]()
    split = steps_of(model, batch)
    made, _ = variants(batch, visual_token_ids(model))
    padded = [b for b in made if bool((b["attention_mask"] == 0).any()) and bool(b["attention_mask"][:, -1].all())]
    assert padded
    for case in (batch, *padded):
        for a, b in zip(split.run(split.modules(), case), split.expected(case), strict=True):
            assert_close(a, b)


@torch.no_grad()
def test_steps__a_wrong_program_is_noticed() -> None:
    split, batch = steps()
    modules: dict[str, Any] = split.modules()

    def stale(**inputs: Tensor) -> Any:
        return modules["decode"](**{**inputs, "rope_deltas": inputs["rope_deltas"] + 1})

    with pytest.raises(ExportError, match="decode differs from the model's forward"):
        split.check({**modules, "decode": stale}, batch, 1e-4)


def test_seam__features_that_an_output_has_no_field_for() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    output: Any = BaseModelOutput(last_hidden_state=torch.ones(2, 3, 4))
    output.pooler_output = (torch.zeros(3, 4), torch.zeros(5, 4))
    joined: Any = Seam(nn.Linear(1, 1), output=output).joined({"image_features": torch.ones(8, 4)})
    assert torch.equal(torch.cat(joined.pooler_output), torch.ones(8, 4))
    assert joined.last_hidden_state is None


def test_relative_error__leaves_masks_out_and_compares_where_they_are() -> None:
    masked = torch.tensor([1.0, 2.0, torch.finfo(torch.float32).min, -torch.inf])
    assert relative_error(masked + torch.tensor([0.3, 0.0, 0.0, 0.0]), masked) > 0.1
    assert relative_error(masked, masked) == 0
    assert relative_error(masked.flip(0), masked) == float("inf")


def test_steps__a_full_cache_is_an_error() -> None:
    split, batch = steps()
    inputs = split.batches(batch)["prefill"]
    short = {n: v[:, :, :8].contiguous() if n.startswith(("key_", "value_")) else v for n, v in inputs.items()}
    with pytest.raises(RuntimeError, match="the cache is shorter than the text"), torch.no_grad():
        split.modules()["prefill"](**short)


@torch.no_grad()
def test_variants__the_model_takes_them_and_they_differ() -> None:
    model, batch = tiny_qwen2_vl()
    made, spare = variants(batch, (IMAGE, VIDEO))
    assert {len(b["input_ids"]) for b in made} == {1, 2, 3}
    assert {len(b["image_grid_thw"]) for b in made} == {1, 3, 4}
    assert [len(b["pixel_values"]) for b in spare] == [4]
    for each in (*made, *spare):
        assert torch.isfinite(logits(model, each)).all()
        assert int((each["input_ids"] == IMAGE).sum()) * 4 == len(each["pixel_values"])
        assert ((each["input_ids"] == IMAGE) == (each["mm_token_type_ids"] == 1)).all()


def test_variants__images_of_one_size() -> None:
    ids = torch.tensor([[5, 6, IMAGE, IMAGE, 8, IMAGE, IMAGE, 7]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(2, 3, 4, 4)}
    made, spare = variants(batch, (IMAGE,))
    assert spare == []
    for each in made:
        assert int((each["input_ids"] == IMAGE).sum()) == 2 * len(each["pixel_values"])
    assert {len(b["pixel_values"]) for b in fixed_images(batch, (IMAGE,))} == {2}


def test_variants__placeholders_that_do_not_fit_are_left_alone() -> None:
    _, batch = tiny_qwen2_vl()
    ids = batch["input_ids"].clone()
    ids[0, int((ids[0] == IMAGE).nonzero()[0])] = 11
    assert variants({**batch, "input_ids": ids}, (IMAGE,)) == ([], [])


# --- ops that a process with torch alone does not have ----------------------------------------------------------------


@pytest.mark.parametrize("ends", [[0, 3, 3, 9], [9, 9, 9, 9], [1, 2, 3, 9]])
def test_package__experts_multiply_without_reading_where_their_rows_end(ends: list[int]) -> None:
    import transformers.integrations.moe  # noqa: F401  (defines the op)

    x, weight, bounds = torch.randn(9, 5), torch.randn(4, 5, 3), torch.tensor(ends, dtype=torch.int32)
    assert_close(grouped_mm(x, weight, bounds), torch.ops.transformers.grouped_mm_fallback(x, weight, bounds))


def test_package__an_op_of_another_library_is_named() -> None:
    op = torch.library.custom_op("tests::doubled", mutates_args=())(_doubled)
    op.register_fake(torch.empty_like)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.tests.doubled(x.cos())

    assert python_ops(torch.export.export(Model(), (torch.ones(3),))) == ["tests.doubled.default"]


def test_package__an_op_that_its_library_takes_apart_for_inductor_is_code() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    torchao_quantize_(model, Int8DynamicActivationInt8WeightConfig(version=2))
    program = torch.export.export(model, (torch.ones(3, 8),)).run_decompositions({})
    assert any("torchao" in str(n.target) for n in program.graph.nodes)
    assert python_ops(program) == []


def _doubled(x: Tensor) -> Tensor:
    return 2 * x


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "model.so"}, "ends in .pt2"),
        ({"programs": ["encoder"]}, "allowed are model, vision, prefill, decode"),
        ({"weights": "weights.bin"}, "ends in .safetensors"),
        ({"example_inputs": []}, "example_inputs is empty"),
        ({"example_inputs": {"input_ids": [1, 2]}}, r"holds input_ids \(list\)"),
        ({"example_inputs": [torch.ones(1, 3)]}, r"holds a Tensor: pass keyword tensors"),
    ],
)
def test_export__arguments_that_are_wrong(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    model, batch = tiny_qwen2_vl()
    arguments = {"example_inputs": batch, "path": "model.pt2", **change}
    with pytest.raises(ValueError, match=message):
        mmqc.export(model, arguments.pop("example_inputs"), tmp_path / arguments.pop("path"), **arguments)


def test_export__model_in_training_mode_is_refused(tmp_path: Path) -> None:
    model, batch = tiny_qwen2_vl()
    with pytest.raises(ValueError, match=r"call model\.eval"):
        mmqc.export(model.train(), batch, tmp_path / "model.pt2")


class Recurrent(nn.Module):
    """A model without a cache of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool = True) -> Tensor:
        return self.head(self.embed(input_ids) * attention_mask[..., None])


def test_export__steps_without_a_cache_are_refused(tmp_path: Path) -> None:
    ids = torch.arange(6)[None]
    with pytest.raises(ExportError, match="no cache with layers"):
        mmqc.export(
            Recurrent().eval(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, tmp_path / "m.pt2", programs=["prefill"]
        )


# --- index functions in a program -------------------------------------------------------------------------------------


def _windowed() -> tuple[nn.Module, dict[str, Tensor]]:
    """A two-layer Qwen2.5-VL, one of whose vision layers attends within windows of 2 x 2 merged tokens."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    like, batch = tiny_qwen2_vl()
    text = like.config.text_config.to_dict()
    text.pop("model_type")
    config = Qwen2_5_VLConfig(
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 100,
            "num_heads": 4,
            "patch_size": 8,
            "out_hidden_size": 96,
            "window_size": 32,
            "fullatt_block_indexes": [1],
        },
        text_config=text,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    return randomise(Qwen2_5_VLForConditionalGeneration(config).float().eval()), batch


@torch.no_grad()
def test_program__computes_positions_ends_and_windows_of_grids_it_never_saw() -> None:
    model, batch = _windowed()
    made, spare = variants(batch, (IMAGE, VIDEO))
    program = export_program(Whole(model), batch, more=made, spare=spare)
    constants = [t for t in program.constants.values() if isinstance(t, Tensor) and t.numel() > 8]
    assert all(t.is_floating_point() for t in constants)  # no order or position is stored
    for case in other_batches(batch):
        assert_close(program.module()(**case), logits(model, case))


# --- more packages ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_export__quantized_package_has_the_models_codes(tmp_path: Path) -> None:
    model, batch = quantized_vlm(weight_bits=4)
    package = mmqc.export(model, batch, tmp_path / "model.pt2", programs=["model"])
    cases = other_batches(batch)
    for case, got in zip(cases, run_elsewhere(package, cases), strict=True):
        assert_close(got, logits(model, case))
    weights = [weakref.ref(p) for p in model.parameters()]
    del model
    gc.collect()
    assert not any(weight() is not None for weight in weights), "torch keeps what was traced last"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torchao's tensors announce that AOTAutograd cannot cache them
@pytest.mark.parametrize(
    "config",
    [Float8WeightOnlyConfig(), Int8DynamicActivationInt8WeightConfig(version=2), IntxWeightOnlyConfig(torch.int4, PerGroup(4))],
    ids=["float8", "int8 dynamic", "int4 groups"],
)
def test_export__weights_of_torchao(tmp_path: Path, config: Any) -> None:
    model, batch = FAMILIES["olmo2"]()
    torchao_quantize_(model, config)
    package = mmqc.export(model, batch, tmp_path / "model.pt2", programs=["model"])
    made, _ = variants(batch, visual_token_ids(model))
    cases = [batch, *made]
    for case, got in zip(cases, run_elsewhere(package, cases), strict=True):
        assert relative_error(got, logits(model, case)) < (3e-2 if "Dynamic" in type(config).__name__ else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True], ids=["weights inside", "weights apart"])
def test_export__steps_of_a_package(apart: bool, tmp_path: Path) -> None:
    split, batch = steps()
    file = tmp_path / "model.safetensors" if apart else None
    package = mmqc.export(split.model, batch, tmp_path / "model.pt2", programs=["vision", "prefill", "decode"], weights=file)
    shared = None if file is None else Weights.read(file, torch.device("cpu"))
    programs = {n: load_program(package, n, shared and functools.partial(shared.of_program, n)) for n in split.modules()}
    if shared is not None:
        sizes = {t.data_ptr(): t.nbytes for t in split.model.state_dict().values()}
        assert sum(t.nbytes for t in shared.tensors.values()) <= 1.01 * sum(sizes.values()), "each once"
    with torch.no_grad():
        for case in other_batches(batch):
            for a, b in zip(split.run(programs, case), split.expected(case), strict=True):
                assert_close(a, b)
