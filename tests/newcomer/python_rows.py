"""transformers, peft and torch on the models that the command line has made: programs, each as somebody would write it."""

from __future__ import annotations

from typing import Any

from tests.newcomer.row import Row

HEAD = """
import copy, torch, transformers
from PIL import Image
import mmqc
from transformers import AutoModelForImageTextToText, AutoProcessor
processor = AutoProcessor.from_pretrained("w4a8")
load = lambda name="w4a8", **options: AutoModelForImageTextToText.from_pretrained(name, **options)
ask = lambda text="<image> w10 w20", images=("data/0.png",): processor(
    text=text, images=[Image.open(i) for i in images] or None, return_tensors="pt")
greedy = dict(max_new_tokens=4, do_sample=False)
answer = lambda model, **options: processor.decode(model.generate(**ask(), **(greedy | options))[0])
"""
LORA = """
from peft import LoraConfig, get_peft_model
lora = get_peft_model(load(), LoraConfig(target_modules={targets}))
batch = ask(); out = lora(**batch, labels=batch["input_ids"]); out.loss.backward()
norms = [p.grad.norm() for n, p in lora.named_parameters() if "lora_B" in n and p.grad is not None]
assert norms and max(norms) > 0
print("gradients of", len(norms), "adapters")
"""


def program(what: str, code: str, *words: str, head: str = HEAD, **more: Any) -> Row:
    """A row of a program behind ``HEAD``."""
    return Row(what, head + code, words, code=True, **more)


ROWS = (
    program("import mmqc imports no torch", "import mmqc, sys\nassert not {'torch', 'transformers'} & set(sys.modules)", head=""),
    program(
        "from_pretrained without import mmqc is refused, not random weights",
        "from transformers import AutoModelForImageTextToText as M\nM.from_pretrained('w4a8')",
        "quant_method",  # transformers' own words for a checkpoint of whose quantizer it knows nothing
        head="",
        refused=True,
    ),
    program(
        "pipeline of transformers",
        "pipe = transformers.pipeline('image-text-to-text', 'w4a8')\n"
        "print(pipe('data/0.png', text='<image> w10', max_new_tokens=4)[0]['generated_text'])",
    ),
    program("quantization_config=rtn", "load('model', quantization_config=mmqc.recipes.rtn(4, group_size=8))"),
    program("quantization_config=mquant", "load('model', quantization_config=mmqc.recipes.mquant(4))", "quantize_", refused=True),
    program("dtype=bfloat16 at load", "print(answer(load(dtype=torch.bfloat16)))"),
    program(".to(bfloat16)", "print(answer(load().to(torch.bfloat16)))"),
    program("generate is the same twice", "m = load()\nassert answer(m) == answer(m)"),
    program("beams", "print(answer(load(), num_beams=2))"),
    program("static cache", "m = load()\nassert answer(m, cache_implementation='static') == answer(m)"),
    program("text alone", "print(processor.decode(load().generate(**ask('w10 w20', ()), **greedy)[0]))"),
    program(
        "left padding",
        "processor.tokenizer.padding_side = 'left'\nm = load()\n"
        "two = processor(text=['w10 w20 w30', 'w10'], padding=True, return_tensors='pt')\n"
        "one = m.generate(**ask('w10', ()), **greedy)[0, -4:]\n"
        "assert m.generate(**two, **greedy)[1, -4:].equal(one)",
    ),
    program("eager attention", "print(answer(load(attn_implementation='eager')))"),
    program("deepcopy", "m = load()\nassert answer(copy.deepcopy(m)) == answer(m)"),
    program(
        "save again, load again",
        "m = load()\nm.save_pretrained('again')\nassert (m(**ask()).logits - load('again')(**ask()).logits).abs().max() == 0",
    ),
    program("device_map=auto", "print(answer(load(device_map='auto')))"),
    program(
        "device_map with a disk",
        "spread = {f'model.{part}': 'cpu' for part in ('vision_tower', 'multi_modal_projector')}\n"
        "spread |= {'model.language_model': 'disk', 'lm_head': 'cpu'}\n"
        "m = load(device_map=spread, offload_folder='offload', offload_buffers=True)\nassert answer(m) == answer(load())",
    ),
    program(
        "a streamer",
        "s = transformers.TextStreamer(processor.tokenizer)\nprint(answer(load(), streamer=s))",
    ),
    program(
        "a streamer and compiled_loop",
        "s = transformers.TextIteratorStreamer(processor.tokenizer, timeout=300)\nm = load()\n"
        "m.generate(**ask(), **greedy, streamer=s, cache_implementation='static', custom_generate=mmqc.compiled_loop)\n"
        "assert ''.join(s).split() == answer(m).split()",
    ),
    program("model.compile() by Inductor", "m = load()\nm.compile()\nprint(m(**ask()).logits.shape)"),
    program(
        "model.compile(backend='mmqc')",
        "m, expected = load(), answer(load())\nm.compile(backend='mmqc')\nassert answer(m) == expected",
    ),
    program("plain backward", "b = ask()\nm = load()\nm(**b, labels=b['input_ids']).loss.backward()"),
    program("LoRA on a named layer", LORA.format(targets="['q_proj']"), "gradients of", packages=("peft",)),
    program("LoRA on all linears", LORA.format(targets="'all-linear'"), "gradients of", packages=("peft",)),
    program(
        "Trainer and LoRA",
        "from peft import LoraConfig, get_peft_model\n"
        "lora = get_peft_model(load(), LoraConfig(target_modules='all-linear'))\nb = ask()\n"
        "rows = [{**b, 'labels': b['input_ids']}] * 3\n"
        "a = transformers.TrainingArguments('trained', max_steps=3, per_device_train_batch_size=1, report_to=[])\n"
        "print(transformers.Trainer(lora, a, train_dataset=rows, data_collator=lambda rows: rows[0]).train().training_loss)",
        packages=("peft",),
    ),
    program(
        "SFTTrainer and LoRA",
        "import trl, datasets\nfrom peft import LoraConfig\n"
        "rows = datasets.Dataset.from_list([{'text': 'w10 w20 w30 w40'}] * 4)\n"
        "a = trl.SFTConfig('sft', max_steps=3, per_device_train_batch_size=1, report_to=[], use_cpu=True)\n"
        "print(trl.SFTTrainer(load(), a, train_dataset=rows, processing_class=processor.tokenizer,\n"
        "                     peft_config=LoraConfig(target_modules=['q_proj'])).train().training_loss)",
        packages=("peft", "trl", "datasets"),
    ),
    program(
        "compressed-tensors, read without mmqc",
        "m = load('w8')\nmmqc.save_pretrained(m, 'ct', format='compressed-tensors')\n"
        "code = 'from transformers import AutoModelForImageTextToText as M; import sys; M.from_pretrained(\"ct\")'\n"
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', code + '; assert \"mmqc\" not in sys.modules'], check=True)",
        packages=("compressed_tensors",),
    ),
    program(
        "compressed-tensors of mquant",
        "mmqc.save_pretrained(load(), 'ct', format='compressed-tensors')",
        "or keep everything: format='mmqc'",
        refused=True,
        packages=("compressed_tensors",),
    ),
    program(
        "lm_eval's HFLM around a quantized model",
        "from lm_eval.models.huggingface import HFLM\nprint(HFLM(pretrained=load()))",
        packages=("lm_eval",),
    ),
    program(
        "a report in a notebook is a small table",
        "r = mmqc.quantize_(load('model'), mmqc.recipes.rtn(8))\nassert 100 < len(r._repr_html_()) < 9000 and len(repr(r)) < 200",
    ),
    program(
        "without scikit-learn the sample says what to install",
        "import mmqc\nmmqc.samples.load('digits-vqa').prompts(1)",
        "mmqc[demo]",
        head="",
        refused=True,
        without=("sklearn",),
    ),
    program(
        "mmqc serve, asked by OpenAI's client",
        "import subprocess, sys, time, openai\n"
        "server = subprocess.Popen([sys.executable, '-m', 'mmqc', 'serve', 'w4a8', '--port', '8765', '--no-compile'],\n"
        "                          stderr=subprocess.DEVNULL)\n"
        "client = openai.OpenAI(base_url='http://127.0.0.1:8765/v1', api_key='none', max_retries=60, timeout=60)\n"
        "try:\n"
        "    said = client.chat.completions.create(model='w4a8', messages=[{'role': 'user', 'content': 'w10'}], max_tokens=4)\n"
        "    print(said.choices[0].finish_reason, said.usage.completion_tokens)\n"
        "finally:\n"
        "    server.terminate()\n",
        packages=("openai", "fastapi"),
    ),
)
