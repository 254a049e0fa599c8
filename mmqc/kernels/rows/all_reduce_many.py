"""The sum over ranks of many rows: a row goes into the other ranks' memory as it is, and a flag for all of it behind.

    y = Σ_r x_r        float32, in the order of ranks, rounded to x's dtype once: all ranks get equal bits

Shapes:  x, y [M, D] fp16 | bf16, any M, D the inboxes' width
How:     a program sends a row, a fence and a flag that counts its rows, and waits for the others' flags.  It goes on with every
         SLOTS-th row.  A slot has two halves for odd and even counts: who sends for the third time has received the second row of
         all ranks, which they sent after they had read the first.  A flag may be one ahead of what is waited for.
Bytes:   2 D (ranks - 1) are sent for a row: of two ranks as many as a ring sends, of more too many (inboxes.py).
Why:     of 917 rows of 8,192 this is bandwidth, and NCCL has half of NVLink's (docs/explanation/scale.md).
Needs:   what all_reduce.py does; program i waits for program i of the other ranks alone, so those of less than all programs fit
         on the device.
Source:  data, fence, flag is NCCL's "simple" protocol.
"""

# Tuples are compiled, not run.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.shared.device_facts import has_inline_ptx
from mmqc.kernels.shared.inboxes import Inboxes
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.plan import New


@triton.jit
def slot_of(
    peers_ptr, owner, sender, slot, D, count, DTYPE: tl.constexpr, RANKS: tl.constexpr, SLOTS: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """Where the owner finds the sender's row."""
    numbers = (tl.load(peers_ptr + owner) + NUMBERS).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(numbers, 16) + (((count & 1) * RANKS + sender) * SLOTS + slot) * D


@triton.jit
def flag_of(peers_ptr, owner, sender, slot, SLOTS: tl.constexpr, FLAGS: tl.constexpr):
    """Where it says how many it has had."""
    return (tl.load(peers_ptr + owner) + FLAGS).to(tl.pointer_type(tl.int32)) + sender * SLOTS + slot


@triton.jit
def send_row(
    x, peers_ptr, slot, D, at, mask, count, rank, RANKS: tl.constexpr, SLOTS: tl.constexpr, NUMBERS: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """Write the row x into the other ranks' slots, and then that it is there."""
    for peer in tl.static_range(RANKS):
        if peer != rank:
            tl.store(slot_of(peers_ptr, peer, rank, slot, D, count, x.dtype, RANKS, SLOTS, NUMBERS) + at, x, mask=mask)
    tl.debug_barrier()  # one thread raises the flag, for what all have written
    for peer in tl.static_range(RANKS):
        if peer != rank:
            tl.atomic_xchg(flag_of(peers_ptr, peer, rank, slot, SLOTS, FLAGS), count, sem="release", scope="sys")


@triton.jit
def await_row(flag, count, PATIENCE: tl.constexpr, PTX: tl.constexpr):
    """Whether it did not come, which only the interpreter lives to see."""
    early = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - count
    looks = 1
    while (early < 0) & (looks < PATIENCE):
        early = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - count
        looks += 1
    tl.debug_barrier()  # one thread has seen the flag, all read behind it
    if PTX and early < 0:
        tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [early], dtype=tl.int32, is_pure=False, pack=1)
    return early < 0


@triton.jit
def sum_row(
    x, peers_ptr, slot, D, at, mask, count, rank, RANKS: tl.constexpr, SLOTS: tl.constexpr, NUMBERS: tl.constexpr,
    FLAGS: tl.constexpr, PATIENCE: tl.constexpr, PTX: tl.constexpr,
):
    """Of a row x that has been sent, and the other ranks' rows, rounded to x's dtype."""
    total = tl.zeros(x.shape, tl.float32)
    for sender in tl.static_range(RANKS):
        part = x.to(tl.float32)
        if sender != rank:
            late = await_row(flag_of(peers_ptr, rank, sender, slot, SLOTS, FLAGS), count, PATIENCE, PTX)
            sent = slot_of(peers_ptr, rank, sender, slot, D, count, x.dtype, RANKS, SLOTS, NUMBERS)
            part = tl.load(sent + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)  # past what a cache has of before
            part = tl.where(late, float("nan"), part)
        total += part
    return total.to(x.dtype)


@triton.jit
def all_reduce_many_kernel(
    x_ptr, y_ptr, peers_ptr, count_ptr, M, D, stride_x, rank, RANKS: tl.constexpr, SLOTS: tl.constexpr, COUNTS: tl.constexpr,
    NUMBERS: tl.constexpr, FLAGS: tl.constexpr, PATIENCE: tl.constexpr, PTX: tl.constexpr, BLOCK: tl.constexpr,
):
    """Every SLOTS-th row."""
    slot = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < D
    count = tl.load(count_ptr + COUNTS + slot)
    row = slot.to(tl.int64)
    for _ in range(slot, M, SLOTS):
        count += 1
        x = tl.load(x_ptr + row * stride_x + at, mask=mask, other=0.0)
        send_row(x, peers_ptr, slot, D, at, mask, count, rank, RANKS, SLOTS, NUMBERS, FLAGS)
        y = sum_row(x, peers_ptr, slot, D, at, mask, count, rank, RANKS, SLOTS, NUMBERS, FLAGS, PATIENCE, PTX)
        tl.store(y_ptr + row * D + at, y, mask=mask)
        row += SLOTS
    tl.store(count_ptr + COUNTS + slot, count)


def warps_of(block: int) -> int:
    """A thread has 32 channels: programs wait, and those of a multiprocessor do so side by side."""
    return max(1, min(16, block // 1024))


def launch(x: Tensor, inboxes: Inboxes, new: New) -> tuple[Launch, Tensor]:
    """A program a slot, and what it fills."""
    m, width = x.shape
    y, block = new(width, x.dtype), triton.next_power_of_2(width)
    args = dict(x_ptr=x, y_ptr=y, M=m, D=width, stride_x=x.stride(0)) | inboxes.args()
    constants = inboxes.constants_of_many() | dict(PTX=has_inline_ptx(x.device), BLOCK=block)
    grid = (min(m, inboxes.slots),)
    return Launch(all_reduce_many_kernel, grid, args, constants, ("y_ptr", "count_ptr"), warps_of(block), 1), y
