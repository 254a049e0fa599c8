"""Inside the block a graph is called as it is, outside it and in other threads by Inductor's manager of CUDA graphs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

from mmqc.lowering.plain_calls import plain_calls


def test_plain_calls__in_the_block_and_its_thread_alone() -> None:
    manager: Any = SimpleNamespace(ids_to_funcs={3: SimpleNamespace(model=lambda inputs: [sum(inputs)])}, graph=None)

    def run() -> Any:
        return CUDAGraphTreeManager.run(manager, [1, 2], 3)  # type: ignore[arg-type]

    with plain_calls():
        assert run() == [3]
        with plain_calls():
            assert run() == [3]
        assert run() == [3]
        with ThreadPoolExecutor(1) as other, pytest.raises(AssertionError, match="after shutdown"):
            other.submit(run).result()
    with pytest.raises(AssertionError, match="after shutdown"):
        run()
