"""tests/ mirrors mmqc/: the test of a module is found by its path."""

from __future__ import annotations

import functools
import re

from source_tree import PACKAGE, ROOT, TESTS, imports, is_below, relative, sources

COVERS: dict[str, str] = {
    "adapters_tests/test_load.py": "adapters/errors adapters/fold adapters/match adapters/merge adapters/read nn/adapted_linear",
    "aot_tests/test_cpp_runner.py": "aot/static_cache",
    "aot_tests/test_exportable.py": "aot/index_draw",
    "aot_tests/test_packed_programs.py": "aot/step_batches",
    "check_tests/test_run.py": "check/finding check/kernels check/linears check/settings check/stored check/structure check/values",
    "checkpoint_tests/test_hf.py": "checkpoint/checksum checkpoint/data_free checkpoint/hf_hook checkpoint/torchao_handler",
    "checkpoint_tests/test_hf_named.py": "checkpoint/method_name",
    "checkpoint_tests/test_load.py": "checkpoint/foreign_weights",
    "cli_tests/test_app.py": "cli/options",
    "cli_tests/test_compare.py": "report/fronts",
    "cli_tests/test_lmms_model.py": "cli/lmms cli/lmms_tasks",
    "cli_tests/test_eval_job.py": "cli/asked",
    "compiler_tests/test_compiled_loop.py": "compiler/record",
    "compiler_tests/test_run_time.py": "compiler/graph_content compiler/options graph/capture",
    "compiler_tests/test_self_quantize.py": "compiler/torchao_graph",
    "engines_tests/test_real_vllm.py": "engines/ask_vllm",
    "front_tests/test_front.py": "explain front/find",
    "gpu_tests/test_early_start.py": "kernels/shared/early_start",
    "kernels_tests/shared/test_compile_elsewhere.py": "lowering/compile_elsewhere",
    "kernels_tests/shared/test_repeated_launch.py": "kernels/shared/compile_ahead",
    "lowering_tests/test_plans.py": "kernels/hadamard/transform_by_rows kernels/matmul/by_rows lowering/by_rows",
    "lowering_tests/test_python_call.py": "lowering/kernel_names",
    "gpu_tests/test_launches.py": "kernels/mixed_on_cuda",
    "gpu_tests/test_mixed.py": "lowering/mixed_on_cuda",
    "graph_tests/spaces/test_spaces.py": (
        "graph/spaces/coordinate_rules graph/spaces/coordinates graph/spaces/factors graph/spaces/towers graph/spaces/uses"
    ),
    "graph_tests/test_changes.py": "graph/change_data",
    "graph_tests/test_plan.py": "graph/spaces/boundary graph/spaces/space",
    "graph_tests/test_program.py": "graph/text",
    "graph_tests/test_record.py": "graph/spaces/text",
    "graph_tests/tokens/test_rules.py": "graph/memory graph/sizes graph/tokens/uses",
    "kernels_tests/hadamard/test_hadamard_wgmma.py": "kernels/hadamard/hadamard_tiles kernels/shared/gluon_tiles",
    "kernels_tests/kv/test_kv_attention.py": "kernels/kv/kv_combine kernels/kv/kv_words",
    "kernels_tests/kv/test_kv_round_keys.py": "kernels/kv_on_cuda",
    "kernels_tests/matmul/test_float4_matmul.py": "kernels/shared/float4_codes",
    "kernels_tests/matmul/test_group_scaled_matmul.py": "kernels/matmul/unpack_weight",
    "kernels_tests/matmul/test_grouped_matmul.py": "lowering/grouped_matmul",
    "kernels_tests/warpgroup/test_packed_matmul.py": (
        "kernels/matmul/epilogue_tiles kernels/matmul/gated_matmul_tiles kernels/matmul/linears "
        "kernels/warpgroup/packed_tiles kernels/matmul/product kernels/shared/activation_tiles kernels/shared/int4_codes "
        "kernels/shared/launch kernels/shared/load_tile kernels/shared/program_order kernels/shared/row_scale "
        "lowering/launch"
    ),
    "kernels_tests/warpgroup/test_pingpong_matmul.py": "kernels/warpgroup/pingpong_tiles",
    "kernels_tests/warpgroup/test_pingpong_ring.py": "kernels/warpgroup/pingpong_mixed_tiles kernels/warpgroup/byte_tiles",
    "kernels_tests/matmul/test_scaled_matmul_epilogue.py": ("kernels/shared/device_facts lowering/scaled_matmul_epilogue"),
    "kernels_tests/rows/test_norm_quantize.py": "lowering/norm_quantize",
    "kernels_tests/rows/test_norm_quantize_per_token.py": "graph/tokens/moves",
    "kernels_tests/test_on_cuda.py": "lowering/on_cuda",
    "kernels_tests/test_rows_on_cuda.py": "kernels/shared/plan",
    "kv_tests/test_cache_loop.py": "kv/generate",
    "kv_tests/test_cache_offload.py": "kv/layer",
    "kv_tests/test_cache_sliding.py": "kv/attention",
    "kv_tests/test_rounded.py": "ops/kv_rows",
    "lowering_tests/test_lowering.py": (
        "lowering/pack lowering/rotate lowering/scaled_matmul lowering/tag_modality lowering/weight_only_matmul"
    ),
    "methods_tests/test_experts.py": "experts/call experts/find",
    "nn_tests/test_linear.py": "nn/integer_weight nn/online_hadamard",
    "nn_tests/test_rotated_norm.py": "nn/norm",
    "ops_tests/test_causal_mask.py": "lowering/causal_mask",
    "ops_tests/test_float4_matmul.py": "lowering/float4_matmul ops/float4",
    "ops_tests/test_gather_rows.py": "lowering/gather_rows",
    "ops_tests/test_gather_tokens.py": "lowering/gather_tokens",
    "ops_tests/test_kv_pack.py": "ops/kv_words",
    "ops_tests/test_materialize.py": "lowering/materialize",
    "ops_tests/test_mixed_matmul.py": "lowering/mixed_matmul",
    "ops_tests/test_modality_order.py": "lowering/modality_order",
    "ops_tests/test_scaled_matmul.py": "ops/divide",
    "ops_tests/test_weight_only_cpu.py": "lowering/cpp_function lowering/few_rows lowering/few_rows_cpp",
    "passes_tests/test_fold_channel_scale.py": "graph/scaling",
    "passes_tests/test_fold_signs.py": "lowering/fused",
    "passes_tests/test_quantize_mixed.py": "graph/linear",
    "passes_tests/test_raise_ops.py": "graph/semantic passes/facts",
    "quantization_tests/test_resume.py": "checkpoint/save",
    "report_tests/test_headline.py": "report/recipe_words",
    "report_tests/test_report.py": "report/html report/plots report/scores report/tables",
    "samples_tests/test_samples.py": (
        "samples/checkpoint samples/handwriting samples/processor samples/questions samples/sample samples/scoring samples/stress"
    ),
    "samples_tests/test_docs_vqa.py": (
        "samples/docs/alphabet samples/docs/canvas samples/docs/charts samples/docs/checkpoint samples/docs/glyphs "
        "samples/docs/page samples/docs/photos samples/docs/place samples/docs/questions samples/docs/receipts "
        "samples/docs/tables samples/docs/texts samples/docs/words"
    ),
    "solvers_tests/test_awq.py": "solvers/awq_clip solvers/second_moment",
    "solvers_tests/test_float4_grid.py": "solvers/widest",
    "solvers_tests/test_gptq.py": "solvers/quantized",
    "solvers_tests/test_mse_clip.py": "solvers/clip",
    "test_backend.py": "compiler/discovery",
    "test_config.py": "recipes/cache specs",
    "test_export.py": "aot/index_find aot/programs aot/variants",
    "test_quantize_errors.py": "errors",
    "vllm_tests/test_lent.py": "vllm/encoder_attention vllm/linear_kernel",
    "vllm_tests/test_method.py": "vllm/config vllm/parameters",
}


def place_of_test(module: str) -> str:
    """Where the test of mmqc/<room>/<module>.py is: tests/<room>_tests/test_<module>.py; a kernel's tiles have the kernel's."""
    *rooms, stem = module.split("/")
    folder = "/".join([f"{rooms[0]}_tests", *rooms[1:], ""]) if rooms else ""
    return f"{folder}test_{stem.removesuffix('_tiles') if rooms[:1] == ['kernels'] else stem}.py"


@functools.cache
def imported(name: str) -> frozenset[str]:
    """What a file of the repository imports: by the name of a module, or of something in one; nothing for other names."""
    path = ROOT / name.replace(".", "/")
    found = [p for p in (path.with_suffix(".py"), path / "__init__.py", path.parent.with_suffix(".py")) if p.exists()]
    return frozenset(module for p in found[:1] for module, _ in imports(p))


def is_tested(module: str, test: str) -> bool:
    """Whether a test names the module or imports it: itself, through tests/support, or through what it imports of the same room."""
    room, full = "mmqc." + module.split("/")[0], "mmqc." + module.replace("/", ".")
    own = imported("tests." + test.removesuffix(".py").replace("/", "."))
    own = own.union(*(imported(f"tests.support.{name.split('.')[0]}") for name in own))
    seen, new = set(own), {found for name in own if is_below(name, "mmqc") for found in imported(name)}
    while new - seen:
        seen |= new
        new = {found for name in new if is_below(name, room) for found in imported(name)}
    word = rf"\b{module.split('/')[-1]}\b"
    return any(is_below(name, full) for name in seen) or bool(re.search(word, (TESTS / test).read_text(encoding="utf-8")))


def test_tests__are_found_by_the_modules_path():
    modules = {relative(p).removeprefix("mmqc/").removesuffix(".py") for p in sources(PACKAGE) if not p.stem.startswith("__")}
    listed = [(module, test) for test, listing in COVERS.items() for module in listing.split()]
    alone = [m for m in sorted(modules - {m for m, _ in listed}) if not (TESTS / place_of_test(m)).exists()]
    wrong = [f"write tests/{place_of_test(m)}, or list {m} with the test that covers it" for m in alone]
    for module, test in listed:
        if module not in modules:
            wrong.append(f"delete {module} from the line of {test}: there is no such module")
        elif (TESTS / place_of_test(module)).exists():
            wrong.append(f"delete {module} from the line of {test}: tests/{place_of_test(module)} is its test")
        elif not (TESTS / test).exists():
            wrong.append(f"change the line of {test}, which is no file: what tests {module} now?")
        elif not is_tested(module, test):
            wrong.append(f"change the line of {test}, which does not name {module}: what tests it?")
    assert not wrong, "COVERS, at the top of this file:\n" + "\n".join(wrong)
