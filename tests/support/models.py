"""Tiny models with random weights for the tests: transformers' own classes, no downloads, float32, eval mode."""

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, LlavaConfig, Mistral3Config, Qwen2VLConfig, Qwen2VLForConditionalGeneration

IMAGE, VIDEO, VISION_START, VISION_END = 500, 501, 502, 503
PATCH, MERGE = 8, 2


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Moves every parameter away from its neutral value: norm gains off one, biases off zero."""
    g = torch.Generator().manual_seed(seed + 4321)
    done = set()
    for module in model.modules():
        is_norm = "norm" in type(module).__name__.lower()
        for name, p in module.named_parameters(recurse=False):
            if id(p) in done:
                continue
            done.add(id(p))
            if is_norm and name == "weight":
                p.copy_(torch.rand(p.shape, generator=g) + 0.5)
            elif name == "bias":
                p.copy_(torch.randn(p.shape, generator=g) * 0.1)
            else:
                spread = 0.3 if isinstance(module, nn.Embedding) else p[0].numel() ** -0.5
                p.copy_(torch.randn(p.shape, generator=g) * spread)
    return model


def text_with_images(counts: list[int], seed: int = 2) -> dict[str, torch.Tensor]:
    """Token ids 'text image text ... image text' with ``counts[i]`` visual tokens in image i."""
    g = torch.Generator().manual_seed(seed)
    words = lambda n: torch.randint(10, 400, (n,), generator=g).tolist()  # noqa: E731
    ids = words(7)
    for count in counts:
        ids += [VISION_START, *[IMAGE] * count, VISION_END, *words(5)]
    ids = torch.tensor([ids])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).int()}


def tiny_qwen2_vl(
    *, tied: bool = True, grids: tuple = ((1, 4, 6), (1, 8, 4)), width: int = 96, inner: int = 296, depth: int = 2, layers: int = 2
) -> tuple[nn.Module, dict]:
    """A two-layer Qwen2-VL and a batch with one image for each (t, h, w) of ``grids``.

    ``depth`` is the vision tower's, ``layers`` are the decoder's: what is compiled for one of them takes one block of the other,
    and what is about the call as a whole one of both, which takes half the time.
    """
    vision = {"depth": depth, "embed_dim": 64, "hidden_size": width, "num_heads": 4, "mlp_ratio": 4, "patch_size": PATCH}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    text = {
        "vocab_size": 512,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": rope,
        "rms_norm_eps": 1e-6,
    }
    config = Qwen2VLConfig(
        vision_config=vision,
        text_config=text,
        tie_word_embeddings=tied,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    torch.manual_seed(0)
    model = randomise(Qwen2VLForConditionalGeneration(config).float().eval())
    generation = model.generation_config
    generation.eos_token_id = generation.bos_token_id = generation.max_length = None
    generation.pad_token_id = 0
    grid = torch.tensor(grids)
    pixels = torch.randn(int(grid.prod(-1).sum()), 3 * 2 * PATCH * PATCH, generator=torch.Generator().manual_seed(1))
    inputs = text_with_images([int(g.prod()) // MERGE**2 for g in grid])
    return model, {**inputs, "pixel_values": pixels, "image_grid_thw": grid}


def tiny_pixtral(*, merging: bool = False) -> nn.Module:
    """A Pixtral tower, whose images are cut out of a padded batch, in a LLaVA, or ``merging`` patches, in a Mistral 3."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"model_type": "mistral", **sizes, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 512, "pad_token_id": 0}
    vision = {"model_type": "pixtral", **sizes, "image_size": 64, "patch_size": PATCH, "rope_parameters": {"rope_theta": 1e4}}
    config = Mistral3Config if merging else LlavaConfig
    more = {} if merging else {"vision_feature_select_strategy": "full"}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        config(vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1, **more)
    )
    return randomise(model.float().eval())


class Counting(nn.Module):
    """Counts its calls in a buffer, and in a tensor that it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor, counters: list[Tensor]) -> Tensor:
        """[B, width], so many times x."""
        self.calls += 1
        counters[0].add_(1)
        return self.linear(x) * self.calls
