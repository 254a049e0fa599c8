"""`generate` with a compiled decode step whose graphs are counted."""

from typing import Any

from transformers import CompileConfig


def counting() -> tuple[Any, list[Any]]:
    """A backend that runs what it is given, and the graphs that it was given."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        del inputs
        graphs.append(graph)
        return graph

    return backend, graphs


def compiled(backend: Any) -> dict[str, Any]:
    config = CompileConfig(backend=backend, mode=None, fullgraph=True)
    config._compile_all_devices = True  # type: ignore[assignment]
    return {"do_sample": False, "compile_config": config}
