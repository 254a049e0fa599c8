"""AOTInductor packages: a model as compiled programs in one file, which run without Python, mmqc or transformers.

    model ─► exported programs, verified ─► compiled ─► model.pt2 ─► loaded again, compared with the model

| program   | from                                                              | to                                   |
|-----------|-------------------------------------------------------------------|--------------------------------------|
| `model`   | the model's tensors, by keyword                                   | logits [B, L, V]                     |
| `vision`  | pixels and their grid                                             | `image_features`, more for some      |
| `prefill` | tokens, grid, features, `key_i`, `value_i` [B, H, S, D]           | logits [B, V], `rope_deltas`         |
| `decode`  | one token a row, mask [B, S], `cache_position`, deltas, the cache | logits [B, V]                        |

``model`` is the name under which torch looks for a package's program by default.  The cache is the caller's: prefill and decode
write into the tensors that they are given.  Positions, sequence ends and window orders are computed in the program from the grid.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmqc.graph.capture import unwrapped
from mmqc.nn.ordinary import ordinary
from mmqc.nn.uncompiled import uncompiled
from mmqc.report.whole_file import whole_file

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from mmqc.aot.step_batches import Steps

WHOLE = "model"
PROGRAMS = (WHOLE, "vision", "prefill", "decode")
EXACT = {torch.float64: 1e-10, torch.float32: 1e-4}  # of a package: other kernels, the same sums
logger = logging.getLogger(__name__)

Batch = Mapping[str, Tensor]
Say = Callable[[str], None]


@ordinary()
def export(
    model: nn.Module,
    example_inputs: Batch | Sequence[Batch],
    path: str | Path,
    *,
    dynamic_shapes: Mapping[str, Any] | None = None,
    programs: Sequence[str] | None = None,
    weights: str | Path | None = None,
    say: Say | None = None,
) -> Path:
    """Compile a model into a package that runs without Python, and compare it with the model.

    Args:
        model: in eval mode, quantized or not; unchanged afterwards.
        example_inputs: keyword tensors of one forward, or several such batches.  Of a single batch, others are made: rows, lengths,
            images and grids of other sizes, from its own tokens and patches.
        path: a file that ends in .pt2.
        dynamic_shapes: of the whole forward, as of ``torch.export.export``.  Default: every axis that differs between the batches.
        programs: of "model", "vision", "prefill", "decode".  Default: all that the model can be split into.
        weights: a file that ends in .safetensors, for the weights of all programs.  Default: every program has its own in the
            package, so that prefill and decode hold the decoder twice.
        say: called with a line of text for each step.

    Returns:
        The path.  ``torch._inductor.aoti_load_package(path)`` loads the whole forward: it takes the tensors by keyword and
        returns the logits.  With ``weights`` it is given them by ``load_constants`` first (docs/howto/export.md).

    Raises:
        TypeError: the model is no ``torch.nn.Module``.
        ValueError: a path, the inputs or the names of programs are not what they should be.
        mmqc.aot.index_find.ExportError: a program cannot be made, or differs from the model; says where and why.
    """
    path, model, batches = Path(path), unwrapped(model), _batches(example_inputs)
    apart = None if weights is None else Path(weights)
    _check(model, batches, path, apart, programs)
    with _nothing_kept(), torch.no_grad(), uncompiled(model):
        job = _Job(model, batches, dynamic_shapes, say or (lambda text: logger.info("%s", text)))
        wanted = PROGRAMS if programs is None else tuple(programs)
        if WHOLE in wanted:
            job.whole()
        if set(wanted) - {WHOLE}:
            job.steps([name for name in wanted if name != WHOLE], required=programs is not None)
        with whole_file(path) as rough, nullcontext() if apart is None else whole_file(apart) as rough_weights:
            job.write(rough, rough_weights)
            job.compare(rough, rough_weights)
    return path


@contextmanager
def _nothing_kept() -> Iterator[None]:
    """The model is the caller's alone behind the block, however it ends."""
    from mmqc.lowering.inductor import forget_traces

    try:
        yield
    finally:
        forget_traces()


def _batches(given: Batch | Sequence[Batch]) -> list[dict[str, Tensor]]:
    batches = [given] if isinstance(given, Mapping) else list(given)
    for batch in batches:
        if not isinstance(batch, Mapping):
            raise ValueError(f"example_inputs holds a {type(batch).__name__}: pass keyword tensors, or a list of such batches")
    return [dict(b) for b in batches]


def _check(
    model: nn.Module, batches: list[dict[str, Tensor]], path: Path, weights: Path | None, programs: Sequence[str] | None
) -> None:
    if path.suffix != ".pt2":
        raise ValueError(f"path = {str(path)!r}: the name of a package ends in .pt2")
    if weights is not None and weights.suffix != ".safetensors":
        raise ValueError(f"weights = {str(weights)!r}: the name of the file ends in .safetensors")
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first")
    if not batches:
        raise ValueError("example_inputs is empty: pass the keyword tensors of a forward")
    strange = [f"{name} ({type(v).__name__})" for b in batches for name, v in b.items() if not isinstance(v, Tensor)]
    if strange:
        raise ValueError(f"example_inputs holds {', '.join(strange)}: a package takes tensors alone")
    unknown = [p for p in programs or () if p not in PROGRAMS]
    if unknown or (programs is not None and not programs):
        raise ValueError(f"programs = {tuple(programs or ())}: allowed are {', '.join(PROGRAMS)}")


@dataclass
class _Job:
    """One export: what was made so far, and by what it is compared."""

    model: nn.Module
    batches: list[dict[str, Tensor]]
    shapes: Mapping[str, Any] | None
    say: Say
    programs: dict[str, ExportedProgram] = field(default_factory=dict)
    split: Steps | None = None
    left_out: str = ""

    # --- exported programs --------------------------------------------------------------------------------------------

    def whole(self) -> None:
        """The whole forward."""
        from mmqc.aot.programs import Whole

        self.say("forward: tracing")
        self.programs[WHOLE] = self._first_of(lambda batches, spare: self._export(Whole(self.model), batches, spare))

    def steps(self, names: list[str], required: bool) -> None:
        """Vision, prefill and decode, if the model can be split so."""
        from mmqc.aot.index_find import ExportError
        from mmqc.aot.packed_programs import steps_of

        try:
            self.split = steps_of(self.model, self.batches[0])
            names = [n for n in names if n != "vision" or self.split.seam is not None]
            self.programs.update(self._first_of(lambda batches, spare: self._split_programs(names, batches, spare)))
        except Exception as error:  # whatever a model's code says to such calls
            if required:
                reasons = error.reasons if isinstance(error, ExportError) else [str(error)]
                raise ExportError([f"vision, prefill and decode: {reason}" for reason in reasons]) from error
            self.split, self.left_out = None, f"{type(error).__name__}: {error}"
            logger.warning("the package has the whole forward alone: %s", self.left_out)

    def _split_programs(
        self, names: list[str], batches: list[dict[str, Tensor]], spare: list[dict[str, Tensor]]
    ) -> dict[str, ExportedProgram]:
        assert self.split is not None
        usable = [b for b in batches if _padded_left(b)]
        if not usable:
            raise ValueError("prefill takes rows that are padded on the left, as generate does: pass such a batch")
        for batch in usable:
            self.split.check(self.split.modules(), batch, self.bound_of_a_token)
        inputs = [self.split.batches(batch) for batch in usable]
        spares = [self.split.batches(batch) for batch in self._known(spare)]
        found = {}
        for name, module in self.split.modules().items():
            if name in names:
                self.say(f"{name}: tracing")
                found[name] = self._export(module, [i[name] for i in inputs], [s[name] for s in spares], shapes=None)
        if set(found) == set(self.split.modules()):
            self.split.check({name: program.module() for name, program in found.items()}, usable[0], self.bound_of_a_token)
        return found

    def _export(
        self, module: nn.Module, batches: list[dict[str, Tensor]], spare: list[dict[str, Tensor]], shapes: Any = ...
    ) -> ExportedProgram:
        from mmqc.aot.exportable import export_program

        shapes = self.shapes if shapes is ... else shapes
        return export_program(module.eval(), batches[0], more=batches[1:], spare=spare, dynamic_shapes=shapes)

    def _first_of(self, attempt: Callable[[list[dict[str, Tensor]], list[dict[str, Tensor]]], Any]) -> Any:
        """The attempt with the most dynamic sizes that succeeds."""
        from mmqc.aot.index_find import ExportError

        reasons: list[str] = []
        for made, spare in self._varied():
            try:
                return attempt([*self.batches, *made], spare)
            except ExportError as error:
                reasons += [r for r in error.reasons if r not in reasons]
                logger.info("not with these sizes: %s", error)
        raise ExportError(reasons)

    def _varied(self) -> list[tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]]:
        """Further batches to try, those with the most variety first; none if there are several, or shapes are given."""
        from mmqc.aot.variants import fixed_images, variants
        from mmqc.nn.modality import visual_token_ids

        if len(self.batches) > 1 or self.shapes is not None:
            return [([], [])]
        batch, ids = self.batches[0], visual_token_ids(self.model)
        made, spare = variants(batch, ids)
        tries = [(self._known(made), spare), (self._known(fixed_images(batch, ids)), [])]
        return [t for t in tries if t[0]] or [([], [])]

    def _known(self, batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Those batches that the model itself takes."""
        known = []
        for batch in batches:
            try:
                self.model(**batch)
                known.append(batch)
            except Exception as error:  # whatever a model's code says to sizes that it does not take
                logger.info("a batch that the model refuses: %s", error)
        return known

    # --- the package --------------------------------------------------------------------------------------------------

    def write(self, path: Path, weights: Path | None) -> None:
        """Compile every program and write the package, and the weights if they have a file of their own."""
        from mmqc.aot.exportable import rounds
        from mmqc.aot.index_find import ExportError
        from mmqc.aot.programs import described
        from mmqc.aot.weights import Weights
        from mmqc.lowering import package

        files = {}
        for name, program in self.programs.items():
            foreign = package.python_ops(program)
            if foreign:
                raise ExportError([f"{name}: these ops are Python on this device: {', '.join(foreign)}"])
            if not self.on_cpu and (slow := package.in_float64(program)):
                logger.warning("%s: %d linears with scales of groups are multiplied in float64, many times slower", name, slow)
            self.say(f"{name}: compiling")
            try:
                metadata = {**described(program), **self._cache(name)}
                as_eager = self.on_cpu and rounds(program)
                apart, step = weights is not None, name == "decode"
                files[name] = package.compile_program(program, as_eager=as_eager, metadata=metadata, weights_apart=apart, step=step)
            except RuntimeError as error:
                raise ExportError([f"{name}: {error}"]) from error
        path.parent.mkdir(parents=True, exist_ok=True)
        package.write_package(path, files)
        if weights is not None:
            self.say("writing the weights")
            wanted = {name: package.names_of_weights(path, name) for name in self.programs}
            Weights.of(self.programs, wanted).write(weights)

    def _cache(self, name: str) -> dict[str, str]:
        if self.split is None or name not in ("prefill", "decode"):
            return {"left_out": self.left_out} if self.left_out else {}
        return {"cache": self.split.cache.text(), **self.split.described()}

    def compare(self, path: Path, weights: Path | None) -> None:
        """Load the package and compare it with the model on the given batches."""
        from mmqc.aot.index_find import ExportError
        from mmqc.aot.programs import Whole
        from mmqc.aot.sensitivity import relative_error

        self.say("comparing the package with the model")
        with self.loaded(path, weights) as loaded:
            for batch in self.batches:
                if WHOLE in loaded:
                    error = relative_error(loaded[WHOLE](**batch), Whole(self.model)(**batch))
                    self.say(f"forward: relative error {error:.1e}")
                    if not error <= self.bound:
                        raise ExportError(
                            [f"the package's logits differ from the model's by {error:.1e}, more than {self.bound:.1e}"]
                        )
                if self.split is not None and set(loaded) >= set(self.split.modules()) and _padded_left(batch):
                    error = self.split.check(loaded, batch, self.bound_of_a_token)
                    self.say(f"prefill, decode: relative error {error:.1e}")

    @contextmanager
    def loaded(self, path: Path, weights: Path | None) -> Iterator[dict[str, Callable[..., Any]]]:
        """The package's programs, as a user loads them; not to be called behind the block."""
        from mmqc.aot.weights import Weights
        from mmqc.lowering import package

        if weights is None:
            yield {name: package.load_program(path, name) for name in self.programs}
            return
        shared = Weights.read(weights, next(self.model.parameters()).device)
        try:
            yield {name: package.load_program(path, name, functools.partial(shared.of_program, name)) for name in self.programs}
        finally:
            shared.free()

    @property
    def bound(self) -> float:
        """The largest relative error of a batch's logits."""
        return self._bound(lambda: self.moves)

    @property
    def bound_of_a_token(self) -> float:
        """The largest relative error of a token's logits, which is what prefill and decode return."""
        return self._bound(lambda: self.token_moves)

    def _bound(self, moves: Callable[[], float]) -> float:
        from mmqc.aot import sensitivity
        from mmqc.aot.exportable import rounds

        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        quantized = any(rounds(program) for program in self.programs.values()) or _is_quantized(self.model)
        return sensitivity.bound(dtype, EXACT, moves, rounds=quantized, on_cpu=self.on_cpu)

    @functools.cached_property
    def on_cpu(self) -> bool:
        """Whether a package of the model adds up as the model does."""
        return all(p.device.type == "cpu" for p in self.model.parameters())

    @functools.cached_property
    def moves(self) -> float:
        """How far rounding errors move the model's own logits."""
        from mmqc.aot.programs import Whole
        from mmqc.aot.sensitivity import moved

        return self._said(moved(Whole(self.model), self.batches[0], self.model), "logits")

    @functools.cached_property
    def token_moves(self) -> float:
        """The same of the token that moves the most."""
        from mmqc.aot.programs import Whole
        from mmqc.aot.sensitivity import moved_row

        whole = Whole(self.model)
        tokens = lambda **batch: whole(**batch)[batch["attention_mask"].bool()]  # noqa: E731  (padding is nobody's)
        return self._said(moved_row(tokens, self.batches[0], self.model), "logits of a token")

    def _said(self, moves: float, of: str) -> float:
        from mmqc.aot.sensitivity import ROUNDED, within

        if within(moves) > ROUNDED:
            self.say(f"rounding errors move the model's own {of} by {moves:.1e}: compared within {within(moves):.1e}")
        return moves


def _padded_left(batch: Batch) -> bool:
    return bool(batch["attention_mask"][:, -1].all())


def _is_quantized(model: nn.Module) -> bool:
    from mmqc.nn.integer_weight import PackedLinear

    return any(isinstance(m, PackedLinear) for m in model.modules())
