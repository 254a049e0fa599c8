"""Bases between the exact rewrites and calibration: exact, and of what the model's own forwards showed."""

import dataclasses

import pytest
import torch
from float64 import EXACT, Float64, output_of, relative_error, to_float64
from small_vlm import Small, batches
from tolerance import assert_close

from mmqc.graph.linear import weight_of
from mmqc.graph.record import record
from mmqc.graph.runner import run
from mmqc.pipeline import FACTS, exact_passes
from mmqc.quantization.convert import Journal, write_exact, write_weights
from mmqc.quantization.pca_bases import Found, rotate_to_bases
from mmqc.recipes import outlier_rotation, resq


def test_found__adds_up_the_copies_of_a_space_in_a_tensor() -> None:
    x, copies = torch.randn(5, 6, dtype=torch.float64), torch.tensor([[0, 2, 4], [1, 3, 5]])
    found = Found(None, 1)  # type: ignore[arg-type]  (its coordinates are the copies')
    for part in (x[:2], x[2:]):
        found.add(part[None], copies)
    parts = x[:, copies].reshape(-1, 3)
    assert found.seen is not None
    assert_close(found.seen.tril(), (parts.T @ parts).tril())


def test_found__by_peaks_in_the_channels_before_the_rotation() -> None:
    turned = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    x = torch.randn(7, 4, dtype=torch.float64)
    found = Found(None, 1, by="peaks", turned=turned)  # type: ignore[arg-type]
    for part in (x[:3], x[:0], x[3:]):
        found.add(part @ turned, torch.arange(4)[None])
    assert found.seen is not None
    assert_close(found.seen, x.abs().amax(0))


@pytest.mark.parametrize("random", ["orthogonal", "hadamard"])
def test_rotate_to_bases__exact_and_of_maximal_variance(random: str) -> None:
    """Written into the model; inputs of the linears have their energy in the high coordinates, the most there can be."""
    model, batch = to_float64(Small().eval(), batches()[0])
    before = output_of(model, batch)
    config = resq(random=random)
    with Float64(), torch.no_grad(), Journal(model) as journal:
        prog = record(model, batch)
        run(prog, exact_passes(config), FACTS)
        write_exact(model, prog, journal)
        rotate_to_bases(model, prog, config, lambda: [batch])
        write_weights(model, prog, journal)
        assert relative_error(output_of(model, batch), before) < EXACT
        high = {weight_of(n): n.meta["high"] for n in prog.nodes("linear") if "high" in n.meta}
        seen: dict[str, torch.Tensor] = {}
        for fqn in high:
            module = model.get_submodule(fqn.removesuffix(".weight"))
            module.register_forward_pre_hook(lambda m, a, fqn=fqn: seen.__setitem__(fqn, a[0].reshape(-1, a[0].shape[-1])))
        model(**batch)
    # a patch merger reads the stream several times over
    streams = {f: x.reshape(-1, 16) for f, x in _once(seen).items() if set((high[f] % 16).tolist()) == {14, 15}}
    towers = [{f: x for f, x in streams.items() if (".text." in f) == text} for text in (True, False)]
    assert all(towers)
    for tower in towers:
        total = sum((x.T @ x for x in tower.values()), torch.zeros(16, 16, dtype=torch.float64))
        best = float(torch.linalg.eigvalsh(total)[-2:].sum())
        assert float(total.diagonal()[-2:].sum()) == pytest.approx(best, rel=1e-9)


def test_rotate_to_bases__by_peaks_high_coordinates_are_the_largest_channels_rotated() -> None:
    """In the channels that there were before the first, random rotation."""
    config = outlier_rotation(kv_bits=None)
    seen: list[dict[str, torch.Tensor]] = []
    for bases in (False, True):
        model, batch = to_float64(Small().eval(), batches()[0])
        before = output_of(model, batch)
        given = config if bases else config.replace(rewrites=dataclasses.replace(config.rewrites, bases=None, rotate=False))
        with Float64(), torch.no_grad(), Journal(model) as journal:
            prog = record(model, batch)
            run(prog, exact_passes(given), FACTS)
            write_exact(model, prog, journal)
            if bases:
                rotate_to_bases(model, prog, given, lambda batch=batch: [batch])
                write_weights(model, prog, journal)
                assert relative_error(output_of(model, batch), before) < EXACT
            high = {weight_of(n): n.meta["high"] for n in prog.nodes("linear") if "high" in n.meta} if bases else {}
            seen.append({})
            for name, module in model.named_modules():
                if isinstance(module, torch.nn.Linear):
                    module.register_forward_pre_hook(lambda m, a, n=name, s=seen[-1]: s.__setitem__(f"{n}.weight", a[0]))
            model(**batch)
    # a patch merger reads the stream several times over
    streams = [f for f, h in high.items() if set((h % 16).tolist()) == {14, 15}]
    towers = [[f for f in streams if (".text." in f) == text] for text in (True, False)]
    assert all(towers)
    for tower in towers:
        plain, turned = ({f: s[f].reshape(-1, 16) for f in tower} for s in seen)
        top = torch.cat([*plain.values()]).abs().amax(0).argsort()[-2:]
        for f in tower:
            assert_close(turned[f][:, 14:].norm(dim=1), plain[f][:, top].norm(dim=1))


def _once(seen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One linear for every tensor that several read."""
    return {f: x for f, x in {x.data_ptr(): (f, x) for f, x in seen.items()}.values()}
