"""The real vLLM, on a machine without a GPU (``make test-vllm``): its answers are the tables', and it loads what mmqc writes.

MMQC_VLLM names the Pythons that have a vLLM; without it nothing here runs.
"""

import copy
import functools
import json
import random
import sys
from pathlib import Path

import pytest
import torch
from vllm_process import PYTHONS, needs_vllm, run

import mmqc
from benchmarks.engines.make_tables import _general, forms
from mmqc import recipes
from mmqc.checkpoint import compressed_tensors
from mmqc.checkpoint.compressed_tensors import unpack_words
from mmqc.engines import ask_vllm, table
from mmqc.engines.names import joined, renamed, split_by_rows
from mmqc.engines.table import BACKENDS, Answer, Case, Tabled, ask, read_table
from mmqc.nn.token_linear import TokenLinear
from mmqc.solvers import Quantized

QUESTIONS = 300


def test_asking__needs_nothing_but_python_where_it_runs():
    """The file is run by its path in the engine's environment, which has no mmqc."""
    code = Path(ask_vllm.__file__).read_text()
    assert "mmqc" not in code.partition('"""\n')[2].replace('"mmqc"', "").replace("mmqc.engines.ask_vllm", "")


@functools.cache
def version_of(python):
    """As tables name it."""
    return ".".join(ask(python, {})["version"].split(".")[:2])


@pytest.fixture(scope="module", params=PYTHONS or ["none"])
def python(request):
    """One that has a vLLM, and that vLLM's version."""
    return request.param, version_of(request.param)


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """As ``table.ask``, in a fork of a process that has imported vLLM already."""
    folder = tmp_path_factory.mktemp("asked")

    def ask_fork(python, questions):
        (folder / "questions.json").write_text(json.dumps(questions))
        run(python, ["vllm_asked.py", folder / "questions.json", folder / "answers.json"])
        return json.loads((folder / "answers.json").read_text())

    return ask_fork


@needs_vllm
@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tables__answer_as_the_engine_at_other_widths(python, asked, capability, backend):
    draw, configs = random.Random(f"{capability} {backend}"), forms()
    rules, questions = Tabled(python[1], capability), []
    taken = [f for f in configs if not rules.answers([Case(f, {}, 2048, 2048)], backend)[0].refused]
    for _ in range(QUESTIONS):
        k, n = (draw.randrange(256, 8192, 2 ** draw.randrange(9)) for _ in range(2))  # of every class; a group at least
        questions.append((draw.choice(taken if draw.random() < 0.8 else list(configs)), k, n))
    linears = [{"config": configs[form], "inputs": k, "outputs": n} for form, k, n in questions]
    given = asked(python[0], {"capability": capability, "backend": backend, "questions": linears})["answers"]
    differ = []
    for (form, k, n), answer in zip(questions, given, strict=True):
        (tabled,) = rules.answers([Case(form, {}, k, n)], backend)
        if tabled != Answer(**_general(answer)):
            differ.append((form, k, n, tabled, answer))
    assert differ == []


@needs_vllm
def test_tables__name_modules_as_the_classes_do(python, asked):
    models = read_table(python[1])["models"]
    assert asked(python[0], {"models": list(models)})["models"] == models


STATIC8 = recipes.rtn(8, activation_bits=8)
INT8 = ("CompressedTensorsW8A8Int8", "CutlassInt8ScaledMMLinearKernel")
W4A8 = ("CompressedTensorsW4A8Fp8", "CutlassW4A8LinearKernel")
RECIPES = {  # as for_engine has it but for the last, whose 4-bit weights are beside int8; scheme and kernel, of towers others
    "W8A8 static": (STATIC8, *INT8),
    "W8A8 by token": (STATIC8.with_token_scales(), *INT8),
    "W8A8-fp8 static": (STATIC8.with_float8(), "CompressedTensorsW8A8Fp8", "CutlassFP8ScaledMMLinearKernel"),
    "W8A8-fp8 by token": (STATIC8.with_token_scales().with_float8(), "CompressedTensorsW8A8Fp8", "CutlassFP8ScaledMMLinearKernel"),
    "W4A8-fp8": (recipes.rtn(4, activation_bits=8), *W4A8),
    "two towers": (recipes.mquant(4, vision_weight_bits=8, msq=False, rotate=False, solver="rtn"), *W4A8),
    "W4A16": (recipes.rtn(4, group_size=128), "CompressedTensorsWNA16", "MacheteLinearKernel"),
    "W4A16 asym": (recipes.awq(4, symmetric=False, solver="rtn"), "CompressedTensorsWNA16", "MacheteLinearKernel"),
    "W8A16": (recipes.rtn(8), "CompressedTensorsWNA16", "MacheteLinearKernel"),
    "W4A8-int8": (recipes.rtn(4, activation_bits=8), "CompressedTensorsWNA8Int", "HummingLinearKernel"),
}
TOWER = {"two towers": INT8}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """By recipe: our model in bfloat16's scales, and its checkpoint."""
    sample, made = mmqc.samples.load("digits-vqa"), {}
    for name, (recipe, _, _) in RECIPES.items():
        model = copy.deepcopy(sample.model).to(torch.bfloat16)
        for part in (model.config, model.config.text_config, model.config.vision_config):
            part.dtype = torch.bfloat16  # as from_pretrained(dtype=...) leaves it
        config = recipes.for_engine(recipe, "vllm==0.33", activations="int8" if name == "W4A8-int8" else "float8")
        mmqc.quantize_(model, config, _bfloat16(sample.calibration(2)), progress=False)
        folder = tmp_path_factory.mktemp("export")
        mmqc.save_pretrained(model, folder, engine="vllm==0.33")
        made[name] = model, folder
    return made


def _bfloat16(batches):
    return [{k: v.bfloat16() if v.is_floating_point() else v for k, v in b.items()} for b in batches]


@pytest.fixture(scope="module", params=[1, 2])
def loaded(request, python, exports, tmp_path_factory):
    """How many ranks there are, and by recipe what their linears hold: one process a rank, for all recipes."""
    ranks, where = request.param, tmp_path_factory.mktemp("loaded")
    folders = [str(folder) for _, folder in exports.values()]
    outs = [where / f"{rank}.pt" for rank in range(ranks)]
    run(python[0], *(["vllm_layers.py", ranks, rank, where / "store", outs[rank], *folders] for rank in range(ranks)))
    shards = [torch.load(out) for out in outs]
    return ranks, {name: [shard[str(folder)] for shard in shards] for name, (_, folder) in exports.items()}


def expected(model):
    """By the engine's name: our linears that it joins, in its order."""
    names = read_table("0.33")["models"][type(model).__name__]
    here = {renamed(name, names): linear for name, linear in compressed_tensors.written_linears(model).items()}
    return {whole: [here[name] for name in of] for whole, of in joined(here, names).items()}


def codes_of(layer, bits, inputs):
    """The codes [N, K] that a loaded layer holds."""
    return unpack_words(layer["weight_packed"], inputs, bits) if "weight_packed" in layer else layer["weight"]


@needs_vllm
@pytest.mark.parametrize("name", RECIPES)
def test_exports__the_engines_own_linears_hold_our_codes_and_compute_our_outputs(name, loaded, exports):
    model, _ = exports[name]
    _, scheme, kernel = RECIPES[name]
    (ranks, by_recipe), checked = loaded, 0
    shards = by_recipe[name]
    for whole, parts in expected(model).items():
        if whole not in shards[0]:
            continue
        by_rows, first = split_by_rows(whole), parts[0]
        for rank, shard in enumerate(shards):
            layer = shard[whole]
            want = TOWER.get(name, (scheme, kernel)) if whole.startswith("visual.") else (scheme, kernel)
            assert (layer["scheme"], layer["kernel"]) == want, whole
            mine = [_shard(part, rank, ranks, by_rows) for part in parts]
            codes = codes_of(layer, first.weight_bits, mine[0][0].shape[1])
            assert torch.equal(codes, torch.cat([c for c, _, _ in mine])), whole
            assert torch.equal(layer["weight_scale"].float(), torch.cat([s for _, s, _ in mine]).bfloat16().float()), whole
            if mine[0][2] is not None:
                zeros = unpack_words(layer["weight_zero_point"].T.contiguous(), len(codes), first.weight_bits).T
                assert torch.equal(zeros, torch.cat([z for _, _, z in mine])), whole
            if first.input_scale is not None:
                assert (layer["input_scale"].float() == first.input_scale.bfloat16().float()).all(), whole
            _same_outputs(layer, codes, parts, rank, ranks, by_rows)
            checked += 1
    assert checked >= 20 * ranks


def _shard(linear, rank, ranks, by_rows):
    """Codes, scales [N, 1 or groups] and zero points of a rank."""
    codes = linear.codes()
    scale = linear.weight_scale if linear.group_size else linear.weight_scale[:, None]
    zero = getattr(linear, "weight_zero", None)
    zero = None if zero is None else zero.reshape(len(codes), -1)
    if not by_rows:
        return tuple(None if t is None else t.chunk(ranks)[rank] for t in (codes, scale, zero))
    whole = scale.shape[1] == 1
    cut = [None if t is None else t if whole else t.chunk(ranks, 1)[rank] for t in (scale, zero)]
    return codes.chunk(ranks, 1)[rank], cut[0], cut[1]


def _same_outputs(layer, codes, parts, rank, ranks, by_rows):
    """What a linear of the loaded tensors computes by mmqc's reference is what our modules compute, to the bit."""
    if not isinstance(parts[0], TokenLinear) or by_rows:
        return
    first, scale = parts[0], layer["weight_scale"].float()
    solved = Quantized(codes, scale if first.group_size else scale[:, 0], group_size=first.group_size)
    bias = layer.get("bias")
    again = TokenLinear.from_parts(solved, weight_bits=first.weight_bits, bias=bias, float8=first.float8, dtype=torch.bfloat16)
    x = torch.randn(5, first.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = []
    for part in parts:
        ours = copy.deepcopy(part)
        ours.weight_scale = ours.weight_scale.bfloat16().float()
        want.append(ours(x).chunk(ranks, 1)[rank])
    assert torch.equal(again(x), torch.cat(want, 1))


@needs_vllm
def test_checks__asked_of_the_engine_say_what_the_table_says(python, asked, exports, monkeypatch):
    from mmqc.check.run import check

    monkeypatch.setattr(table, "ask", asked)
    for name in ("W8A8 by token", "W4A8-fp8", "W4A16 asym"):
        _, folder = exports[name]
        engine = f"vllm=={python[1]}"
        found, tabled = check(folder, engine, python=python[0]), check(folder, engine)
        assert found.good, list(map(str, found.findings))
        assert found.linears == tabled.linears
        assert "own Python" in found.source
    assert sys.executable != python[0]
