"""From a batch of a whole forward to the batches of vision, prefill and decode, and the check that together they are that forward.

vision ─► features ─► prefill ─► cache ─► decode(t_1) ─► decode(t_2) ...        logits = those of forward(prompt, t_1, t_2, ...)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.aot.index_find import ExportError
from mmqc.aot.programs import CacheShape, Decode, Inputs, Prefill, Seam, Vision, logits_of
from mmqc.aot.sensitivity import relative_error
from mmqc.aot.variants import token_inputs

SPARE = 9  # entries of a cache beyond the prompt
STEPS = 3  # tokens that are decoded for the comparison

Program = Callable[..., Mapping[str, Tensor]]


@dataclass
class Steps:
    """The three programs of one model, as modules or as what was made of them; ``told``: see ``find_positions``."""

    model: nn.Module
    seam: Seam | None
    cache: CacheShape
    told: nn.Module | None = None

    def modules(self) -> dict[str, nn.Module]:
        """By name of the program."""
        layers = len(self.cache.keys)
        vision = {} if self.seam is None else {"vision": Vision(self.model, self.seam)}
        return {
            **vision,
            "prefill": Prefill(self.model, self.seam, layers, self.told),
            "decode": Decode(self.model, layers, self.told is None),
        }

    def described(self) -> dict[str, str]:
        """What a package's reader must know of the cache beside its shapes."""
        return {}

    def batches(self, batch: Inputs) -> dict[str, dict[str, Tensor]]:
        """The inputs of each program for this batch, by the model's own forward."""
        seen: dict[str, dict[str, Tensor]] = {}

        def watched(name: str, module: nn.Module) -> Program:
            def run(**inputs: Tensor) -> Mapping[str, Tensor]:
                seen.setdefault(name, inputs)
                return module(**inputs)

            return run

        self.run({name: watched(name, module) for name, module in self.modules().items()}, batch, steps=1)
        return seen

    def run(self, programs: Mapping[str, Program], batch: Inputs, steps: int = STEPS) -> list[Tensor]:
        """Logits of the prompt's last token, and after each of some tokens."""
        ids, mask = batch["input_ids"], batch["attention_mask"]
        capacity = ids.shape[1] + SPARE
        cache = self.cache.empty(len(ids), capacity, ids.device)
        inputs = dict(batch)
        if self.seam is not None:
            features = programs["vision"](**{n: inputs[n] for n in self.seam.sources.values()})
            for name in self.seam.sources.values():  # grids are read again for positions, pixels are not
                if inputs[name].is_floating_point() or inputs[name].dim() > 2:
                    del inputs[name]
            inputs.update(features)
        out = programs["prefill"](**inputs, **cache)
        logits, carried = [out["logits"]], {n: value for n, value in out.items() if n != "logits"}
        full = torch.cat([mask, mask.new_zeros(len(ids), SPARE)], 1)
        for step in range(steps):
            at = ids.shape[1] + step
            full = full.clone()
            full[:, at] = 1
            place = torch.tensor([at], device=ids.device)
            token = next_token(batch, step)
            out = programs["decode"](input_ids=token, attention_mask=full, cache_position=place, **carried, **cache)
            logits.append(out["logits"])
        return logits

    def expected(self, batch: Inputs) -> list[Tensor]:
        """The same by the model's forward without a cache."""
        length = batch["input_ids"].shape[1]
        longer: dict[str, Tensor] = dict(batch)
        for step in range(STEPS):
            for name in token_inputs(longer):
                value = longer[name]
                more = next_token(batch, step) if name == "input_ids" else torch.full_like(value[:, :1], name == "attention_mask")
                longer[name] = torch.cat([value, more.to(value)], 1)
        logits = logits_of(self.model(**longer, use_cache=False))
        return [logits[:, length - 1 + step] for step in range(STEPS + 1)]

    def check(self, programs: Mapping[str, Program], batch: Inputs, bound: float) -> float:
        """The largest error of the programs together.

        Raises:
            ExportError: it is above ``bound``.
        """
        got, expected = self.run(programs, batch), self.expected(batch)
        errors = [relative_error(a, b) for a, b in zip(got, expected, strict=True)]
        if not max(errors) <= bound:
            where = "prefill" if not errors[0] <= bound else "decode"
            raise ExportError(
                [f"{where} differs from the model's forward by {max(errors):.1e} for {tuple(batch['input_ids'].shape)}"]
            )
        return max(errors)


def next_token(batch: Inputs, step: int) -> Tensor:
    """A token for each row: one that is text in the prompt."""
    ids: Any = batch["input_ids"]
    return ids[:, -1 - step : ids.shape[1] - step]
