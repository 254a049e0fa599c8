"""Ranks of which one fails: ``python failing_ranks.py <how> <case> <resume folder> <result>``, started as many_ranks.py is.

    kill.7.1        rank 1 kills itself in its 7th message
    none            nobody fails

What a rank raised goes to stderr, and whether its model is as it was; the exit code says whose error it is.
"""

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))
OWN, OTHERS = 7, 8  # exit codes


def kill_at(number: int) -> None:
    """This process ends in the middle of its work, without a word."""
    from mmqc.distributed.group import Group

    calls, plain = itertools.count(1), Group.shared

    def shared(self: Any, *args: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, *args)

    Group.shared = shared  # type: ignore[method-assign]


def main(how: str, case: str, folder: str, out: str) -> int:
    """The exit code of a rank."""
    import many_ranks

    import mmqc
    from mmqc.checkpoint.checksum import hashes
    from mmqc.distributed.watch import RankError

    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model, batches, config, more = many_ranks._cases()[case]()
    if how.startswith("kill") and how.endswith(f".{rank}"):
        kill_at(int(how.split(".")[1]))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    start = time.monotonic()
    try:
        mmqc.quantize_(model, config, batches, progress=False, resume_dir=folder or None, **more)
    except Exception as error:
        seconds, now = time.monotonic() - start, model.state_dict()
        same = before.keys() == now.keys() and all(torch.equal(before[name], now[name]) for name in before)
        print(f"{type(error).__name__}: {error}", f"after {seconds:.1f} s", "as it was" if same else "changed", file=sys.stderr)
        return OTHERS if isinstance(error, RankError) else OWN
    if rank == 0:
        Path(f"{out}.{size}").write_text(json.dumps(hashes(model.state_dict())))
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # a group with an operation on its way is not waited for
