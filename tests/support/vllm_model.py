"""Runs in vLLM's Python: a checkpoint of mmqc's as a whole through vLLM's model class and mmqc's loader, on the CPU.

python vllm_model.py STORE INPUTS OUT CHECKPOINT...      INPUTS: [{"ids", "pixels", "grid", "positions"}]
                                                         OUT: {checkpoint: [logits]}, or an error's text

Put in place of what the compiled library does: attention over the paged cache (here of one prompt alone, by torch), the names of
two ops that layers look up when they are built, the allocator of an accelerator.
"""

import contextlib
import os
import runpy
import sys
from pathlib import Path

KEPT = []


def main(store, given, out, *checkpoints):
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    asking = runpy.run_path(str(Path(__file__).parents[2] / "mmqc" / "engines" / "ask_vllm.py"))
    import torch

    with contextlib.redirect_stdout(sys.stderr):
        stand_in(asking)
        found = {each: computed(each, torch.load(given), f"{store}{i}") for i, each in enumerate(checkpoints)}
    torch.save(found, out)


def stand_in(asking):
    """What is not here."""
    import torch
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models import ModelRegistry, registry

    import mmqc.vllm

    mmqc.vllm.register()
    registry._run_in_subprocess = lambda inspect: inspect()
    asking["load"](ModelRegistry.models["Qwen2VLForConditionalGeneration"].load_model_cls)
    KEPT.append(torch.library.Library("_C", "DEF"))
    KEPT[0].define("gelu_quick(Tensor(a!) out, Tensor x) -> ()")
    torch.accelerator.empty_cache = lambda: None
    Attention.forward = attention


def attention(self, query, key, value, output_shape=None):
    """Causal, of one prompt."""
    import torch

    del output_shape
    q, k, v = (x.view(len(x), -1, self.head_size).transpose(0, 1)[None] for x in (query, key, value))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.impl.scale, enable_gqa=True)
    return y[0].transpose(0, 1).reshape(len(query), -1)


def computed(checkpoint, prompts, store):
    """The logits of every prompt, or why there are none."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, model_parallel_is_initialized
    from vllm.engine.arg_utils import EngineArgs
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.model_loader import get_model

    from mmqc.errors import MmqcError

    options = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "enable_prefix_caching": False}
    sizes = {"max_model_len": 512, "max_num_batched_tokens": 512}
    config = EngineArgs(model=checkpoint, load_format="mmqc", **options, **sizes).create_engine_config()
    with set_current_vllm_config(config), torch.no_grad():
        if not model_parallel_is_initialized():
            init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
            initialize_model_parallel(1)
        try:
            model = get_model(vllm_config=config)
        except MmqcError as error:
            return str(error)
        with set_forward_context(None, config):
            return [logits(model, **prompt) for prompt in prompts]


def logits(model, ids, pixels, grid, positions):
    """[T, vocabulary]."""
    config = model.config
    images = model.embed_multimodal(pixel_values=pixels, image_grid_thw=grid)
    embeds = model.embed_input_ids(ids, images, is_multimodal=ids == config.image_token_id)
    return model.compute_logits(model.forward(None, positions, inputs_embeds=embeds))


if __name__ == "__main__":
    main(*sys.argv[1:])
