"""One layer of the quantized cache: visual tokens packed, text and generated tokens as they are, exact while they arrive.

    packed   segments, one for each call that brought visual tokens: words, scales and counts per sequence (ops/kv_pack.py)
    text     keys, values [B, H, 1 + T, D]: sequence b has its tokens at 1 ... text_count[b]; place 0 takes what is not stored
             with KVSpec.text_bits, the last tokens alone, in a ring, and the older ones rounded (cache_text.py)

Why:     attention does not depend on the order of its keys, so each sequence keeps its own tokens side by side: padding is not
         stored, decode needs no mask, and the lengths are tensors: a decode step is the same graph at any length.
State:   all of it is here, per request; a decode step changes it in place, so compiled graphs and CUDA graphs find it.
"""

# transformers declares a layer's tensors as `Tensor | None`, and index tensors as LongTensor.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportArgumentType=false, reportReturnType=false
from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

from mmqc.config import KVSpec
from mmqc.kv.room import TIMES, room_for
from mmqc.kv.text import OlderText, push, refill
from mmqc.ops.kv_round_keys import DAMPING, SWEEPS
from mmqc.traced import is_traced

ROOM = 128  # text tokens for which there is room at first where nobody says how many will come
PADDING, TEXT, VISUAL = range(3)


@dataclass
class Segment:
    """Visual tokens that arrived in one call (ops/kv_attention.py says what the tensors are)."""

    k_words: Tensor
    k_scale: Tensor
    k_offset: Tensor
    v_words: Tensor
    v_scale: Tensor
    v_offset: Tensor
    count: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """By name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass
class Arrival:
    """What the tokens of one call are, the same for every layer.

    Attributes:
        kinds: uint8 [B, L], PADDING, TEXT or VISUAL.
        order: int64 [B, N], where the visual tokens are; the first ``visual_count`` [B] int32 of a row count.
        place: int64 [B, L], the text tokens counted from 1; 0 for the others.
        text_count: int32 [B].
        most_visual, most_text: the largest counts; upper bounds where a compiled graph cannot know.
    """

    kinds: Tensor
    order: Tensor
    visual_count: Tensor
    place: Tensor
    text_count: Tensor
    most_visual: int
    most_text: int

    @classmethod
    def of(cls, kinds: Tensor) -> Arrival:
        """Sort the tokens; waits for the device once, unless compiled."""
        visual, text = kinds == VISUAL, kinds == TEXT
        counts = torch.stack((visual.sum(1), text.sum(1))).to(torch.int32)
        most = [kinds.shape[1]] * 2 if is_traced() else counts.amax(1).tolist()
        order = torch.argsort(visual.logical_not().to(torch.uint8), dim=1, stable=True)[:, : most[0]]
        return cls(kinds, order, counts[0], text.cumsum(1) * text, counts[1], most[0], most[1])


@dataclass
class Shared:
    """What the layers of one cache share.

    Attributes:
        context: the model's ``ModalityContext``.
        arrival: of the call in progress.
        history: kinds [B, L] of the tokens of each call of more than one token, and the length of the cache before it.
        cut: in the search for tau, the token of the prompt from which on packed tokens are seen.
        offloads: whether a layer is in host memory while it is not its turn.
    """

    context: Any
    arrival: Arrival | None = None
    history: list[tuple[int, Tensor]] = field(default_factory=list)
    cut: int | None = None
    offloads: bool = False


class PackedLayer(StaticLayer):
    """One layer of the cache.

    Args:
        spec: bits and ranges.
        tau: of this layer.
        shared: of this cache.
        first: whether this is the layer that looks at the arriving tokens for all of them.
        max_cache_len: tokens that the cache must have room for, visual ones included; None lets it grow.
    """

    is_croppable = True

    def __init__(self, spec: KVSpec, tau: tuple[float, float], shared: Shared, first: bool, max_cache_len: int | None) -> None:
        super().__init__(max_cache_len or 0)
        self.spec, self.tau, self.shared, self.first = spec, tau, shared, first
        self.limit = max_cache_len
        self.empty = True
        self.segments: list[Segment] = []
        self.spare: list[Segment] = []
        self.older: OlderText | None = None
        self.used = 0
        self.rooms: list[int] = []  # tokens that a segment has room for

    @property
    def is_compileable(self) -> bool:
        """A compiled step can neither make room nor move the cache."""
        return self.limit is not None and not self.shared.offloads

    # --- what transformers asks ---------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take over shapes, dtype and device; the room for text is allocated when its length is known."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size, self.num_heads, _, self.k_head_dim = key_states.shape
        self.v_head_dim = value_states.shape[-1]
        spec, window = self.spec, 0
        if spec.text_bits < 16:
            window, self.older = (spec.text_window, OlderText.like(key_states, value_states, spec.text_bits, spec.text_block))
        self.keys, self.values = (
            keep_address(t.new_zeros((self.batch_size, self.num_heads, 1 + window, t.shape[-1])))
            for t in (key_states, value_states)
        )
        self.cumulative_length = keep_address(torch.zeros((), dtype=torch.int64, device=self.device))
        self.text_count = keep_address(torch.zeros(self.batch_size, dtype=torch.int32, device=self.device))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Handles for the attention function of cache_attention.py, which stores the tokens when it has attended to them."""
        del args, kwargs
        if not self.is_initialized:
            _initialize(self, key_states, value_states)
        return Cached(self, key_states), Cached(self, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """A mask over the cache and the new tokens; for one new token none is used, and its shape must not change."""
        if self.empty:
            return query_length, 0
        return (1 if query_length == 1 else int(self.cumulative_length) + query_length), 0

    def get_max_length(self) -> int:
        """Tokens it has room for; -1 if it grows."""
        return self.limit or -1

    def reset(self) -> None:
        """Forget all tokens; the memory stays, and the next prompt uses it again as far as its shapes are the same."""
        self.segments, self.spare, self.empty, self.used = [], self.segments or self.spare, True, 0
        if self.is_initialized:
            self.cumulative_length.zero_()
            self.text_count.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes what row beam_idx[b] is, in place."""
        for tensor in self.tensors() if self.is_initialized else ():
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times."""
        self.map_rows(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """These rows alone."""
        self.map_rows(lambda t: t[indices.to(t.device)])

    def offload(self) -> None:
        """To host memory, but for the counts."""
        self.move(torch.device("cpu"))

    def prefetch(self) -> None:
        """To the device."""
        if self.is_initialized:
            self.move(self.device)

    def move(self, device: torch.device) -> None:
        """What grows with the tokens."""
        for part in [*self.segments, *([] if self.older is None else [self.older])]:
            for name, tensor in part.tensors().items():
                if tensor.dim() > 1:
                    setattr(part, name, tensor.to(device, non_blocking=True))
        self.keys, self.values = (t.to(device, non_blocking=True) for t in (self.keys, self.values))

    def leave(self) -> None:
        """Its turn is over."""
        if self.shared.offloads:
            self.offload()

    # --- storing ------------------------------------------------------------------------------------------------------

    def append(self, k: Tensor, v: Tensor) -> None:
        """One more text token [B, H, 1, D] in every sequence."""
        if not is_traced():
            self.make_room(1)
        self.put_text(self.text_count.long()[:, None] + 1, k, v)
        self.text_count.add_(1)
        self.cumulative_length.add_(1)

    def store(self, k: Tensor, v: Tensor, arrival: Arrival, moment: Tensor | None = None) -> None:
        """Tokens [B, H, L, D] of any kind: visual ones packed as a segment, text scattered to its places.

        ``moment`` is of the queries (query_moment.py), for a spec that rounds by them.
        """
        spec = self.spec
        if arrival.most_visual:
            where = (self.with_room(arrival.order), arrival.visual_count, spec.bits)
            packed = (*self.pack_keys(k, where, moment), *torch.ops.mmqc.kv_pack(v, *where, spec.values, spec.shrink_values, True))
            self.segments = [*self.segments, self.kept(Segment(*packed, count=arrival.visual_count.clone()))]
        if not is_traced():
            self.used = 0 if self.empty else int(self.text_count.max())
        self.make_room(arrival.most_text, 0 if self.limit is None else self.limit - k.shape[2])
        start = self.text_count.long()[:, None]
        self.put_text(torch.where(arrival.place > 0, arrival.place + start, 0), k, v)
        self.text_count.add_(arrival.text_count)
        self.cumulative_length.add_(k.shape[2])
        self.empty = False

    def pack_keys(self, k: Tensor, where: tuple[Tensor, Tensor, int], moment: Tensor | None) -> tuple[Tensor, ...]:
        """Words, scales and offsets of the keys at ``where``: order, counts, bits."""
        spec, bits = self.spec, self.spec.bits
        if spec.rounding == "nearest":
            return torch.ops.mmqc.kv_pack(k, *where, spec.keys, spec.shrink_keys, False)
        if moment is None:
            raise ValueError(
                "this cache rounds keys for the queries that calibration saw, but this model has seen none: quantize_ it with "
                "calibration=..., or use KVSpec(rounding='nearest')"
            )
        return torch.ops.mmqc.kv_round_keys(k, *where[:2], moment, bits, spec.shrink_keys, DAMPING, SWEEPS)

    def put_text(self, place: Tensor, k: Tensor, v: Tensor) -> None:
        """New tokens [B, H, L, D], ``place`` [B, L]: the number of each among the text tokens, from 1; 0 where it is no text."""
        if self.older is not None:
            push(self.keys, self.values, self.older, self.text_count, place, k, v)
            return
        at = place[:, None, :, None]
        self.keys.scatter_(2, at.expand_as(k), k)
        self.values.scatter_(2, at.expand_as(v), v)

    def with_room(self, order: Tensor) -> Tensor:
        """[B, N]; in a cache of a fixed length with more columns, which no count reaches.

        As many as the segment had that was here before ``reset``, if that has room: compiled steps know its shape and its place.
        """
        if self.limit is None or is_traced():
            return order
        number, tokens = len(self.segments), order.shape[1]
        before, room = self.rooms[number] if number < len(self.rooms) else 0, room_for(tokens)
        room = before if tokens <= before <= TIMES * room else room
        self.rooms[number:] = [room, *self.rooms[number + 1 :]]
        return torch.nn.functional.pad(order, (0, room - tokens))

    def kept(self, segment: Segment) -> Segment:
        """The segment, where the one of before ``reset`` was if that was like it: CUDA graphs know the place."""
        number, new = len(self.segments), segment.tensors()
        old = self.spare[number].tensors() if number < len(self.spare) else {}
        if not is_traced() and all(
            name in old and old[name].shape == t.shape and old[name].device == t.device for name, t in new.items()
        ):
            for name, tensor in new.items():
                old[name].copy_(tensor)
            return self.spare[number]
        self.spare = []
        for tensor in new.values():
            keep_address(tensor)
        return segment

    def make_room(self, tokens: int, later: int = 0) -> None:
        """Let ``tokens`` more fit, and ``later`` more after them; eager calls count how many may be there."""
        self.used += tokens
        window = 0 if self.older is None else self.spec.text_window
        room = self.keys.shape[2] - 1 if self.older is None else self.older.room + window
        if self.used + later > room:
            need = self.used + (later if self.limit is not None else max(ROOM, room))
            more = (room_for(need) if self.limit is not None and room > window else need) - room  # not only as much a second time
            if self.older is None:
                self.keys, self.values = (
                    keep_address(torch.nn.functional.pad(t, (0, 0, 0, more))) for t in (self.keys, self.values)
                )
            else:
                self.older.grow(more)
                for tensor in self.older.tensors().values():
                    keep_address(tensor)

    def window(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and int32 counts of the text tokens in the model's dtype."""
        count = self.text_count if self.older is None else self.text_count.clamp(max=self.spec.text_window)
        return self.keys[:, :, 1:], self.values[:, :, 1:], count

    def remove(self, length: int, text: Tensor, visual: list[Tensor]) -> None:
        """Cut to ``length`` tokens, of which ``text`` [B] and, segment by segment, ``visual`` [B] go."""
        if self.shared.offloads:
            self.prefetch()
        left = self.text_count - text.to(self.text_count)
        if self.older is not None:
            refill(self.keys, self.values, self.older, self.text_count, left)
        self.text_count.copy_(left)
        for segment, gone in zip(self.segments, visual, strict=True):
            segment.count.sub_(gone.to(segment.count))
        self.segments = [s for s in self.segments if bool(s.count.any())]
        self.cumulative_length.fill_(length)
        self.leave()

    def tensors(self) -> list[Tensor]:
        """Everything with a batch axis."""
        parts = [*self.segments, *([] if self.older is None else [self.older])]
        return [self.keys, self.values, self.text_count, *(t for part in parts for t in part.tensors().values())]

    def map_rows(self, change: Any) -> None:
        """Replace every tensor with a batch axis."""
        if not self.is_initialized:
            return
        self.keys, self.values, self.text_count = (keep_address(change(t)) for t in (self.keys, self.values, self.text_count))
        for part in [*self.segments, *([] if self.older is None else [self.older])]:
            for name, tensor in part.tensors().items():
                setattr(part, name, keep_address(change(tensor)))
        self.batch_size = self.keys.shape[0]


# Never in a graph: a compiler makes one of tensors that are equal at first.
_initialize: Any = torch.compiler.disable(PackedLayer.lazy_initialization)


class Cached:
    """The new keys or values on their way from the cache to the attention function, with the layer that they belong to."""

    def __init__(self, layer: PackedLayer, states: Tensor) -> None:
        self.layer, self.states = layer, states

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a packed KV cache has no {name!r}: this layer's attention is not {ATTENTION!r}, which alone can read it; "
            "prepare the model with mmqc.quantize_(model, mmqc.recipes.calibquant()), and do not set another attention after that"
        )


ATTENTION = "mmqc_packed_kv"


def keep_address(tensor: Tensor) -> Tensor:
    """Tell compiled graphs that this memory stays where it is."""
    if not is_traced():
        torch._dynamo.mark_static_address(tensor)
    return tensor
