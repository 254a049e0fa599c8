"""A quantized linear as a checkpoint's config describes it, in a few words that tables are looked up by.

    int4 group128 / float8 token dynamic / pack-quantized         weights / inputs / how they are stored
    int8 channel / int8 tensor static / int-quantized
    awq int4 group128 asym        gptq int4 group128              formats that have one kind of inputs

Widths come in classes, by the largest power of two up to 256 that divides them: all that kernels ask of a width is a multiple.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LARGEST = 256  # multiple of a width that anything depends on
CLASSES = tuple(1 << i for i in range(LARGEST.bit_length()))  # 1, 2, ... 256
Settings = Mapping[str, Any]


def width_class(width: int) -> int:
    """0 to 8: the exponent of the largest power of two, up to 256, that divides ``width``."""
    return min(width & -width, LARGEST).bit_length() - 1


def of_group(group: Settings, default_format: str | None = None) -> str:
    """The form that a group of a compressed-tensors config describes."""
    parts = [_args(group.get("weights")), _args(group.get("input_activations"), inputs=True)]
    if group.get("output_activations"):
        parts.append(f"outputs {_args(group['output_activations'], inputs=True)}")
    return " / ".join([*parts, str(group.get("format") or default_format)])


def of_config(config: Settings) -> str:
    """The form of every linear of an AWQ or GPTQ checkpoint."""
    method, group = config["quant_method"], int(config.get("group_size", config.get("q_group_size", -1)) or -1)
    bits = config.get("bits", config.get("w_bit", 4))
    strategy = "channel" if group < 0 else f"group{group}"
    symmetric = config.get("sym", True) if method == "gptq" else not config.get("zero_point", True)
    words = [method, f"int{bits}", strategy, *([] if symmetric else ["asym"]), *(["desc_act"] if config.get("desc_act") else [])]
    return " ".join(words)


def quantizes_inputs(form: str) -> bool:
    """Whether the form's config asks for quantized inputs."""
    return " / " in form and form.split(" / ")[1] != "none"


def group_of(form: str) -> int:
    """Input channels of a weight's scale; 0: one scale an output, or in all."""
    words = [w for w in form.split(" / ")[0].split() if w.startswith("group")]
    return int(words[0].removeprefix("group") or 0) if words else 0


def weight_bits(form: str) -> int:
    """Of a stored weight."""
    kind = next(w for w in form.split(" / ")[0].split() if w[:3] in ("int", "flo"))
    return int(kind.removeprefix("int").removeprefix("float"))


def _args(args: Settings | None, inputs: bool = False) -> str:
    if not args:
        return "none"
    strategy = str(args.get("strategy") or _default_strategy(args, inputs))
    if strategy in ("group", "tensor_group"):
        strategy += str(args.get("group_size") or "")
    elif strategy == "block":
        strategy += "x".join(map(str, args.get("block_structure") or ()))
    words = [f"{args.get('type', 'int')}{args.get('num_bits', 8)}", strategy]
    if inputs:
        dynamic = args.get("dynamic", False)
        words.append(dynamic if isinstance(dynamic, str) else "dynamic" if dynamic else "static")
    words += [] if args.get("symmetric", True) else ["asym"]
    actorder = args.get("actorder")
    return " ".join([*words, *([f"actorder={actorder}"] if actorder in ("group", "dynamic", True) else [])])


def _default_strategy(args: Settings, inputs: bool) -> str:
    """What compressed-tensors takes where a config has no strategy."""
    group = args.get("group_size")
    if group is not None:
        return "group" if group > 0 else "channel"
    return "token" if inputs and args.get("dynamic") else "tensor"
