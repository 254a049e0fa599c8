"""Finding the fastest tile of a matmul, and the file of measured tiles that kernels then use."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu_run import Calls, Run, relative_error
from mmqc.kernels.matmul import configs as tiles
from mmqc.kernels.matmul.configs import MatmulConfig as Tile
from mmqc.kernels.shared.device_facts import capability, gpu_name, multiprocessors

FEW = (  # rows, up to 64: BN, BK, warps, stages
    (64, 128, 4, 4),
    (64, 128, 2, 4),
    (32, 128, 2, 4),
    (128, 64, 4, 5),
    (128, 128, 4, 3),
    (64, 256, 4, 3),
    (32, 256, 2, 3),
)
WIDE = ((128, 128, 8, 3),)  # above 16 rows also this
SOME_HUNDRED = (  # of rows: BM, BN, BK, warps, stages
    (64, 64, 64, 4, 4),
    (64, 64, 128, 4, 3),
    (64, 128, 64, 4, 4),
    (64, 128, 128, 4, 3),
    (128, 64, 64, 4, 4),
    (128, 64, 128, 4, 3),
    (128, 128, 64, 4, 4),
    (128, 128, 64, 8, 3),
)
# Of more rows, as SOME_HUNDRED.
WEIGHTS_ALONE = ((64, 128, 64, 4, 4), (64, 128, 64, 8, 3), (128, 128, 64, 8, 3), (64, 64, 128, 4, 3), (128, 64, 64, 4, 4))
PACKED = (
    (128, 128, 64, 4, 4),
    (128, 128, 64, 4, 3),
    (256, 64, 64, 4, 3),
    (256, 128, 64, 8, 3),
    (128, 128, 64, 8, 4),
    (256, 128, 128, 8, 2),
    (128, 128, 32, 4, 6),
)
CODES = (  # variant, BM, BN, tail, warps, stages, group, programs of a multiprocessor
    ("nested", 128, 128, 0, 4, 3, 8, 2),
    ("descriptors", 128, 128, 0, 4, 3, 8, 2),
    ("nested", 128, 256, 0, 8, 4, 8, 1),
    ("descriptors", 128, 256, 0, 8, 3, 8, 1),
    ("descriptors", 128, 256, 0, 8, 3, 16, 1),
    ("descriptors", 256, 128, 0, 8, 3, 8, 1),
    ("nested", 128, 128, 32, 4, 3, 8, 2),
    ("nested", 128, 128, 64, 4, 2, 8, 2),
    ("descriptors", 128, 128, 32, 8, 5, 8, 1),
    ("descriptors", 128, 128, 64, 8, 4, 8, 1),
    ("descriptors", 64, 128, 32, 4, 3, 8, 2),
    ("descriptors", 64, 128, 0, 4, 4, 8, 2),
)
UNPACK = Tile(128, 128, 64, 8, 3, variant="unpack")  # the weight is written out; the product has the tile of its codes


def fastest(run: Run, case: Any, calls: Calls, tries: Iterable[Tile], where: str, end: float) -> Tile | None:
    """The fastest tile; wrong and impossible ones are reported.

    Args:
        run: takes the time, and the failures.
        case: the first of ``calls`` reads ``case.config`` and writes ``case.out``.
        calls: the same product on copies of the weight.
        tries: tiles; the first that works says what is right.
        where: what a failure is called.
        end: on the monotonic clock, when to stop.
    """
    times: dict[Tile, float] = {}
    want = torch.empty(0)
    for tile in dict.fromkeys(tries):
        if time.monotonic() > end or (run.dry and len(times) > 1):
            break
        case.config = tile
        try:
            case.out.fill_(math.nan)
            calls[0]()
            want = case.out.clone() if not times else want
            if relative_error(case.out[:, :4096], want[:, :4096]) > 4e-3:
                raise ValueError("wrong result")
            times[tile] = run.microseconds(calls, replays=7, budget=0.02)
        except Exception as error:  # a tile may not fit the device
            run.failures.append(f"{where} {tile}: {type(error).__name__}: {str(error)[:80]}")
    case.config = None
    run.tiles[where] = [{"us": round(us, 2), **tile.to_dict()} for tile, us in sorted(times.items(), key=lambda item: item[1])]
    return min(times, key=times.__getitem__) if times else None


def write_tiles(run: Run, path: Path, best: dict[str, Tile]) -> None:
    """Add tiles to the file, which kernels then use."""
    old = json.loads(path.read_text()).get("configs", {}) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    chip = {"capability": capability(run.device), "multiprocessors": multiprocessors(run.device)}
    file = {
        "device": gpu_name(run.device),
        "chip": chip,
        "triton": triton.__version__,
        "torch": torch.__version__,
        "configs": old | {k: t.to_dict() for k, t in best.items()},
    }
    path.write_text(json.dumps(file, indent=1) + "\n")
    tiles.measured.cache_clear()


def worth_tuning(op: str, m: int, shape: str) -> bool:
    """Whether these rows come to this linear: images of 3,600 patches in prompts of 917 tokens, and up to 128 tokens a step."""
    if op.startswith("weight"):
        return m > 16 or shape.startswith("lm")
    if m <= 128:
        return shape.startswith("lm")
    return {1024: not shape.startswith("vit"), 4096: shape.startswith("vit")}.get(m, True) and (
        m not in (1024, 4096) or not op.endswith("fp8")
    )


def candidates(op: str, m: int, n: int, k: int) -> list[Tile]:
    """Tiles worth a try; those that do not fit the device fail and are skipped."""
    packed = "int4" in op
    stored = -(-k // 2) if packed else k
    if m <= 64:
        block_m = 8 if m <= 8 else 16 if m <= 16 else 64
        sizes = FEW if m <= 16 else FEW + WIDE
        return in_parts([(block_m, *size) for size in sizes], m, n, stored, rounds=(2, 4, 6), steps=2)
    if op.startswith("packed"):
        found = [Tile(128, 128, 64, 4, 4, group_m=g, split_k=4, per_sm=2, variant="registers") for g in (4, 8, 16)]
        return [*found, UNPACK]
    if op.startswith("pingpong"):
        shapes = ((128, 128, 4, 8), (128, 128, 4, 16), (64, 128, 4, 8), (64, 256, 4, 8))
        shapes += ((128, 256, 8, 8), (256, 128, 8, 8)) if op != "pingpong_mixed" else ()  # which takes turns
        return [Tile(bm, bn, 128, w, 8, group_m=g, split_k=4, variant="pingpong") for bm, bn, w, g in shapes]
    if op.startswith("weight"):
        return [*(Tile(*size, split_k=parts, variant="columns") for size in WEIGHTS_ALONE for parts in (1, 2, 4)), UNPACK]
    found = in_parts(SOME_HUNDRED, m, n, stored, rounds=(1, 2, 3), steps=4) if m <= 512 else []
    if packed:
        found += [Tile(*size, variant="columns") for size in PACKED]
        return [*found, Tile(128, 256, 64, 8, 3, variant="rows"), UNPACK]  # with the tile of the codes' op, tuned before
    return found + [
        Tile(bm, bn, 128, warps, stages, group_m=group, per_sm=per_sm, variant=variant, tail=tail)
        for variant, bm, bn, tail, warps, stages, group, per_sm in CODES
    ]


def in_parts(sizes: Iterable[tuple[int, ...]], m: int, n: int, stored: int, *, rounds: tuple[int, ...], steps: int) -> list[Tile]:
    """Tiles (BM, BN, BK, warps, stages) with K whole, and in so many parts that they go round so often, of ``steps`` or more."""
    found = []
    for bm, bn, bk, warps, stages in sizes:
        tiles = -(-m // bm) * -(-n // bn)
        for split in sorted({1, *(max(1, round(132 * times / tiles)) for times in rounds)}):
            if split <= max(1, stored // bk // steps):
                found.append(Tile(bm, bn, bk, warps, stages, split_k=split, variant="columns"))
    return found
