"""The tables of engines: complete, readable by form and widths, and refused by name where there is none."""

import pytest

from mmqc.engines import table
from mmqc.engines.table import Answer, Asked, Case, EngineError, Tabled, capability_of, described, engine_version, versions

FP8 = "int4 group128 / float8 token dynamic / pack-quantized"


def test_versions__are_those_that_the_project_supports():
    assert versions() == ["0.32", "0.33"]
    assert engine_version("vllm==0.33.0") == "0.33"


@pytest.mark.parametrize("engine", ["sglang==0.5.23", "vllm==0.20", "vllm", "tgi==1"])
def test_engine_version__says_which_are_known(engine):
    words = "no table of SGLang" if engine.startswith("sglang") else r"known are 'vllm==0.32', 'vllm==0.33'"
    with pytest.raises(EngineError, match=words):
        engine_version(engine)


def test_capability_of__names_and_numbers():
    assert [capability_of(g) for g in ("h100", "H200", "9.0", 80, "l40s")] == [90, 90, 90, 80, 89]
    with pytest.raises(EngineError, match="known are a100"):
        capability_of("v100")


@pytest.mark.parametrize("version", versions())
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_tables__have_an_answer_for_every_form_and_width(version, capability):
    rules = Tabled(version, capability)
    for backend in table.BACKENDS:
        cases = [Case(form, {}, k, n) for form in rules.table["forms"] for k, n in ((2048, 2048), (1025, 1027))]
        answers = rules.answers(cases, backend)
        assert all(a is not None and bool(a.refused) != bool(a.kernel) for a in answers)
        assert len(answers) > 1500
    assert rules.answers([Case("int5 channel / none / pack-quantized", {}, 64, 64)]) == [None]


@pytest.mark.parametrize("version", versions())
def test_tables__what_the_export_relies_on(version):
    hopper, ampere = Tabled(version, 90), Tabled(version, 80)

    def kernel(rules, form, k=3584, n=4608, backend="auto"):
        (answer,) = rules.answers([Case(form, {}, k, n)], backend)
        return answer.kernel or answer.refused, answer.note

    assert kernel(hopper, FP8) == ("CutlassW4A8LinearKernel", "")
    assert kernel(ampere, FP8)[0].startswith("No compressed-tensors compatible scheme")
    static = "int8 channel / int8 tensor static / int-quantized"
    assert kernel(hopper, static) == ("CutlassInt8ScaledMMLinearKernel", "")
    assert kernel(hopper, static, 3420, 1280) == ("CutlassInt8ScaledMMLinearKernel", "triton")
    silent = "int4 group128 / int8 token dynamic / pack-quantized"
    assert kernel(hopper, silent) == ("MacheteLinearKernel", "float inputs")
    assert kernel(hopper, silent, backend="humming") == ("HummingLinearKernel", "")
    assert kernel(hopper, "int4 group32 / int8 token dynamic / pack-quantized") == ("HummingLinearKernel", "")
    assert kernel(hopper, "int4 channel / int8 tensor static / int-quantized")[0].startswith("No compressed-tensors")


def test_described__says_what_runs():
    assert described(Answer("S", "CutlassW4A8LinearKernel"), FP8) == "CutlassW4A8, groups of 128"
    assert described(Answer("S", "MacheteLinearKernel", "float inputs"), FP8) == "Machete, W4A16, groups of 128"
    assert described(Answer(refused="no"), FP8) == "refused: no"
    words = "int8 channel / int8 tensor static / int-quantized"
    assert described(Answer("S", "CutlassInt8ScaledMMLinearKernel", "triton"), words) == "CutlassInt8, by Triton for these widths"


def python_that(does, folder):
    """An interpreter that runs a line of shell, whatever it is asked."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{does}\n")
    python.chmod(0o755)
    return str(python)


def test_asked__an_environment_without_the_engine_is_an_error(tmp_path):
    python = python_that("echo 'ModuleNotFoundError: no vllm here' >&2; exit 1", tmp_path)
    with pytest.raises(EngineError, match=r"could not be asked.*no vllm here"):
        Asked("0.33", 90, python).names("X")


def test_asked__another_version_is_an_error(tmp_path):
    answer = '{"version": "0.31.0", "models": {"X": null}, "answers": []}'
    python = python_that(f"cat > /dev/null; echo '{answer}'", tmp_path)
    with pytest.raises(EngineError, match=r"has vLLM 0\.31\.0, not 0\.33"):
        Asked("0.33", 90, python).names("X")
    assert Asked("0.31", 90, python).names("X") is None
