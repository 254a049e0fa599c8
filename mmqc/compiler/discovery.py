"""Makes ``torch.compile(backend="mmqc")`` work from a source tree that was never installed.

An installed mmqc has the entry point ``torch_dynamo_backends: mmqc`` in its metadata and needs nothing of this.  Otherwise
a metadata finder offers the same entry point, so that Dynamo, when somebody imports it, finds the backend by itself:
registering with it directly would make ``import mmqc`` import Dynamo (about one second).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Any

GROUP = "torch_dynamo_backends"
NAME = "mmqc"
TARGET = "mmqc.backend:backend"


class _Distribution(metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        """The two metadata files that importlib asks for."""
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0.0.0\n",
            "entry_points.txt": f"[{GROUP}]\n{NAME} = {TARGET}\n",
        }.get(filename)

    def locate_file(self, path: Any) -> Any:
        """No file belongs to it."""
        raise FileNotFoundError(path)


class _Finder(metadata.DistributionFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Finds metadata only, no modules."""
        return

    def find_distributions(self, context: Any = metadata.DistributionFinder.Context()) -> Iterable[_Distribution]:  # noqa: B008
        """The stand-in, for everybody who asks for all distributions or for this one."""
        return [_Distribution()] if context.name in (None, NAME) else []


def installed() -> bool:
    """Whether some distribution already declares the backend."""
    try:
        found = metadata.distribution(NAME).entry_points
    except metadata.PackageNotFoundError:
        return False
    return any(e.group == GROUP and e.name == NAME for e in found)


def announce() -> None:
    """Let Dynamo find the backend under its name; does nothing where the metadata already say so."""
    if installed():
        return
    sys.meta_path.append(_Finder())
    dynamo = sys.modules.get("torch._dynamo")
    # Dynamo reads the entry points once; if it may have done so already, tell it directly.
    if dynamo is not None:
        backend = importlib.import_module("mmqc.backend").backend
        if NAME not in dynamo.list_backends(exclude_tags=()):
            dynamo.register_backend(backend, name=NAME)
