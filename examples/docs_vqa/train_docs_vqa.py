"""Train the sample "docs-vqa" on one GPU: `python -m examples.docs_vqa.train_docs_vqa --minutes 8.5 --out DIR`.

Reading is hard to learn from answers alone, so two things are shown besides, and fade out: what characters each visual token
covers (a linear probe, thrown away afterwards), and where on the page the next character of an answer stands (the attention
of one head in each of two decoder layers). Worker processes draw pages without end; none is seen twice.

The model starts as uneven as large ones are: the projector's output is large beside text embeddings and has a large constant
part in two channels, and so has the vision stream (the "massive activations" of trained transformers). Training is free to
undo that; `activation_ranges.py` draws what is left.

A run stops by itself after `--minutes`, scores the model on questions that training does not draw, and goes on where it stopped
with `--resume DIR` (or from the weights alone, where DIR holds no state.pt). The learning rate falls over `--total` minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from pathlib import Path

import torch
import torch.fx.experimental._config
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from examples.docs_vqa.docs_batches import SLOTS, Batches, make
from examples.docs_vqa.docs_forward import Forward, aligned, check
from examples.initial_weights import initialize
from mmqc.samples import handwriting
from mmqc.samples.docs import checkpoint
from mmqc.samples.docs.alphabet import VOCAB_SIZE

VISUAL, CONSTANT = 1.0, 24.0  # a visual token's entries when training starts: the usual ones, and two constant ones


@torch.no_grad()
def start(model: nn.Module, seed: int) -> None:
    """Initial weights: variance-preserving, uneven as the module docstring says."""
    initialize(model, seed)
    visual, last = model.model.visual, model.model.visual.merger.mlp[2]
    last.weight.mul_(3 * VISUAL)
    width = len(last.bias)
    g = torch.Generator().manual_seed(seed)
    last.bias[torch.randperm(width, generator=g)[:2]] = torch.tensor([CONSTANT, -CONSTANT])
    visual.blocks[0].mlp.fc2.bias[torch.randperm(width, generator=g)[:2]] = torch.tensor([CONSTANT, -CONSTANT])


class Probe(nn.Module):
    """The characters that a visual token covers, read off by one linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.head = width, nn.Linear(width, SLOTS * VOCAB_SIZE)

    def forward(self, seen: torch.Tensor, cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss, and the share of characters that are right; half of the visual tokens are asked, the empty ones last."""
        seen, cells = seen.reshape(-1, self.width), cells.reshape(-1, SLOTS)
        # A fixed number of them: to count the filled ones would have to wait for the device.
        keep = (torch.rand(len(cells), device=cells.device) + 0.8 * (cells[:, 0] > 0)).topk(-(-len(cells) // 2)).indices
        x = F.layer_norm(seen[keep].float(), (self.width,))
        wanted = cells[keep].long()
        logits = self.head(x).view(-1, SLOTS, VOCAB_SIZE)
        right = ((logits.detach().argmax(-1) == wanted) & (wanted > 0)).sum() / (wanted > 0).sum().clamp(min=1)
        return F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten()), right


def point(
    pointers: list[tuple[torch.Tensor, torch.Tensor]], at: torch.Tensor, source: torch.Tensor, visual: torch.Tensor
) -> torch.Tensor:
    """Cross-entropy of two heads' attention over the visual tokens: to the character just read, and to the next."""
    last = F.pad(source[:, :-1], (1, 0), value=-1)
    total = torch.zeros((), device=at.device)
    for (q, k), wanted in zip(pointers, (last, source), strict=True):
        q = q.gather(1, at[:, :, None].expand(-1, -1, 64)).reshape(len(k), -1, 64)
        logits = (q @ k.index_select(1, visual).transpose(1, 2) / 8).float()
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-1, reduction="sum")
        total = total + loss / (wanted >= 0).sum().clamp(min=1)
    return total


class Trainer:
    """Model, probe, optimizer and the step."""

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        self.args, self.device, self.step, self.seconds, self.log = args, device, 0, 0.0, []
        self.config = checkpoint.new_config(args.width, args.vision_depth, args.depth)
        self.model = checkpoint.new_model(self.config)
        start(self.model, args.seed)
        if args.resume and not (args.resume / "state.pt").exists():
            self.model.load_state_dict(checkpoint.load(args.resume / "model").state_dict())
        self.model.to(device).train()
        self.probe = Probe(args.width).to(device)
        if args.resume:  # where there is no state, what the probe does not know yet does not disturb the rest
            nn.init.zeros_(self.probe.head.weight)
        self.parameters = [*self.model.parameters(), *self.probe.parameters()]
        groups = [
            dict(params=[p for p in self.parameters if (p.dim() >= 2) == wide], weight_decay=0.05 if wide else 0.0)
            for wide in (True, False)
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=device == "cuda")
        self.forward = Forward(self.model, compiled=args.compile and device == "cuda")
        if not aligned(device):
            raise RuntimeError(f"flash attention on {torch.cuda.get_device_name()} does not align a causal mask at the lower right")
        self.warm_from, self.bf16 = 0, device == "cuda"
        if args.resume:
            self.load(args.resume)

    def load(self, folder: Path) -> None:
        self.log = json.loads((folder / "log.json").read_text(encoding="utf-8"))
        self.step, self.seconds = self.log[-1]["step"], self.log[-1]["seconds"]
        self.warm_from = self.step
        if (folder / "state.pt").exists():
            state = torch.load(folder / "state.pt", map_location=self.device)
            self.model.load_state_dict(state["model"])
            self.probe.load_state_dict(state["probe"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.warm_from = -1000

    def losses(self, b: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Answer, probe and pointer losses, and the shares of answer tokens and characters that are right."""
        images = b["images"].flatten(0, 1).float() / 127.5 - 1
        if self.model.training:
            n = (len(images), 1, 1, 1)
            gain, shift = (torch.rand(n, device=images.device) * 2 - 1 for _ in range(2))
            images = (
                images * (1 + 0.15 * gain) + 0.1 * shift + 0.03 * torch.rand(n, device=images.device) * torch.randn_like(images)
            )
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            seen = self.forward.see(images).view(len(b["images"]), -1, self.args.width)
            probe, characters = self.probe(seen, b["cells"])
            hidden, pointers = self.forward.read(b, seen)
            window = torch.arange(b["answer"].shape[1], device=self.device)
            at = (b["start"][:, None] + window).clamp(max=b["tokens"].shape[1] - 1)
            logits = self.model.lm_head(hidden.gather(1, at[:, :, None].expand(-1, -1, self.args.width))).float()
            pointer = point(pointers, at, b["source"], b["visual"])
        real = b["answer"] > 0
        # Between a mean over questions and one over tokens: 49 characters weigh 7 times as much as one.
        weight = real / real.sum(1, keepdim=True).sqrt()
        nll = F.cross_entropy(logits.transpose(1, 2), b["answer"], reduction="none")
        right = (logits.detach().argmax(-1) == b["answer"]) | ~real
        return dict(
            answer=(nll * weight).sum() / weight.sum(),
            probe=probe,
            pointer=pointer,
            tokens=(right & real).sum() / real.sum(),
            characters=characters,
            exact=right.all(1).float().mean(),
        )

    def schedule(self, done: float) -> float:
        """Linear warm-up over 300 steps, cosine to 1 % of the peak over the total time; what the aids weigh."""
        rate = self.args.rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(done, 1))))
        for group in self.optimizer.param_groups:
            group["lr"] = rate * min(1, (self.step - self.warm_from + 1) / 300)
        return max(0.05, 1 - 1.5 * done)

    def run(self) -> None:
        """Train until the time is over; then save and score."""
        args, begin, before = self.args, time.time(), self.seconds
        done = multiprocessing.Value("d", before / 60 / args.total)
        seed = f"{args.seed} {self.step}"
        loader = (
            DataLoader(
                Batches(seed, args.budget, done=done),
                batch_size=None,
                num_workers=args.workers,
                prefetch_factor=4,
                pin_memory=self.device == "cuda",
                multiprocessing_context="fork" if args.workers else None,
            )
            if args.workers
            else Batches(seed, args.budget, done=done)
        )
        meters: dict[str, torch.Tensor] = {}
        waited, first, since = 0.0, self.step, time.time()
        source, stop = iter(loader), args.minutes * 60 - args.reserve
        while time.time() - begin < stop and self.step - first < args.steps:
            t = time.time()
            batch = {name: x.to(self.device, non_blocking=True) for name, x in next(source).items()}
            waited += time.time() - t
            aid = self.schedule(done.value)
            self.optimizer.zero_grad(set_to_none=True)
            try:
                found = self.losses(batch)
            except Exception as error:  # a run is short: rather slow than none
                if not self.forward.compiled:
                    raise
                print(f"goes on uncompiled: {error!s:.2000}", flush=True)
                self.forward = Forward(self.model, compiled=False)
                found = self.losses(batch)
            (found["answer"] + aid * (found["probe"] + 0.3 * found["pointer"])).backward()
            nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
            self.optimizer.step()
            self.step += 1
            self.seconds = before + time.time() - begin
            done.value = self.seconds / 60 / args.total
            for name, value in found.items():
                meters[name] = value.detach() if name not in meters else meters[name].lerp(value.detach().float(), 0.02)
            if self.step % args.log == 0:
                row = dict(step=self.step, seconds=round(self.seconds, 1), rate=self.optimizer.param_groups[0]["lr"])
                row |= {name: round(value.item(), 4) for name, value in meters.items()}
                row |= dict(per_second=round(args.log / (time.time() - since), 2), waited=round(waited, 2))
                waited, since = 0.0, time.time()
                self.log.append(row)
                print(json.dumps(row), flush=True)
            if self.step % args.save == 0:
                self.save()
        self.log.append(dict(step=self.step, seconds=round(self.seconds, 1)))
        self.save(state=True)
        del source, loader
        if args.questions:
            from examples.docs_vqa.score_docs_vqa import score_to

            left = begin + args.minutes * 60 - time.time()
            score_to(args.out / "scores.json", self.model.eval(), args.questions, left, self.device)

    def save(self, state: bool = False) -> None:
        """The model as it ships, the log, and at the end what a further run needs."""
        checkpoint.save(self.model, self.args.out / "model")
        (self.args.out / "log.json").write_text(json.dumps(self.log), encoding="utf-8")
        if state:
            folder = self.args.state or self.args.out
            folder.mkdir(parents=True, exist_ok=True)
            parts = dict(model=self.model, probe=self.probe, optimizer=self.optimizer)
            torch.save({name: part.state_dict() for name, part in parts.items()}, folder / "state.pt")
            (folder / "log.json").write_text(json.dumps(self.log), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="a folder with log.json and state.pt, or with log.json and model/")
    parser.add_argument("--state", type=Path, help="where state.pt goes (260 MB; a copy of log.json too); by default to --out")
    parser.add_argument("--minutes", type=float, default=8.5, help="of this run, scoring included")
    parser.add_argument("--total", type=float, help="minutes of all runs, over which the learning rate falls; as --minutes")
    parser.add_argument("--reserve", type=float, default=30, help="seconds of --minutes left for saving and scoring")
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--budget", type=float, default=5.2e6, help="cost of a step in million FLOPs")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--questions", type=int, default=360)
    parser.add_argument("--log", type=int, default=50)
    parser.add_argument("--save", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--vision-depth", type=int, default=4)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--check", action="store_true", help="compare the forward with transformers' and stop")
    args = parser.parse_args()
    args.total = args.total or args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every size
    torch.fx.experimental._config.use_duck_shape = False  # sizes that happen to be equal in the first batch stay apart
    trainer = Trainer(args, "cuda" if torch.cuda.is_available() else "cpu")
    if args.check:
        from random import Random

        from examples.docs_vqa.docs_batches import BUCKETS

        trainer.model.float().cpu().eval()
        for bucket in BUCKETS:
            batch = make(Random(0), bucket, 2e5, handwriting.load_split("train"))
            print(bucket.name, check(trainer.model, batch))
        return
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(f"{parameters / 1e6:.1f} million parameters, {trainer.device}", flush=True)
    trainer.run()


if __name__ == "__main__":
    main()
