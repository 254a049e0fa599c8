"""The weights of a package's programs in one safetensors file, each tensor once.

    tensors         by the names that a program has for them: model.lm_head.weight
    __metadata__    where a name stands for a tensor under another one: "decode:model.tied.weight" -> "model.lm_head.weight"

Without it every program holds its own: prefill and decode the whole decoder twice, in the file and on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmqc.aot.index_find import ExportError

if TYPE_CHECKING:
    from torch.export import ExportedProgram


@dataclass(frozen=True)
class Weights:
    """Tensors of several programs.

    Attributes:
        tensors: by name.
        elsewhere: the name of the tensor that "program:name" stands for, where that is not ``name``.
    """

    tensors: Mapping[str, Tensor]
    elsewhere: Mapping[str, str]

    @classmethod
    def of(cls, programs: Mapping[str, ExportedProgram], wanted: Mapping[str, Collection[str]]) -> Weights:
        """What these programs ask for, by program.

        Raises:
            ExportError: a tensor is not known by its name, or lies in memory in an order that a file does not keep.
        """
        tensors, elsewhere = dict[str, Tensor](), dict[str, str]()
        known: dict[tuple[object, ...], str] = {}
        for program, names in wanted.items():
            given = {**programs[program].state_dict, **programs[program].constants}
            for name in sorted(names):
                tensor = given.get(name)
                if not isinstance(tensor, Tensor):
                    raise ExportError([f"{program}: {name} is made while the program is compiled: export without weights="])
                if not tensor.is_contiguous():
                    raise ExportError([f"{program}: {name} has the strides {tensor.stride()}: export without weights="])
                same = (tensor.data_ptr(), tensor.dtype, *tensor.shape) if tensor.numel() else (program, name)
                at = known.setdefault(same, name if name not in tensors else f"{program}:{name}")
                tensors[at] = tensor.detach()
                if at != name:
                    elsewhere[f"{program}:{name}"] = at
        return cls(tensors, elsewhere)

    @classmethod
    def read(cls, path: Path, device: torch.device) -> Weights:
        """A file, onto a device."""
        with safe_open(path, "pt", device=str(device)) as file:
            return cls({name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {})  # noqa: SIM118  (it is no dictionary)

    def write(self, path: Path) -> None:
        """Write the file; parts of one memory are written as tensors of their own."""
        whole = {n: t if t.untyped_storage().nbytes() == t.nbytes else t.clone() for n, t in self.tensors.items()}
        save_file(whole, path, dict(self.elsewhere))

    def free(self) -> None:
        """Give a device's memory back, whoever has the tensors: before pytorch #194480 a program keeps it."""
        for storage in (tensor.untyped_storage() for tensor in self.tensors.values()):
            if storage.resizable():  # a file mapped into memory is not
                storage.resize_(0)

    def of_program(self, program: str, names: Collection[str]) -> dict[str, Tensor]:
        """A program's tensors by its own names."""
        return {name: self.tensors[self.elsewhere.get(f"{program}:{name}", name)] for name in names}
