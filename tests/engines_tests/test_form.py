"""Forms: what the words say, whatever is left out of a config."""

import pytest

from mmqc.engines import form


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"weights": {"num_bits": 4, "group_size": 128}}, "int4 group128 / none / pack-quantized"),
        (
            {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}, "format": "x"},
            "float8 block128x128 / none / x",
        ),
        (
            {"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": {"num_bits": 8, "dynamic": True}},
            "int8 channel / int8 token dynamic / pack-quantized",
        ),
        (
            {"weights": {"num_bits": 4, "strategy": "channel", "symmetric": False, "actorder": "group"}},
            "int4 channel asym actorder=group / none / pack-quantized",
        ),
        (
            {"weights": {"num_bits": 8}, "output_activations": {"num_bits": 8}},
            "int8 tensor / none / outputs int8 tensor static / pack-quantized",
        ),
    ],
)
def test_of_group__defaults_are_compressed_tensors_own(group, words):
    assert form.of_group(group, "pack-quantized") == words


def test_of_group__defaults_agree_with_the_package():
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="pip install 'mmqc[formats]'")
    for args in ({"num_bits": 4, "group_size": 32}, {"num_bits": 8, "group_size": -1}, {"num_bits": 8}):
        theirs = quantization.QuantizationArgs.model_validate(args)
        words = form.of_group({"weights": args}, "x").split(" / ")[0].split()[1]
        assert words.rstrip("0123456789") == theirs.strategy.value


def test_of_config__awq_and_gptq():
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    gptq = {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True, "desc_act": True}
    assert form.of_config(awq) == "awq int4 group128 asym"
    assert form.of_config(gptq) == "gptq int8 channel desc_act"


def test_words__say_groups_bits_and_inputs():
    words = "int4 group128 asym / float8 token dynamic / pack-quantized"
    assert (form.group_of(words), form.weight_bits(words), form.quantizes_inputs(words)) == (128, 4, True)
    words = "awq int4 channel"
    assert (form.group_of(words), form.weight_bits(words), form.quantizes_inputs(words)) == (0, 4, False)


@pytest.mark.parametrize(("width", "place"), [(1, 0), (3420, 2), (4304, 4), (1152, 7), (3584, 8), (18944, 8)])
def test_width_class__is_the_largest_power_of_two(width, place):
    assert form.width_class(width) == place
    assert width % form.CLASSES[place] == 0
