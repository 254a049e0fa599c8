"""What Gluon calls otherwise from Triton 3.9 on, which took the older names away.

async_load      (desc, coordinates, barrier, tile)    by TMA from memory to shared memory; the barrier is told
async_store     (desc, coordinates, tile)             from shared memory to memory
reinterpret     (tile, dtype, shape, layout)          shared memory, read as another tile
"""

# Gluon is known when it runs.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any

from triton.experimental.gluon.language import shared_memory_descriptor as block
from triton.experimental.gluon.language.nvidia.hopper import tma

async_load: Any = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store: Any = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
reinterpret: Any = block.reinterpret if hasattr(block, "reinterpret") else block._reinterpret
