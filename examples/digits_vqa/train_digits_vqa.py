"""Train the shipped sample "digits-vqa" on one GPU: `python -m examples.digits_vqa.train_digits_vqa --out DIR`.

Hugging Face's forward of so small a model is bound by kernel launches. Here every tensor has a fixed shape: prompts are
padded to one of two buckets (short questions; transcriptions), their digits are drawn, distorted and rendered on the
GPU, and the whole step (batch, compiled forward and backward, clip, AdamW, average of the weights) is one CUDA graph.
`--check` shows that the forward equals Hugging Face's. A run stops after `--seconds` with a checkpoint and continues
from it: `--resume DIR/checkpoint.pt`.

The trained model is as uneven as large ones are. The projector starts with a large scale and a large constant part, so
that visual tokens enter the decoder tens of times larger than text; the vision stream carries such a part too, from its
first block on (the "massive activations" of trained transformers). A small penalty keeps that part on the axis where it
started: visual tokens hold most of their energy there, text tokens hardly any.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from examples.digits_vqa.digits_batches import BUCKETS, Batch, Source
from examples.initial_weights import initialize
from mmqc.samples import checkpoint
from mmqc.samples.processor import IMAGE, PAD, DigitsProcessor

# A normalized token has norm 16; 13 is two thirds of its energy.
VISUAL_PART = 13.0


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def constant_axes(seed: int) -> torch.Tensor:
    """The unit axes [2, 256] of the vision stream's and the decoder's constant part; their entries sum to 0."""
    half = torch.arange(256) % 2 * 2.0 - 1
    g = torch.Generator().manual_seed(seed)
    return torch.stack([half[torch.randperm(256, generator=g)] for _ in range(2)]) / 16


def unevenness(sites: list[torch.Tensor], axis: torch.Tensor, visual: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """How far normalized tokens [B, L, 256] are from `x . axis >= VISUAL_PART` (visual) and from 0 (text)."""
    total = torch.zeros((), device=axis.device)
    for x in sites:
        part = F.rms_norm(x.float(), (256,)) @ axis
        loss = torch.where(visual, (VISUAL_PART - part).clamp(min=0), part).square()
        total = total + (loss * real).sum() / real.sum()
    return total / len(sites)


def see(visual: torch.nn.Module, b: Batch, sites: list[torch.Tensor]) -> torch.Tensor:
    """The vision tower on padded pages: [B, V, 256]. A patch attends to those of its own page."""
    size, n = b.patches.shape[:2]
    corner = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]], device=b.place.device)
    place = (2 * b.place[:, :, None] + corner).view(size, n, 2).float()
    angle = (place[..., None] * visual.rotary_pos_emb.inv_freq).flatten(2)
    angle = torch.cat([angle, angle], -1)[:, None]
    page = b.page.repeat_interleave(4, 1)
    mask = (page[:, :, None] == page[:, None, :])[:, None]
    h = F.linear(b.patches, visual.patch_embed.proj.weight.flatten(1)).float()
    dtype = torch.bfloat16 if h.is_cuda else h.dtype
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    for block in visual.blocks:
        q, k, v = block.attn.qkv(block.norm1(h)).view(size, n, 3, 4, 64).permute(2, 0, 3, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, attn_mask=mask)
        h = h + block.attn.proj(a.transpose(1, 2).reshape(size, n, 256))
        sites.append(h)
        h = h + block.mlp(block.norm2(h))
        sites.append(h)
    return visual.merger.mlp(visual.merger.ln_q(h).view(size, n // 4, 1024))


def read(language: torch.nn.Module, b: Batch, seen: torch.Tensor, sites: list[torch.Tensor]) -> torch.Tensor:
    """The decoder's last hidden states [B, L, 256]; padding is on the right, so a causal mask is enough."""
    size, n = b.tokens.shape
    h = language.embed_tokens(b.tokens)
    image = seen.gather(1, b.visual.clamp(min=0)[:, :, None].expand(-1, -1, 256)).to(h.dtype)
    h = torch.where((b.visual >= 0)[:, :, None], image, h)
    cos, sin = language.rotary_emb(seen, b.positions.transpose(0, 1))
    cos, sin = cos[:, None], sin[:, None]
    for layer in language.layers:
        sites.append(h)
        attention, x = layer.self_attn, layer.input_layernorm(h)
        q = attention.q_proj(x).view(size, n, 4, 64).transpose(1, 2)
        k = attention.k_proj(x).view(size, n, 2, 64).transpose(1, 2)
        v = attention.v_proj(x).view(size, n, 2, 64).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin).repeat_interleave(2, 1)
        a = F.scaled_dot_product_attention(q, k, v.repeat_interleave(2, 1), is_causal=True)
        h = h + attention.o_proj(a.transpose(1, 2).reshape(size, n, 256))
        sites.append(h)
        h = h + layer.mlp(layer.post_attention_layernorm(h))
    return language.norm(h)


class Probes(torch.nn.Module):
    """What a visual token should know, read off by linear heads that are thrown away: digit, row and column."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(256, 10 + 8 + 8)

    def forward(self, seen: torch.Tensor, b: Batch) -> torch.Tensor:
        # The shipped projector's output is large; the probe sees it at unit scale.
        digit, row, column = self.head(F.layer_norm(seen.float(), (256,))).float().split([10, 8, 8], -1)
        real = (b.page >= 0).float()
        losses = [
            F.cross_entropy(o.transpose(1, 2), t, reduction="none")
            for o, t in ((digit, b.labels), (row, b.place[..., 0]), (column, b.place[..., 1]))
        ]
        return (sum(losses) * real).sum() / real.sum()


def loss_of(
    model: torch.nn.Module, probes: Probes, b: Batch, axes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Answer loss, probe loss, unevenness and the fraction of answer tokens that are right."""
    patches: list[torch.Tensor] = []
    tokens: list[torch.Tensor] = []
    seen = see(model.model.visual, b, patches)
    h = read(model.model.language_model, b, seen, tokens)
    page = b.page.repeat_interleave(4, 1) >= 0
    # The first block's attention comes before the constant part of the vision stream.
    uneven = unevenness(patches[1:], axes[0], page, page) + unevenness(tokens, axes[1], b.visual >= 0, b.tokens != PAD)
    logits = model.lm_head(h[:, :-1]).float()
    nll = F.cross_entropy(logits.transpose(1, 2), b.tokens[:, 1:], reduction="none")
    weight = b.weight[:, 1:]
    right = ((logits.detach().argmax(-1) == b.tokens[:, 1:]) & (weight > 0)).sum() / (weight > 0).sum()
    return (nll * weight).sum() / weight.sum(), probes(seen, b), uneven, right


@torch.no_grad()
def start(model: torch.nn.Module, seed: int) -> None:
    """Initial weights: variance-preserving, with the uneven scales that the module docstring speaks of."""
    initialize(model, seed)
    visual = model.model.visual
    visual.merger.mlp[2].weight.mul_(3)
    seen, read_ = constant_axes(seed)
    visual.merger.mlp[2].bias.copy_(32 * read_)
    visual.blocks[0].mlp.fc2.bias.copy_(48 * seen)


class Trainer:
    """Model, optimizer, averaged weights and the captured step."""

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        self.args, self.device, self.step, self.seconds = args, device, 0, 0.0
        self.model = checkpoint.load(args.weights) if args.weights else checkpoint.new_model()
        if not args.weights:
            start(self.model, args.seed)
        self.model.to(device).train()
        self.probes = Probes().to(device)
        self.parameters = [*self.model.parameters(), *self.probes.parameters()]
        self.average = [p.detach().clone() for p in self.model.parameters()]
        groups = [
            dict(params=[p for p in self.parameters if (p.dim() >= 2) == wide], weight_decay=0.05 if wide else 0.0)
            for wide in (True, False)
        ]
        self.rate, self.probe_weight = torch.zeros((), device=device), torch.ones((), device=device)
        on_gpu = device == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=self.rate, betas=(0.9, 0.98), fused=on_gpu, capturable=on_gpu)
        self.sources = {n: Source(n, args.templates, args.seed + 1, "train", device) for n in BUCKETS}
        self.sizes = {"short": args.batch, "long": args.batch // 2}
        self.loss = torch.compile(loss_of, dynamic=False) if on_gpu else loss_of
        self.meters = torch.zeros(8, device=device)
        self.axes = constant_axes(args.seed).to(device)

    def train_step(self) -> None:
        """One update; on the GPU this is captured once and replayed."""
        self.optimizer.zero_grad(set_to_none=False)
        batches = [self.sources[n].draw(self.sizes[n]) for n in BUCKETS]
        for i, b in enumerate(batches):
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                answer, probe, uneven, right = self.loss(self.model, self.probes, b, self.axes)
            (answer + self.probe_weight * probe + self.args.uneven * uneven).backward()
            now = torch.stack([answer.detach(), probe.detach(), uneven.detach(), right.float()])
            self.meters[4 * i : 4 * i + 4].lerp_(now, 0.02)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimizer.step()
        torch._foreach_lerp_(self.average, [p.detach() for p in self.model.parameters()], self.args.average)

    def schedule(self) -> None:
        """Linear warm-up, cosine to 1 % of the peak; the probes fade out over the first half."""
        done, args = self.step / self.args.steps, self.args
        rate = args.rate * min(1, (self.step + 1) / 500) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(done, 1))))
        self.rate.fill_(rate)
        self.probe_weight.fill_(max(0.05, 0.5 * (1 - 2 * done)))

    def capture(self) -> None:
        """Warm up (compiles) and record the step. The warm-up steps count: they train like any other."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.schedule()
                self.train_step()
                self.step += 1
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.train_step()

    def state(self) -> dict:
        return dict(
            model=self.model.state_dict(),
            probes=self.probes.state_dict(),
            average=self.average,
            step=self.step,
            optimizer=self.optimizer.state_dict(),
            seconds=self.seconds,
        )

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.probes.load_state_dict(state["probes"])
        torch._foreach_copy_(self.average, state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        self.step, self.seconds = state["step"], state["seconds"]

    def run(self, out: Path) -> None:
        """Train until the last step or until `--seconds` have gone by; write a checkpoint and the averaged model."""
        begin = time.time()
        if self.device == "cuda":
            self.capture()
        print(f"step {self.step}: ready after {time.time() - begin:.0f} s", flush=True)
        start_step, ready, before = self.step, time.time(), self.seconds
        while self.step < self.args.steps and time.time() - begin < self.args.seconds:
            self.schedule()
            self.graph.replay() if self.device == "cuda" else self.train_step()
            self.step += 1
            if self.step % self.args.log == 0:
                values = self.meters.tolist()
                speed = (self.step - start_step) / (time.time() - ready)
                print(f"step {self.step} {speed:.1f}/s", *(f"{v:.4f}" for v in values), flush=True)
            if self.step % self.args.save == 0:
                self.seconds = before + time.time() - begin
                self.save(out)
        self.seconds = before + time.time() - begin
        self.save(out)

    def save(self, out: Path) -> None:
        """A checkpoint to resume from, and the averaged weights as the model that ships."""
        torch.save(self.state(), out / "checkpoint.pt")
        weights = [p.detach() for p in self.model.parameters()]
        trained = [w.clone() for w in weights]
        torch._foreach_copy_(weights, self.average)
        print(json.dumps(dict(step=self.step, seconds=round(self.seconds), held_out=self.held_out())), flush=True)
        checkpoint.save(self.model, out / "model")
        torch._foreach_copy_(weights, trained)

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        """Fraction of answer tokens right on the calibration scans, which training never sees."""
        out = {}
        for name, size in self.sizes.items():
            source = Source(name, 2 * size, self.args.seed + 9, "calibration", self.device, augment=False)
            out[name] = np.mean(
                [loss_of(self.model, self.probes, source.draw(size), self.axes)[-1].item() for _ in range(4)]
            ).item()
        return out


@torch.no_grad()
def check(device: str) -> None:
    """The forward above equals Hugging Face's, and the rendered patches come in the processor's order."""
    torch.manual_seed(0)
    model, processor = checkpoint.new_model(), DigitsProcessor()
    start(model, 0)
    for name in BUCKETS:
        b = Source(name, 12, 3, "train", device).draw(6)
        ours = model.lm_head(read(model.model.language_model, b, see(model.model.visual, b, []), []))
        for i in range(6):
            n, cells = int((b.tokens[i] != PAD).sum()), int((b.page[i] >= 0).sum())
            pages = [b.place[i][b.page[i] == p].max(0).values + 1 for p in range(int(b.page[i].max()) + 1)]
            grids = torch.tensor([[1, 2 * int(r), 2 * int(c)] for r, c in pages])
            ids = b.tokens[i : i + 1, :n]
            inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=(ids == IMAGE).long())
            inputs |= dict(pixel_values=b.patches[i, : 4 * cells], image_grid_thw=grids)
            theirs = model(**inputs).logits
            error = ((ours[i : i + 1, :n] - theirs).norm() / theirs.norm()).item()
            asked = processor.decode(ids[0][b.weight[i, :n] == 0])
            print(f"{name} {i}: {error:.1e}  {asked.splitlines()[-1]!r} {processor.decode(ids[0][b.weight[i, :n] > 0])}")
            assert error < 1e-5
            _, h, w = grids[0].tolist()
            x = b.patches[i, : h * w].view(h // 2, w // 2, 2, 2, 3, 2, 4, 4)[:, :, :, :, :, 0]
            page = x.permute(0, 2, 5, 1, 3, 6, 4).reshape(4 * h, 4 * w, 3)
            page = torch.round((page + 1) * 127.5).to(torch.uint8).numpy()
            assert np.array_equal(processor.patches(page)[0], b.patches[i, : h * w].numpy())
            assert min(page[0, :, 2].min(), page[:, 0, 2].min(), page[-1, :, 2].min(), page[:, -1, 2].min()) >= 153


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/digits_vqa"))
    parser.add_argument("--resume", type=Path, help="a checkpoint.pt to continue from")
    parser.add_argument("--weights", type=Path, help="a saved model to start from, with a new schedule")
    parser.add_argument("--steps", type=int, default=10_500, help="length of the whole schedule")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop this run after so long")
    parser.add_argument("--batch", type=int, default=512, help="short questions a step; half as many transcriptions")
    parser.add_argument("--templates", type=int, default=16_384)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--average", type=float, default=2e-3, help="weight of a new step in the averaged weights")
    parser.add_argument("--uneven", type=float, default=0.02, help="weight of the penalty on evenness")
    parser.add_argument("--log", type=int, default=500)
    parser.add_argument("--save", type=int, default=4_000, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="compare with Hugging Face's forward and leave")
    args = parser.parse_args()
    if args.check:
        check("cpu")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args, "cuda" if torch.cuda.is_available() else "cpu")
    if args.resume:
        trainer.load(args.resume)
    trainer.run(args.out)


if __name__ == "__main__":
    main()
