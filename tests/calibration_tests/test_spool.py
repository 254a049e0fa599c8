"""What is put comes back as a copy, from memory and from files, and nothing is left."""

from pathlib import Path

import pytest
import torch

from mmqc.calibration.spool import Spool

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
