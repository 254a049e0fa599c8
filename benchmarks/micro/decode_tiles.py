"""Attention of a decode step by numbers of heads, in every tile that was tried: what ``decode_attention.configs`` was read from.

    python -m benchmarks.micro.decode_tiles --out benchmarks/results/decode_tiles.json [--seconds 300]
    TRITON_INTERPRET=1 python -m benchmarks.micro.decode_tiles --dry

Microseconds a layer, by batch x KV heads x queries of each and by tokens of a sequence.  Copies rotate, so that the L2 cache holds
none of them.  A tile: programs of a multiprocessor, tokens, warps, stages.
"""

from __future__ import annotations

import itertools
import json

from benchmarks.gpu_run import Run, arguments, facts
from benchmarks.micro.decode_attention import WIDTH, check, operands
from mmqc.kernels.kv.decode_attention import Config, decode_attention

TOKENS = {330: 384, 1100: 1200, 4000: 4096}  # a sequence's, and those that its cache has room for
CASES = {
    330: (
        (8, 4, 7), (16, 4, 7), (24, 4, 7), (32, 4, 7), (16, 8, 4), (48, 4, 7), (64, 4, 7), (32, 8, 4), (96, 4, 7), (128, 4, 7),
        (64, 8, 4), (16, 32, 1), (128, 8, 4), (64, 32, 1),
    ),
    1100: (
        (4, 4, 7), (8, 4, 7), (1, 32, 1), (16, 4, 7), (24, 4, 7), (32, 4, 7), (16, 8, 4), (48, 4, 7), (8, 32, 1), (96, 4, 7),
        (64, 8, 4),
    ),
    4000: ((16, 4, 7), (32, 4, 7), (64, 8, 4)),
}  # fmt: skip
SHAPES = ((32, 2, 2), (32, 2, 3), (32, 4, 3), (64, 2, 2), (64, 4, 2), (64, 4, 3), (64, 8, 3), (128, 4, 2), (128, 4, 3), (128, 8, 3))
TILES = [Config(per_sm, *shape, by_number=True) for shape, per_sm in itertools.product(SHAPES, (1, 2, 4))]


def measure(run: Run, case: tuple[int, int, int], used: int, tiles: list[Config]) -> dict[str, float]:
    """Of what is chosen, and of every tile."""
    batch, heads, group = case
    room, name = TOKENS[used], "x".join(map(str, case))
    shape = (batch, heads, group, room, used)
    layers = [operands(run, shape) for _ in range(run.copies(4 * batch * heads * room * WIDTH))]
    found = {}
    tries: dict[str, Config | None] = {"mmqc": None} | {str(tuple(tile[:4])): tile for tile in tiles}
    for label, tile in tries.items():

        def time(tile: Config | None = tile) -> float | None:
            return run.microseconds([lambda p=p: decode_attention(*p, config=tile) for p in layers], 8, 0.02)

        run.attempt(f"{name} {used} {label}: check", lambda tile=tile: check(run, f"{name} {used}", layers[0], tile))
        if (us := run.attempt(f"{name} {used} {label}", time)) is not None:
            found[label] = round(us, 2)
    return found


def main() -> None:
    """Time and write."""
    options = arguments(__doc__, 300).parse_args()
    run = Run(options.dry, options.seconds)
    cases = {330: ((2, 1, 3),)} if options.dry else CASES
    for used, case in ((used, case) for used, of in cases.items() for case in of):
        name = f"{'x'.join(map(str, case))}, {used} tokens"
        run.times[name] = measure(run, case, used, TILES[:2] if options.dry else TILES)
        best = min(run.times[name].items(), key=lambda item: item[1], default=None)
        print(name, run.times[name].get("mmqc"), best, flush=True)
        if options.out:
            result = {**facts(run), "times_us": run.times, "failures": run.failures}
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
