"""What is put comes back as a copy, from memory and from files, and nothing is left."""

from pathlib import Path

import pytest
import torch

from mmqc.calibration.spool import AHEAD, Spool

CPU = torch.device("cpu")


@pytest.mark.parametrize("files", [False, True])
def test_spool__gives_copies_back(tmp_path: Path, files: bool) -> None:
    spool = Spool(tmp_path / "there" if files else None)
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    ticket, other = spool.put(x.T), spool.put(x)
    got = spool.get(ticket, CPU)
    assert torch.equal(got, x.T)
    got.zero_()
    assert torch.equal(spool.get(ticket, CPU), x.T)
    assert [spool.get(spool.put(value), CPU) for value in (3, None, "a")] == [3, None, "a"]
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2 * files
    spool.drop(ticket)
    spool.drop(3)
    assert len(list(tmp_path.rglob("*.safetensors"))) == files
    assert torch.equal(spool.get(other, CPU), x)
    spool.close()
    assert list(tmp_path.rglob("*")) == ([tmp_path / "there"] if files else [])


@pytest.mark.gpu
def test_spool__of_an_accelerator_gives_back_what_was_put_however_far_it_is_behind() -> None:
    spool, device = Spool(), torch.device("cuda", torch.cuda.current_device())
    busy, tickets, values = torch.randn(4096, 4096, device=device), [], []
    for number in range(3 * AHEAD):
        busy = (busy @ busy).clamp_(-1, 1)  # the accelerator is behind
        values.append(busy[number] + number)
        tickets.append(spool.put(values[-1]))
    for _ in range(2):
        for ticket, value in zip(tickets, values, strict=True):
            got = spool.get(ticket, device)
            assert torch.equal(got, value)
            got.fill_(torch.nan)  # another's memory, later
    assert torch.equal(spool.get(tickets[5], CPU), values[5].cpu())
    spool.drop(tickets[5])
