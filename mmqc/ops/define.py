"""How every mmqc op enters torch: schema, plain-torch reference, fake kernel, optional gradient.

``torch.library.define`` rather than ``custom_op``: the latter imports Dynamo at its first eager call and goes through more
Python in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "mmqc"


def define(schema: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define the functional op ``mmqc::<schema>``; ``reference`` is its eager implementation on every device."""
    name = f"{NAMESPACE}::{schema.split('(', 1)[0]}"
    torch.library.define(name, schema[schema.index("(") :], tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, "CompositeExplicitAutograd", reference)
    torch.library.register_fake(name, fake)
