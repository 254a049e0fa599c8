"""What cannot be done with an adapter."""

from __future__ import annotations

from mmqc.errors import MmqcError


class AdapterError(MmqcError, ValueError):
    """An adapter does not fit the model, or cannot be folded or merged; names the layer and the reason."""
