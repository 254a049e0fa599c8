"""mmqc against other libraries: the same checkpoint, batches, linears and questions; writes docs/results/peers.md.

    python -m benchmarks.peers.compare                  everything that is not on file
    python -m benchmarks.peers.compare --again mmqc     measure mmqc's side anew, the peers' from the file; `--draw` the page alone

Weights alone, of the linears of the language model; 64 batches of calibration, 300 questions, float32, one thread.  Peers run in
environments of their own, which are built here from the pinned requirements beside this file.  NLL and KL are of the right
answers' tokens under teacher forcing; an interval is of the paired difference over questions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import mmqc
from benchmarks.peers import drawn
from benchmarks.peers.answers import answers, scores
from benchmarks.peers.cases import CASES, RECIPES, UNRUN, Case, keys, name_of, verdict
from benchmarks.peers.export import calibration_of, export, unchanged
from benchmarks.peers.reasons import REASONS
from examples.studies.study import about, table
from mmqc.calibration.sequential import Inputs
from mmqc.samples.scoring import bootstrap

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks/results/peers.json"
PAGE = ROOT / "docs/results/peers.md"
CALIBRATION, QUESTIONS = 64, 300
SIDES = ("mmqc", "peers")


def environment(peer: str, folder: Path) -> Path:
    """The Python of the environment that ``peer`` runs in; made if it is not there."""
    python = folder / peer / "bin/python"
    if not python.exists():
        venv.create(folder / peer, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", HERE / f"{peer}.txt"], check=True)
    return python


def theirs(case: Case, data: Path, environments: Path) -> dict[str, list[float]]:
    """A peer's NLL and KL, question by question, on what ``data`` holds of the sample."""
    peer, method = case.peer.split()
    symmetry = "sym" if case.symmetric else "asym"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "scores.json"
        script = [HERE / f"run_{peer}.py", data / case.sample, method, case.bits, case.group, symmetry, out]
        command = [str(part) for part in (environment(peer, environments), *script)]
        done = subprocess.run(command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return json.loads(out.read_text())


def ours(
    case: Case,
    data: Path,
    calibration: int = CALIBRATION,
    weights: Literal["auto", "balanced"] | None = "auto",
    draw: int = 0,
    change: Callable[[Any], None] = unchanged,
    inputs: Inputs = "quantized",
) -> dict[str, list[float]]:
    """The same of mmqc, after so many batches of a draw of calibration, with such weights of modalities; of a changed model."""
    config = RECIPES[case.ours](case.bits, case.group or None, case.symmetric).replace(vision=None, projector=None)
    sample = mmqc.samples.load(case.sample)
    batches = calibration_of(sample, calibration, draw)
    change(sample.model)
    mmqc.quantize_(sample.model, config, batches, progress=False, inputs=inputs, modality_weights=weights)
    questions = torch.load(data / case.sample / "questions.pt", weights_only=True)
    return scores(answers(sample.model, questions["batches"]), questions["exact"], questions["ids"])


def measure(options: argparse.Namespace) -> None:
    """Every run that is not on file, each of which goes there as soon as it is done."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"about": {}, "runs": {}}
    runs, done, stamp = found["runs"], set(), about("python -m benchmarks.peers.compare")
    for case in CASES:
        for library, key in zip(SIDES, keys(case), strict=True):
            if library not in options.sides or key in done or (key in runs and library not in options.again):
                continue
            export(case.sample, options.data / case.sample, CALIBRATION, QUESTIONS)
            run = ours(case, options.data) if library == "mmqc" else theirs(case, options.data, options.environments)
            runs[key] = {measured: [float(f"{value:.4g}") for value in values] for measured, values in run.items()}
            done.add(key)
            print(key, {measured: round(float(np.mean(values)), 5) for measured, values in run.items()}, flush=True)
            found = {**(json.loads(RESULTS.read_text()) if RESULTS.exists() else found), "about": stamp}
            found["runs"][key] = runs[key]  # the other side's may be measured at the same time
            RESULTS.write_text(json.dumps(found) + "\n")


def rows(runs: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row a case that is on file."""
    made = []
    for case in CASES:
        a, b = (runs.get(key) for key in keys(case))
        if a is None or b is None:
            continue
        cells, said = [], []
        for kind, digits in drawn.KINDS.items():
            found = bootstrap(np.subtract(a[kind], b[kind]))
            cells += drawn.cells_of(np.mean(a[kind]), np.mean(b[kind]), (found.mean, found.low, found.high), digits)
            said.append(verdict(found.low, found.high))
        made.append((case.form, name_of(case.sample), case.ours, case.peer.removeprefix("data_free "), *cells, *said))
    return made


def worse(made: list[tuple[str, ...]]) -> list[tuple[str, str, str, str]]:
    """(sample, form, mmqc's recipe, peer) of the rows in which mmqc is worse by NLL or by KL."""
    return [(sample, form, ours, peer) for form, sample, ours, peer, *_, nll, kl in made if "worse" in (nll, kl)]


def reasons(made: list[tuple[str, ...]]) -> str:
    """A line for each row in which mmqc is worse."""
    return "\n".join(
        f"- {form}, {sample}, {ours}: {REASONS[sample, form, ours, peer]}." for sample, form, ours, peer in worse(made)
    )


def counted(made: list[tuple[str, ...]]) -> str:
    """How often mmqc is what, and how often it would be worse of two that are alike."""
    said = [word for *_, nll, kl in made for word in (nll, kl)]
    return (
        f"Of {len(said)} intervals {said.count('worse')} say worse, {said.count('better')} better. Of as many that compare a "
        f"method with one exactly as good, {0.025 * len(said):.1f} are expected to say worse, and as many better."
    )


def spread(found: list[dict[str, Any]]) -> str:
    """What spread.py measured."""
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for run in found:
        key = run["form"], name_of(run["sample"]), run["mmqc"], str(run["batches"])
        lines.setdefault(key, {})[run["way"]] = f"{run['nll']:.4f}, {run['kl']:.5f}"
    ways = list(dict.fromkeys(way for line in lines.values() for way in line))
    head = ("form", "sample", "mmqc", "batches", *(way for way in ways))
    return table(head, ((*key, *(line.get(way, "–") for way in ways)) for key, line in lines.items()))


def beyond(runs: dict[str, Any]) -> str:
    """What other draws, questions and orders say of the rows, and what asymmetric inputs do for them."""
    return f"""The same rows on four other draws of 64 batches, which nobody had looked at when the rows were chosen; intervals
are of a bootstrap over draws and questions (`python -m benchmarks.peers.draws`):

{drawn.of_draws(drawn.read(drawn.OF_DRAWS)["runs"])}

{drawn.of_questions(drawn.read(drawn.OF_QUESTIONS))}

So 300 questions say too little of digits: few of them hold nearly all of a mean there, and these are questions of how many
("how many 6s are in image 2?"). In 2 bits, and in AWQ's 3, mmqc loses more of these, and of the others together fewer or as
many. Errors of layers do not say so: {drawn.of_errors(drawn.read(drawn.OF_ERRORS))}

An interval over questions of one model takes that model's rounding errors as they fell. A decoder computes the same whatever the
order of its channels is, while groups and the sweep over columns follow it: another order is another draw of all rounding errors,
and neither side sees which one it has. Digits with its channels in other orders, both sides measured anew, intervals of a bootstrap
over orders and questions, and how many orders mmqc's mean is less in (`python -m benchmarks.peers.orders`):

{drawn.of_orders(drawn.read(drawn.OF_ORDERS))}

So what mmqc loses at W2 g32 sym is the luck of one order. At W2 g64 and W2 g32 asym by GPTQ, and at W3 by AWQ, its mean KL is
about twice the peer's in seven or eight of eight orders: too regular for luck, and still three questions of 750, which intervals
that draw questions as well do not tell from a tie.

With `inputs="asymmetric"` a linear is rounded so that it gives, on what the quantized blocks in front feed it, what the
floating-point model gives ([ADR 55](../adr/0055-targets-of-the-floating-point-model.md)). The rows of this page again
(`python -m benchmarks.peers.asymmetric`):

{drawn.of_asymmetric(runs, drawn.read(drawn.OF_ASYMMETRIC))}

So the median answer is nearer to the floating-point model's, and in 2 bits the few of digits that are lost are not kept. In the
eight orders of channels, the rows of which mmqc's mean is about twice the peer's
(`python -m benchmarks.peers.orders --sides mmqc --asymmetric`):

{drawn.of_orders(drawn.read(drawn.OF_ORDERS), "asymmetric")}"""


def page(found: dict[str, Any]) -> str:
    """The page's text."""
    head = ("form", "sample", "mmqc", "peer", "NLL", "difference", "KL", "difference", "by NLL mmqc is", "by KL")
    pins = [f"`{line}`" for path in sorted(HERE.glob("*.txt")) for line in path.read_text().splitlines() if "==" in line]
    unrun = "\n".join(f"- {name}: {why}." for name, why in UNRUN.items())
    made = rows(found["runs"])
    stamp = ", ".join(f"{key} {value}" for key, value in found["about"].items())
    return f"""# mmqc and other libraries on the samples

The same float checkpoint, {CALIBRATION} batches of calibration and {QUESTIONS} questions for everyone; weights alone, of the
language model's linears. NLL is of the right answers' tokens, KL the mean divergence from the float model's distribution
at them; differences are mmqc minus peer with the 95 % interval of a paired bootstrap over questions, by which the last
two columns are. mmqc calibrates on quantized inputs (`inputs="quantized"`), as the peers do.
Without data its zero points lie between the codes in 2 bits and on a code above, which was chosen on these samples
([ADR 47](../adr/0047-zero-between-the-codes.md) has both).
`python -m benchmarks.peers.compare` builds the environments, measures and writes this page.

{table(head, made)}

Of {len(CASES)} comparisons {len(made)} are measured; the command measures the others.

## Where mmqc is worse

{counted(made)}

{reasons(made)}

{beyond(found["runs"])}

The intervals above are over questions: another draw of batches, or another order of sums, is not in them. NLL and KL on fewer
batches (`python -m benchmarks.peers.spread`); the second column is the peer's rounding in mmqc, one sweep on the step
2 max|w| / (2^b - 1), which in the first block's queries, keys and values makes the peer's codes but for ties; in the third
text counts as much as images, which it does by itself on docs-vqa: a prompt there has 288 visual tokens and 51 others on average:

{spread(found["spread"])}

{drawn.of_again(found["runs"], drawn.read(drawn.OF_AGAIN))}

Peers: {", ".join(pins)}. Not run:

{unrun}

{stamp}
"""


def main() -> None:
    """Measure, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", nargs="*", choices=SIDES, default=(), help="measure anew what is on file")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="whose runs are measured, each on a core")
    parser.add_argument("--data", type=Path, default=ROOT / "build/peers/data", help="where exported models and questions go")
    parser.add_argument("--environments", type=Path, default=ROOT / "build/peers", help="where environments go")
    parser.add_argument("--draw", action="store_true", help="redraw the page from the figures on file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.draw:
        measure(options)
    PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
