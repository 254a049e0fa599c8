"""Which function launches a compiled kernel, and with what; ``print`` stands for Triton's function in C."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

direct = pytest.importorskip("mmqc.kernels.shared.direct_launch")
driver = pytest.importorskip("triton.backends.nvidia.driver")


class Described:
    """A tensor descriptor."""

    def __init__(self, base: Any) -> None:
        self.base, self.shape, self.strides = base, tuple(base.shape), base.stride()


def run(**other: Any) -> Any:
    """A launcher as Triton 3.6 makes it."""
    known = {"launch_cooperative_grid": False, "launch_pdl": True, "global_scratch_size": 0, "profile_scratch_size": 0}
    return SimpleNamespace(**{"launch": print, **known, **other})


def of_descriptors(launcher: Any, tensordesc_meta: Any) -> Any:
    """Its launch, where there are tensor descriptors."""

    def inner(*args: Any) -> None:
        launcher(*args, tensordesc_meta)

    return inner


def made(launcher: Any) -> Any:
    return direct.DirectLaunch.of(SimpleNamespace(run=launcher, function="function", packed_metadata="metadata"))


def test_of__takes_the_function_in_c(capsys: pytest.CaptureFixture[str]) -> None:
    made(run()).launch((3, 2, 1), 7, [11, 12])
    assert capsys.readouterr().out.split() == [
        "3",
        "2",
        "1",
        "7",
        "function",
        "False",
        "True",
        "None",
        "None",
        "metadata",
        "None",
        "None",
        "None",
        "11",
        "12",
    ]


def test_described__an_address_has_its_map_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    maps = []

    def make(arg: Any, how: Any) -> list[Any]:
        maps.append((arg.base.data_ptr(), how))
        return [f"map{arg.base.data_ptr()}", *arg.shape, *arg.strides]

    monkeypatch.setattr(driver, "make_tensordesc_arg", make)
    launch = made(run(launch=of_descriptors(print, [{"swizzle": 3}, {"swizzle": 2}])))
    (sizes, first), (_, second) = (launch.described(Described(torch.zeros(4, 32)[:, :n])) for n in (16, 8))
    assert (*sizes,) == (4, 16, 32, 1)
    assert [first(16), first(32), first(16), second(16)] == ["map16", "map32", "map16", "map16"]
    assert maps == [(16, {"swizzle": 3}), (32, {"swizzle": 3}), (16, {"swizzle": 2})]
    launch.launch((1, 1, 1), 7, [first(32), *sizes])
    assert capsys.readouterr().out.split()[-5:] == ["map32", "4", "16", "32", "1"]


@pytest.mark.parametrize(
    "other",
    [
        {"arg_annotations": "a later Triton's"},
        {"global_scratch_size": 8},
        {"profile_scratch_size": 8},
        {"launch": of_descriptors(print, None)},
        {"launch": lambda *args: None},
    ],
)
def test_of__another_launcher_is_called_as_triton_does(other: dict[str, Any]) -> None:
    ran: list[Any] = []

    class Run(SimpleNamespace):
        def __call__(self, *args: Any) -> None:
            ran.append(args)

    launch = made(Run(**vars(run(**other))))
    x = torch.zeros(4, 32)
    sizes, described = launch.described(Described(x))
    assert not sizes
    assert described(48).base.data_ptr() == 48
    assert described(48).shape == (4, 32)
    launch.launch((3, 2, 1), 7, [11])
    assert ran == [(3, 2, 1, 7, "function", "metadata", None, None, None, 11)]
