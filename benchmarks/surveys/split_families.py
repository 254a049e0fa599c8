"""Which models can be split into vision, prefill and decode: compared with their forwards in eager mode, before any trace.

    python -m benchmarks.surveys.split_families --families FILE.py [--out results.json] [NAME ...]

FILE.py as for export_families.py.  Compared are the prompt's last logits and those of three more tokens, on the family's example
and on batches of other sizes that mmqc makes of it, padded on the left.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import runpy
from pathlib import Path
from typing import Any

import torch
import transformers

from mmqc.aot.packed_programs import steps_of
from mmqc.aot.variants import fixed_images, variants
from mmqc.nn.modality import visual_token_ids

BOUND = 1e-4


@torch.no_grad()
def family(build: Any) -> dict[str, Any]:
    """One row."""
    model, inputs = build()
    model, batch = model.eval(), dict(inputs)
    split, ids = steps_of(model, batch), visual_token_ids(model)
    errors, sizes_refused = [], 0
    for case in (batch, *variants(batch, ids)[0], *fixed_images(batch, ids)):
        if not bool(case["attention_mask"][:, -1].all()):
            continue
        try:
            model(**case)
        except Exception:  # whatever a model's code says to sizes that it does not take
            sizes_refused += 1
            continue
        errors.append(split.check(split.modules(), case, float("inf")))
    row = {"error": max(errors), "cases": len(errors), "sizes_refused": sizes_refused}
    wrong = f"prefill and decode differ from the forward by {max(errors):.0e}"
    return row if max(errors) <= BOUND else {**row, "refused": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    families = runpy.run_path(str(options.families))["FAMILIES"]
    rows = []
    for name in options.names or list(families):
        try:
            rows.append({"family": name, **family(families[name])})
        except Exception as error:
            rows.append({"family": name, "refused": f"{type(error).__name__}: {error}".replace("\n", " ")[:300]})
        print(json.dumps(rows[-1]), flush=True)
    facts = {
        "device": "cpu",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "command": f"python -m benchmarks.surveys.split_families --families {options.families.name}",
    }
    if options.out:
        options.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
