"""A rank that says what it gets from others, and fails if it is told to: ``python group_messages.py <how>``, see many_ranks.py."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))


def values(rank: int, size: int) -> dict[str, object]:
    """Every kind of message, as plain data."""
    from mmqc.distributed.group import together

    found: dict[str, object] = {}
    with together() as ranks:
        items = list(range(7))
        found["mine"] = list(ranks.mine(items))
        found["collected"] = list(ranks.collected([f"item {i}" for i in ranks.mine(items)]))
        made = {
            "x": torch.arange(6.0).view(2, 3).T,
            "codes": torch.ones(2, dtype=torch.float8_e4m3fn),
            "none": torch.empty(0, 3),
            "n": 3,
        }
        got = ranks.shared(lambda: made, owner=size - 1)
        found["shared"] = {k: (v.float().tolist(), str(v.dtype), list(v.shape)) if k != "n" else v for k, v in got.items()}
        own = {"a": torch.full((2, 2), 10.0**rank, dtype=torch.float64), "count": torch.tensor([rank + 1])}
        parts = own if rank else {"count": own["count"]}  # rank 0 has seen no "a"
        found["summed"] = {k: v.tolist() for k, v in ranks.summed({k: v.clone() for k, v in parts.items()}).items()}
        owned = ranks.summed({k: v.clone() for k, v in parts.items()}, {"a": 0, "count": 1})
        found["owned"] = {k: v.tolist() for k, v in owned.items()}
        found["largest"] = {k: v.tolist() for k, v in ranks.largest(dict(parts)).items()}
        found["owners"] = ranks.owners([5.0, 3.0, 3.0, 1.0])
    return found


def main(how: str) -> int:
    """The exit code."""
    import json

    from mmqc.distributed.group import together
    from mmqc.distributed.watch import RankError

    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if how == "values":
        print(json.dumps(values(rank, size)))
        return 0
    start = time.monotonic()
    if how == "absent":
        import mmqc.distributed.group as module

        module.MEET = timedelta(seconds=3)
        if rank == 1:
            time.sleep(20)
            return 0
    try:
        with together() as ranks:
            ranks.collected([rank])
            if rank == 1 and how == "raise":
                raise ValueError("this rank\nhas had enough")
            if rank == 1 and how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            ranks.shared(lambda: 1, owner=1)
    except RankError as error:
        print(f"{time.monotonic() - start:.1f}|{error}")
    except ValueError:
        print("mine")
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)
