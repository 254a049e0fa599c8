"""Cases that are quantized by one process and by several, and what has to be equal: ``python many_ranks.py <result> <case> ...``.

Started once for each rank, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import torch
from torch import nn

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))
ROOT = Path(__file__).parents[2]
Case = tuple[nn.Module, Any, Any, dict[str, Any]]  # model, batches, config, further arguments


def _small(config: Any, count: int = 5, **more: Any) -> Case:
    from small_vlm import Small, batches

    return Small(), batches(count), config, more


def _qwen(config: Any, count: int = 4, **more: Any) -> Case:
    from models import tiny_qwen2_vl

    model, batch = tiny_qwen2_vl(depth=1)
    g = torch.Generator().manual_seed(3)
    others = [{**batch, "pixel_values": torch.randn(batch["pixel_values"].shape, generator=g)} for _ in range(count - 1)]
    return model, [batch, *others], config, more


def _mixture(config: Any, count: int = 4) -> Case:
    from mixtures import mixture, tokens

    return mixture().float(), [tokens(seed=seed) for seed in range(count)], config, {}


def _sample(config: Any, count: int = 6) -> Case:
    import mmqc

    sample = mmqc.samples.load("digits-vqa")
    return sample.model, sample.calibration(count), config, {}


def _unlike() -> Case:
    """The last batch calls the blocks with other arguments than the recorded ones: all ranks have to fall back."""
    import mmqc

    model, batches, config, more = _qwen(mmqc.recipes.gptq(4, activation_bits=8))
    batches[-1] = {**batches[-1], "output_attentions": True}
    return model, batches, config, more


def _cases() -> dict[str, Callable[[], Case]]:
    from mmqc import recipes as r
    from mmqc.config import KVSpec

    return {
        "rtn": lambda: _small(r.rtn(8, 8)),
        "rtn without data": lambda: (_small(None)[0], None, r.rtn(4), {}),
        "gptq": lambda: _small(r.gptq(4, 16, activation_bits=8)),
        "gptq, quantized inputs": lambda: _small(r.gptq(4), inputs="quantized"),
        "gptq, asymmetric inputs": lambda: _small(r.gptq(4), inputs="asymmetric"),
        "gptq, few batches": lambda: _small(r.gptq(4), 1),
        "awq": lambda: _small(r.awq(4, 16)),
        "awq, block": lambda: _small(r.awq(3, 16, loss="block", duo=True, symmetric=False)),
        "awq + gptq": lambda: _small(r.awq(3, 16, solver="gptq")),
        "mquant": lambda: _small(r.mquant(4)),
        "smoothquant": lambda: _small(r.smoothquant()),
        "quik": lambda: _small(r.quik()),
        "integer scale": lambda: _small(r.integer_scale(4, 8, 16)),
        "weighted": lambda: _small(r.gptq(4, activation_bits=8), modality_weights={"visual": 0.5, "text": 2.0}),
        "resq": lambda: _qwen(r.resq()),
        "unlike": _unlike,
        "tau": lambda: _qwen(r.rtn(4).replace(kv=KVSpec(1, search="model", rounding="queries"))),
        "experts": lambda: _mixture(r.gptq(4, activation_bits=8)),
        "sample mquant": lambda: _sample(r.mquant(4)),
        "sample awq + gptq": lambda: _sample(r.awq(4, 32, solver="gptq", loss="block")),
    }


CASES = [
    *("rtn", "rtn without data", "gptq", "gptq, quantized inputs", "gptq, asymmetric inputs", "gptq, few batches"),
    *("awq", "awq, block", "awq + gptq"),
    *("mquant", "smoothquant", "quik", "integer scale", "weighted", "resq", "unlike", "tau", "experts"),
]
BROKEN, BRANCHES = "broken", "compiled branches"
ON_THE_SAMPLE = ["sample mquant", "sample awq + gptq"]


def result(name: str, **options: Any) -> dict[str, Any]:
    """What the quantized model is: the digest of every tensor, and of the report what does not tell the time."""
    import mmqc
    from mmqc.checkpoint.checksum import hashes

    model, batches, config, more = _cases()[name]()
    report = mmqc.quantize_(model, config, batches, progress=False, **more, **options)
    layers = [(x.fqn, x.scheme, x.weight_error, x.ranges, x.saturated, x.note) for x in report.layers]
    sqnr = [round(db, 6) for x in report.layers for db in x.sqnr.values()]
    passes = [(p.name, p.sites, p.delta) for p in report.passes]
    refused = sorted(str(r) for r in report.refused)
    found = (hashes(model.state_dict()), report.config.to_dict(), layers, sqnr, passes, refused, report.rewrite_error)
    names = ("tensors", "config", "layers", "sqnr", "passes", "refused", "rewrite error")
    return json.loads(json.dumps(dict(zip(names, found, strict=True))))


def started(size: int, arguments: list[str], script: str = __file__) -> list[forked.Child]:
    """``size`` ranks at work, which end by themselves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    found = []
    for rank in range(size):
        env = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": path}
        found.append(forked.started(script, *arguments, env=env))
    return found


def ended(processes: list[forked.Child], seconds: float = 300) -> list[tuple[int | None, str, str]]:
    """(exit code, stdout, stderr) of each; all of them are killed if one takes longer."""
    end, found = time.monotonic() + seconds, []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(0.1, end - time.monotonic()))
            found.append((process.poll(), out, err))
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.communicate()
    return found


def broken() -> dict[str, Any]:
    """What is raised where the last batch, which is the last rank's, cannot be run, and what is left of the model."""
    import mmqc
    from mmqc import recipes

    model, batches, config, _ = _small(recipes.rtn(8, 8))
    ids = batches[-1]["input_ids"].clone()
    ids[..., -1] = model.fail_on = next(i for i in range(1, 99) if not (ids == i).any())  # type: ignore[assignment]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    start = time.monotonic()
    try:
        mmqc.quantize_(model, config, [*batches[:-1], {**batches[-1], "input_ids": ids}], progress=False)
    except Exception as error:
        seconds, now = time.monotonic() - start, model.state_dict()
        same = before.keys() == now.keys() and all(torch.equal(before[name], now[name]) for name in before)
        return {"error": f"{type(error).__name__}: {error}", "seconds": seconds, "as it was": same}
    return {}


def main(folder: Path, names: list[str]) -> None:
    """Each rank writes what it has; a name with a slash is a saved model of split_ranks.py."""
    import split_ranks

    many = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    if many:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if many else "gloo")
    rank = torch.distributed.get_rank()
    for number, name in enumerate(names):
        others = {BROKEN: broken, BRANCHES: split_ranks.compiled_branches}
        found = others[name]() if name in others else split_ranks.loaded(folder, name) if "/" in name else result(name)
        torch.save(found, folder / f"{number}.{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    sys.stderr.flush()
    os._exit(0)  # where a rank has failed, a group has operations that nobody ends
