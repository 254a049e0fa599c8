"""The sum over ranks of a few rows: each program writes its row into the other ranks' memory, and waits for theirs in its own.

    y = Σ_r x_r        float32, in the order of ranks, rounded to x's dtype once: all ranks get equal bits

Shapes:  x, y [M, D] fp16 | bf16, M at most the inboxes' rows, D their width; more rows go by all_reduce_many.py
How:     a word of 32 bits has a number in its low half and, in its high half, how often its row has been sent (modulo 65,536).
         Words arrive whole, so what waits for the count has the number too: there is no barrier, and no fence.  An inbox has two
         halves for odd and even counts.  Who sends for the third time has received the second message of all ranks, which they
         sent after the kernel that read the first had ended: two halves are enough.
Bytes:   4 D (ranks - 1) are sent for a row; where that takes longer than a message's way, the ring's 2 D are faster.
Needs:   memory of the other ranks that a GPU can store to (inboxes.py), and ranks that make the same calls in the same order, as
         for any collective.  A rank that waits longer than some minutes ends with an error of CUDA's.
Source:  flags within the words are NCCL's low-latency protocol; sums by everyone are "one-shot".
"""

# Tuples are compiled, not run.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.rows import all_reduce_many
from mmqc.kernels.shared.device_facts import has_inline_ptx, why_not_here
from mmqc.kernels.shared.early_start import await_inputs, starts_early
from mmqc.kernels.shared.inboxes import MAX_RANKS, Inboxes
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.plan import New, Plan, Refusal, rows_like, why_not_rows


@triton.jit
def inbox_of(peers_ptr, owner, sender, row, D, count, RANKS: tl.constexpr, ROWS: tl.constexpr):
    """Where the owner finds the sender's row."""
    inbox = tl.load(peers_ptr + owner).to(tl.pointer_type(tl.int32))
    return tl.multiple_of(inbox, 16) + (((count & 1) * RANKS + sender) * ROWS + row) * D


@triton.jit
def send_tile(x, peers_ptr, row, D, at, mask, count, rank, RANKS: tl.constexpr, ROWS: tl.constexpr):
    """Write the row x into the inboxes of the other ranks."""
    words = (x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (count << 16)
    for peer in tl.static_range(RANKS):
        if peer != rank:
            tl.store(inbox_of(peers_ptr, peer, rank, row, D, count, RANKS, ROWS) + at, words, mask=mask)


@triton.jit
def receive_tile(inbox, at, mask, count, DTYPE: tl.constexpr, PATIENCE: tl.constexpr, PTX: tl.constexpr):
    """The row that arrives there, as float32; NaN if none does, which only the interpreter lives to see."""
    due = count & 0xFFFF
    words = tl.load(inbox + at, mask=mask, other=0, volatile=True)
    late = tl.max(tl.where(mask, ((words >> 16) & 0xFFFF) ^ due, 0))
    looks = 1
    while (late != 0) & (looks < PATIENCE):
        words = tl.load(inbox + at, mask=mask, other=0, volatile=True)
        late = tl.max(tl.where(mask, ((words >> 16) & 0xFFFF) ^ due, 0))
        looks += 1
    if PTX and late != 0:
        tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [late], dtype=tl.int32, is_pure=False, pack=1)
    part = words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return tl.where(late == 0, part, float("nan"))


@triton.jit
def sum_tile(
    x, peers_ptr, row, D, at, mask, count, rank, RANKS: tl.constexpr, ROWS: tl.constexpr, PATIENCE: tl.constexpr,
    PTX: tl.constexpr,
):
    """Of a row x that has been sent, and the other ranks' rows, rounded to x's dtype."""
    total = tl.zeros(x.shape, tl.float32)
    for sender in tl.static_range(RANKS):
        part = x.to(tl.float32)
        if sender != rank:
            inbox = inbox_of(peers_ptr, rank, sender, row, D, count, RANKS, ROWS)
            part = receive_tile(inbox, at, mask, count, x.dtype, PATIENCE, PTX)
        total += part
    return total.to(x.dtype)


@triton.jit
def all_reduce_kernel(
    x_ptr, y_ptr, peers_ptr, count_ptr, D, stride_x, rank, RANKS: tl.constexpr, ROWS: tl.constexpr, PATIENCE: tl.constexpr,
    PTX: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr,
):
    """One row."""
    if EARLY:
        await_inputs()
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < D
    count = tl.load(count_ptr + row) + 1
    x = tl.load(x_ptr + row * stride_x + at, mask=mask, other=0.0)
    send_tile(x, peers_ptr, row, D, at, mask, count, rank, RANKS, ROWS)
    y = sum_tile(x, peers_ptr, row, D, at, mask, count, rank, RANKS, ROWS, PATIENCE, PTX)
    tl.store(y_ptr + row * D + at, y, mask=mask)
    tl.store(count_ptr + row, count)


def warps_of(block: int) -> int:
    """A thread has about 8 channels: what a row waits for is latency (3,584 channels: 3.3 us with 16 warps, 3.6 with 8; H200)."""
    return max(1, min(16, block // 256))


def why_not(x: Tensor, inboxes: Inboxes) -> str | None:
    """None, or why the rows of x cannot be added up."""
    ranks = inboxes.peers.shape[0]
    return (
        why_not_rows(x)
        or inboxes.why_not(*x.shape, x.dtype, x.device)
        or (None if 2 <= ranks <= MAX_RANKS else f"2 to {MAX_RANKS} ranks, not {ranks}")
        or why_not_here(x, inboxes.peers, inboxes.counts)
    )


def plan(x: Tensor, inboxes: Inboxes, new: New | None = None) -> Plan[Tensor] | Refusal:
    """One launch, of a program a row, or a slot."""
    if reason := why_not(x, inboxes):
        return Refusal(reason)
    (m, width), new = x.shape, new or rows_like(x)
    if m > inboxes.rows:
        launch, y = all_reduce_many.launch(x, inboxes, new)
        return Plan((launch,), y)
    y, block = new(width, x.dtype), triton.next_power_of_2(width)
    early = starts_early(x.device)
    args = dict(x_ptr=x, y_ptr=y, D=width, stride_x=x.stride(0)) | inboxes.args()
    constants = inboxes.constants() | dict(PTX=has_inline_ptx(x.device), EARLY=early, BLOCK=block)
    launch = Launch(
        all_reduce_kernel, (m,), args, constants, ("y_ptr", "count_ptr"), warps_of(block), 1, block_rows=1, early=early
    )
    return Plan((launch,), y)
