"""Which tile a matmul kernel takes: a small explicit table, overridden by what was measured on the very GPU.

    config(op, m, n, k, device) = configs/<gpu>.json [op/bucket(m)/n/k]  or  that of a GPU alike  or  table(op, bucket(m), n, k)

Why:     nothing is timed at run time, so a launch is deterministic and can be captured in a CUDA graph.  The JSON files are
         written by ``benchmarks/micro/linear.py --tune``; a file that does not exist is no error, the table always answers.
Alike:   of the same compute capability and as many multiprocessors, as an H100 SXM and an H200: memory differs, which moves the
         tiles of products little.
Ops:     scaled_int8 scaled_fp8, and pingpong_int8 pingpong_fp8 for the same product where kernels of pingpong_matmul.py may be
         taken too, pingpong_mixed for ResQ's; packed_int4 packed_mixed, of packed weights, where those of packed_matmul.py may;
         scaled_int4 (weights packed, int8 activations) scaled_int4_fp8 weight_int{2,3,4,8}; byte_int8, where that of
         byte_matmul.py may be taken for weight_int8
         scaled_int{4,8}_group{,_float}: with integer or float scales per group
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmqc.kernels.shared.device_facts import capability, gpu_name, multiprocessors
from mmqc.ops.pack import stretch

OPS = (
    "scaled_int8",
    "scaled_fp8",
    "pingpong_int8",
    "pingpong_fp8",
    "pingpong_mixed",
    "packed_int4",
    "packed_mixed",
    "byte_int8",
    "scaled_int4",
    "scaled_int4_fp8",
    "scaled_int8_group",
    "scaled_int4_group",
    "scaled_int8_group_float",
    "scaled_int4_group_float",
    "weight_int2",
    "weight_int3",
    "weight_int4",
    "weight_int8",
)
VARIANTS = ("rows", "columns", "descriptors", "nested", "pingpong", "registers", "unpack")
PERSISTENT = ("descriptors", "nested")
BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
WRITTEN_OUT_ABOVE = 256  # rows, of weights that alone are quantized
FOLDER = Path(__file__).parents[1] / "configs"


@dataclass(frozen=True)
class MatmulConfig:
    """One tile and how it is run.

    ``block_k`` counts stored weights along K: bytes of int8 or fp8, bytes of two codes each for packed ones.
    ``variant``: "rows" accumulates x Wᵀ, "columns" W xᵀ (weights are the operand that may stay in registers),
    "descriptors", "nested" x Wᵀ with TMA in a persistent grid: tile and K loop flattened into one, or two nested loops;
    "pingpong" with copies, products and epilogues in warps of their own (pingpong_matmul.py); "registers" W xᵀ, unpacked in
    registers (packed_matmul.py, byte_matmul.py); "unpack" writes the weight out once
    and multiplies that (scaled_int4*: with the tile of its codes' op, whatever this one is).
    ``per_sm``: programs of a persistent grid per multiprocessor.  ``tail``: columns of a tile beside ``block_n``, of persistent
    scaled_int8 and scaled_fp8 alone; 128 + 32 makes 160, of which 8 are 1,280: where few tiles go round, widths between powers
    of two leave fewer multiprocessors without one.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    split_k: int = 1
    per_sm: int = 1
    variant: str = "rows"
    tail: int = 0

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k", "num_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"MatmulConfig.{name} = {value}: a power of two")
        if self.block_m < 8 or self.block_n < 16 or self.block_k < 16:
            raise ValueError(f"MatmulConfig: block_m is at least 8, block_n and block_k 16, not {self}")
        if min(self.num_stages, self.group_m, self.split_k, self.per_sm) < 1:
            raise ValueError(f"MatmulConfig: num_stages, group_m, split_k and per_sm are at least 1, not {self}")
        if self.tail and (self.tail not in (16, 32, 64, 128) or self.variant not in PERSISTENT):
            raise ValueError(
                f"MatmulConfig.tail = {self.tail}: 0, or 16 to 128 columns of a persistent tile, not {self.variant}"
            )
        if self.variant not in VARIANTS:
            raise ValueError(f"MatmulConfig.variant = {self.variant!r}: one of {VARIANTS}")

    def with_variant(self, variant: str) -> MatmulConfig:
        """Run in another way."""
        return dataclasses.replace(self, variant=variant)

    def unsplit(self) -> MatmulConfig:
        """One program adds up all of K."""
        return dataclasses.replace(self, split_k=1)

    def with_stages(self, at_most: int) -> MatmulConfig:
        """No deeper pipeline than this."""
        return dataclasses.replace(self, num_stages=min(self.num_stages, at_most))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MatmulConfig:
        """The inverse of ``to_dict``; unknown keys are errors."""
        unknown = set(values) - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(f"MatmulConfig has no {sorted(unknown)}")
        return cls(**values)


def bucket(m: int) -> int:
    """The smallest bucket that holds m rows; the last one for all larger m."""
    return next((b for b in BUCKETS if m <= b), BUCKETS[-1])


def key(op: str, m: int, n: int, k: int) -> str:
    """The name of a shape in the JSON files."""
    return f"{op}/{bucket(m)}/{n}/{k}"


@functools.cache
def measured(device: torch.device) -> dict[str, MatmulConfig]:
    """What was tuned on this GPU or, for shapes that were not, on one alike, by ``key``."""
    chip, found = {"capability": capability(device), "multiprocessors": multiprocessors(device)}, {}
    files = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}
    own = files.pop(gpu_name(device), {"configs": {}})
    for file in (*(f for f in files.values() if f["chip"] == chip), own):
        found |= file["configs"]
    return {k: MatmulConfig.from_dict(v) for k, v in found.items()}


def split_for(tiles: int, steps: int, slots: int, at_most: int = 16, least: int = 4) -> int:
    """Parts of K so that about ``slots`` programs run, each with at least ``least`` steps."""
    return max(1, min(at_most, slots // max(tiles, 1), steps // least))


def _scaled_large(op: str, m: int, n: int, k: int, device: torch.device) -> MatmulConfig:
    hopper = capability(device) >= 90
    if k % (32 if op.startswith("scaled_int4") else 16):
        # Rows that do not start at multiples of 16 bytes are loaded in pieces: smaller tiles, or the addresses spill.
        return MatmulConfig(64, 128, 32, 8, 3, variant="columns" if op.startswith("scaled_int4") else "rows")
    if op.startswith("scaled_int4"):
        # The unpacked copy costs N K (1/2 + 1 + 1) bytes of traffic: 3 % of the product at 8,192 rows, 12 % at 2,048.
        # fp8 codes take three times the instructions of int8 ones in the loop, which halves the product.
        if m >= (4096 if op == "scaled_int4" else 1024):
            return MatmulConfig(128, 128, 64, 8, 3, variant="unpack")
        if hopper:
            # One warpgroup a program, two programs a multiprocessor: one unpacks while the other multiplies.
            return MatmulConfig(128, 128, 64, 4, 4, variant="columns")
        return MatmulConfig(128, 128, 32, 8, 3, variant="columns")
    if hopper and -(-m // 128) * -(-n // 256) < multiprocessors(device):
        # Too few large tiles to go round.
        if -(-m // 128) * -(-n // 128) < multiprocessors(device):
            return MatmulConfig(64, 128, 128, 4, 4, variant="nested", per_sm=2)
        return MatmulConfig(128, 128, 128, 4, 3, variant="nested", per_sm=2)
    if hopper and op == "scaled_int8":
        # Triton waits for every int32 product before it goes on (WGMMAPipeline.cpp, rule 2.1: only float32 accumulators stay in
        # flight), so two programs of one warpgroup, one of which multiplies while the other waits, beat one program of two.
        return MatmulConfig(128, 128, 128, 4, 3, variant="descriptors", per_sm=2)
    if hopper:
        return MatmulConfig(128, 256, 128, 8, 3, variant="descriptors")
    return MatmulConfig(128, 128, 64, 8, 3)


def _pingpong(m: int, n: int, device: torch.device) -> MatmulConfig:
    """Two consumers of 128 x 128, or of half of that where there are few such tiles."""
    block_m = 128 if -(-m // 128) * -(-n // 128) >= multiprocessors(device) else 64
    return MatmulConfig(block_m, 128, 128, 4, 8, split_k=4, variant="pingpong")


def _packed_few(m: int, n: int, k: int, device: torch.device) -> MatmulConfig:
    """Tiles of all rows, up to 128 of them: of 64 columns where those of 128 would not go round.

    A decoder of 7B (H200; gate and up, down, qkv, o) takes 26, 15, 6 and 6 us at 32 rows where tiles of pointers take 34, 17, 9
    and 8; 28, 17, 7 and 6 for 32, 18, 8 and 7 at 64; 37, 22, 8 and 7 for 60, 35, 30 and 15 at 128; 58, 35, 14 and 11 for 101, 37,
    28 and 11 at 256.  Long rows whose tiles neither fill the machine nor can be cut stay with pointers: q, k, v of half of 72B
    (5,120 x 8,192) take 12 us for 14 at 64 rows; its down (8,192 x 14,784), whose 128 tiles do, 24 us from registers for 30.
    """
    units, tiles = multiprocessors(device), -(-n // 64)
    few, idle = tiles <= units, units < 2 * tiles < 1.8 * units
    if m <= 64 and idle and k > 6144:
        return _packed_skinny(m, n, k // 2, device)
    if m <= 32:
        rows = 16 if m <= 16 else 32
        return MatmulConfig(rows, 64, 128, 4, 8 if few else 5, split_k=16, per_sm=1 if few else 2, variant="registers")
    if m <= 64:
        block_n, block_k, slots = (64, 128, 8) if few else (128, 64, 6)
        return MatmulConfig(64, block_n, block_k, 4, slots, split_k=16, per_sm=1 if few else 2, variant="registers")
    if m <= 128:
        return MatmulConfig(128, 64, 128, 4, 5, split_k=8, variant="registers")
    wide = 10 * -(-m // 128) * -(-n // 128) >= 9 * units
    return MatmulConfig(128, 128 if wide else 64, 64, 4, 4 if wide else 5, split_k=8, per_sm=2, variant="registers")


def _bytes_few(m: int) -> MatmulConfig:
    """Tiles of all rows, up to 128 of them: the fastest, or nearly, of eight for five shapes of a 7B and a 72B decoder (H200)."""
    rows = min(max(m, 16), 128)
    return MatmulConfig(rows, 128, 64, 4, 4 if rows == 128 else 6, split_k=8, per_sm=2, variant="registers")


def _group_large(op: str, m: int, n: int, k: int, device: torch.device) -> MatmulConfig:
    """Sums of one group and of all groups are both in registers: at most 64 and 128 a thread (group_scaled_matmul.py)."""
    packed = op.startswith("scaled_int4")
    if k % (32 if packed else 16):
        return MatmulConfig(64, 128, 32, 8, 3, variant="columns")
    if capability(device) < 90:
        return MatmulConfig(128, 128, 32 if packed else 64, 8, 3, variant="columns")
    if packed and m < 2048:
        return MatmulConfig(128, 128, 128, 8, 3, variant="columns")
    variant = "unpack" if packed else "nested"
    if -(-m // 128) * -(-n // 256) < multiprocessors(device):
        return MatmulConfig(128, 128, 128, 8, 4, variant=variant)
    return MatmulConfig(128, 256, 128, 8, 4, variant=variant)


def _scaled(op: str, m: int, n: int, k: int, device: torch.device) -> MatmulConfig:
    if op.startswith("pingpong"):
        return _pingpong(m, n, device)
    if op == "byte_int8":
        return _bytes_few(m)
    if op.startswith("packed"):
        many = MatmulConfig(128, 128, 64, 4, 4, split_k=4, per_sm=2, variant="registers")
        return _packed_few(m, n, k, device) if m <= 256 else many
    slots = 2 * multiprocessors(device)
    packed = op.startswith("scaled_int4")
    if m > 256:
        return (_group_large if "_group" in op else _scaled_large)(op, m, n, k, device)
    stored = (k + 1) // 2 if packed else k
    if m > 64:
        block_k = 64
        tiles = -(-m // 64) * -(-n // 128)
        return MatmulConfig(
            64, 128, block_k, 4, 4, split_k=split_for(tiles, stored // block_k, slots, 4), variant="columns"
        )
    return (_packed_skinny if op == "scaled_int4" else _skinny)(m, n, stored, device)


def _packed_skinny(m: int, n: int, stored: int, device: torch.device) -> MatmulConfig:
    """The rule for 4-bit codes.

    Of the decoders of four models and of halves of two (H200; ``benchmarks.micro.linear --tune``), 21 shapes, this takes 1.02, 1.04
    and 1.02 times what the fastest of all tiles takes at 1, 16 and 64 rows; ``_skinny`` 1.17, 1.23 and 1.22 times.
    """
    units = multiprocessors(device)
    if m > 16:
        tiles = -(-n // 64)
        if tiles > 3 * units:
            return MatmulConfig(64, 128, 128, 4, 3, variant="columns")
        if tiles > 2 * units:  # all at once, three a multiprocessor: with four stages two have room
            return MatmulConfig(64, 64, 128, 4, 3, variant="columns")
        return MatmulConfig(64, 64, 128, 4, 4, split_k=split_for(tiles, -(-stored // 128), 2 * units), variant="columns")
    steps, rows = -(-stored // 256), 8 if m <= 8 else 16
    if rows == 16 and n >= 96 * units:
        return MatmulConfig(16, 64, 256, 4, 3, split_k=split_for(-(-n // 64), steps, 2 * units, least=2), variant="columns")
    split = split_for(-(-n // 32), steps, (4 if rows == 8 else 2) * units, least=2)
    return MatmulConfig(rows, 32, 256, 2, 3, split_k=split, variant="columns")


def _skinny(m: int, n: int, stored: int, device: torch.device) -> MatmulConfig:
    """Bandwidth-bound: enough bytes in flight, few instructions a byte.

    Tiles of 8 rows, or 2 warps, keep Triton to mma.sync, whose operands need 2.2 to 2.5 instructions an int4 code; with
    wgmma (64 rows of weights and 4 warps) they need 3.8, and 4.8 is what the machine has at 3 TB/s.
    """
    slots = 4 * multiprocessors(device)
    block_n, block_k = 64, 128
    split = split_for(-(-n // block_n), -(-stored // block_k), slots)
    if m <= 8:
        return MatmulConfig(8, block_n, block_k, 4, 4, split_k=split, variant="columns")
    if m <= 16:
        return MatmulConfig(16, block_n, block_k, 2, 4, split_k=split, variant="columns")
    return MatmulConfig(32 if m <= 32 else 64, block_n, block_k, 4, 3, split_k=split, variant="columns")


def _weight_only(op: str, m: int, n: int, k: int, device: torch.device) -> MatmulConfig:
    stored = stretch(k, int(op.removeprefix("weight_int")))
    slots = 3 * multiprocessors(device)
    if m > WRITTEN_OUT_ABOVE:
        return MatmulConfig(128, 128, 64, 8, 3, variant="unpack")
    if m > 64:
        block_m = 64 if m <= 128 else 128
        if op in ("weight_int2", "weight_int3"):  # a step is four times as many columns of x
            tiles = -(-m // 64) * -(-n // 128)
            return MatmulConfig(64, 128, 32, 8, 2, split_k=split_for(tiles, stored // 32, slots, 4), variant="columns")
        tiles = -(-m // block_m) * -(-n // 128)
        return MatmulConfig(block_m, 128, 64, 8, 3, split_k=split_for(tiles, stored // 64, slots, 4), variant="columns")
    return (_bytes_skinny if op == "weight_int8" else _skinny)(m, n, stored, device)


def _bytes_skinny(m: int, n: int, stored: int, device: torch.device) -> MatmulConfig:
    """The rule for weights in 8 bits: up to 16 rows what was tuned for six of eight linears and rows of a 7B decoder.

    Heads of 92,553 to 152,064 columns take 186 us for the 202 of ``_skinny``, 417 for 455 and 137 for 168 at one row, 192 for 206
    at 16, 305 for 329 and 631 for 736 at 64 (H100; ``python -m benchmarks.micro.head``).
    """
    units = multiprocessors(device)
    if m <= 16:
        split = split_for(-(-n // 32), -(-stored // 256), 6 * units, least=2)
        return MatmulConfig(8 if m <= 8 else 16, 32, 256, 2, 3, split_k=split, variant="columns")
    if -(-n // 64) > 3 * units:
        return MatmulConfig(64, 128, 128, 4, 3, variant="columns")
    return _skinny(m, n, stored, device)


def table(op: str, m: int, n: int, k: int, device: torch.device) -> MatmulConfig:
    """The answer for every shape on every device, from rules of thumb."""
    if op not in OPS:
        raise ValueError(f"op = {op!r}: one of {OPS}")
    return _table(op, bucket(m), n, k, device)


@functools.lru_cache(maxsize=1024)
def _table(op: str, m: int, n: int, k: int, device: torch.device) -> MatmulConfig:
    return (_weight_only if op.startswith("weight") else _scaled)(op, m, n, k, device)


def config(op: str, m: int, n: int, k: int, device: torch.device) -> MatmulConfig:
    """The tuned config of this GPU for this shape, else the table's."""
    return measured(device).get(key(op, m, n, k)) or table(op, m, n, k, device)
