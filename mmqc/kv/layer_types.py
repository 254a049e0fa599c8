"""Of which kind each layer of a decoder's cache is, and what transformers makes that kind with.

    transformers 5.17    one dict of arguments for all layers; layers that share another's keys and values are left out
    transformers 5.23    a dict for each layer; such layers are of the kind "dummy"

Whoever makes a cache asks here, and has a dict of its own for each layer.
"""

from __future__ import annotations

from typing import Any

from mmqc.versions import find

PLACE = "transformers.cache_utils:get_layer_types_and_kwargs"


def layer_types(text: Any) -> list[tuple[str, dict[str, Any]]]:
    """Kind and arguments of each layer that a cache of the decoder with the config ``text`` has."""
    kinds, arguments = find(PLACE, needed="a quantized KV cache")(text)
    each = [arguments] * len(kinds) if isinstance(arguments, dict) else arguments
    return [(kind, dict(given)) for kind, given in zip(kinds, each, strict=True)]


def kinds_of(text: Any) -> list[str]:
    """The kinds alone."""
    return [kind for kind, _ in layer_types(text)]
