"""The rules of CONTRIBUTING.md that a machine can check, read off the source: nothing here runs a model."""

from __future__ import annotations

import ast
import functools
import graphlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mmqc"
TESTS = ROOT / "tests"

MAY_IMPORT = {
    "torch._inductor": ("mmqc/lowering/",),
    "torch._dynamo": ("mmqc/graph/capture.py", "mmqc/graph/tracing.py", "mmqc/backend.py", "mmqc/explain.py", "mmqc/kv/layer.py"),
    "triton": ("mmqc/kernels/", "mmqc/lowering/"),
    "transformers": (
        "mmqc/checkpoint/",
        "mmqc/kv/",
        "mmqc/aot/",
        "mmqc/cli/",
        "mmqc/samples/",
        "mmqc/compiler/compiled_loop.py",
        "mmqc/front/attention.py",
    ),
    "kernels": (),
}
VERBS = {"raise", "fold", "fuse", "insert", "reorder", "rewrite", "assign", "quantize", "suppress", "share"}
VAGUE = {"utils", "util", "common", "helpers", "base", "manager", "registry", "factory", "misc"}
MODEL_NAMES = re.compile(
    r"\b[a-z_]*_proj\b|\bfc[12]\b|\blm_head\b|\bself_attn\b|\binput_layernorm\b|\bln_q\b|\bmerger\b|\bvision_tower\b"
    r"|\blanguage_model\b|\bembed_tokens\b|\bpatch_embed\b"
)
KEEP_READER = "assign_scheme"  # the one pass that reads names: those that the user put into `keep`
FILE_LINES, FUNCTION_LINES, KERNEL_FUNCTION_LINES = 500, 60, 120
PLUG_INS = {("mmqc.config", "mmqc.checkpoint.torchao_handler")}  # loaded by name when torchao calls it
ROOT_FILES, ROOM_FILES = 12, 25
ONE_KIND = {"mmqc/ops", "mmqc/passes", "mmqc/lowering"}  # folders of one kind of file, one of the kind a file


class Import(NamedTuple):
    """One imported module path, and the line that names it."""

    module: str
    line: int


def sources(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node below `tree`, without the bodies of `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from run_time_nodes(child)


def dotted(node: ast.AST) -> str:
    """`a.b.c` for an attribute chain that starts at a name, else the empty string."""
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return node.id if isinstance(node, ast.Name) else ""


def module_name(path: Path) -> str:
    return relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(path: Path, nodes: Callable[[ast.AST], Iterator[ast.AST]] = run_time_nodes) -> Iterator[Import]:
    """What the file imports, anywhere in it: statements, `import_module("…")`, and `torch._x` reached by attribute."""
    package = module_name(path).split(".")
    here = package if path.name == "__init__.py" else package[:-1]
    for node in nodes(parse(path)):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = here[: len(here) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            yield from (Import(f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if dotted(node.func).split(".")[-1] in {"import_module", "__import__"}:
                yield Import(str(node.args[0].value), node.lineno)
        elif isinstance(node, ast.Attribute) and dotted(node).startswith(("torch._inductor", "torch._dynamo")):
            yield Import(dotted(node), node.lineno)


def is_below(module: str, root: str) -> bool:
    return module == root or module.startswith(root + ".")


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(parse(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """String constants that are not docstrings or other bare expression statements, nor parts of error messages."""
    bare = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    joined = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare | joined:
            yield node.lineno, node.value


# --- import directions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarded", MAY_IMPORT)
def test_import__guarded_package_only_where_allowed(guarded):
    allowed = MAY_IMPORT[guarded]
    found = [
        f"{relative(path)}:{line} imports {module}"
        for path in sources(PACKAGE)
        if not relative(path).startswith(allowed or ("none",))
        for module, line in imports(path)
        if is_below(module, guarded)
    ]
    assert not found, f"{guarded} belongs in {allowed or 'no file of mmqc'}"


def test_import__private_inductor_names_only_in_the_quarantine_file():
    found = [
        f"{relative(path)}:{line} imports {module}"
        for path in sources(PACKAGE / "lowering")
        if path.name != "inductor.py"
        for module, line in imports(path)
        if is_below(module, "torch._inductor") and "._" in module.removeprefix("torch._inductor")
    ]
    assert not found


def test_import__layers_hold():
    cli = pytest.importorskip("importlinter.cli")
    assert cli.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


def imported_modules() -> dict[str, set[str]]:
    """What every module of mmqc imports of mmqc, in functions and `if TYPE_CHECKING:` too.

    The package itself is left out: its doors (`mmqc.quantize_`) and its lazy table of names lead to every room.
    """
    modules = {module_name(path): path for path in sources(PACKAGE) if path != PACKAGE / "__init__.py"}
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        named = {module for module, _ in imports(path, ast.walk)}
        found[name] = {m if m in modules else m.rpartition(".")[0] for m in named} & set(modules) - {name}
    return found


def test_import__no_circle_not_even_of_types():
    """With two modules that need each other, neither is read or changed alone."""
    graph = imported_modules()
    assert len(graph) > 100
    for importer, plug_in in PLUG_INS:
        graph[importer].remove(plug_in)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as e:
        pytest.fail(" imports ".join(reversed(e.args[1])))


def test_import__every_module_has_a_layer():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = config["tool"]["importlinter"]["contracts"]
    placed = {m for c in contracts for m in re.findall(r"mmqc\.(\w+)", " ".join(c.get("layers", [])))}
    present = {p.stem if p.suffix else p.name for p in PACKAGE.iterdir() if p.suffix == ".py" or list(p.glob("*.py"))}
    assert present - {"__init__"} == placed, "the layers of pyproject.toml name every room and every module of the root"


def test_import__mmqc_is_lazy():
    script = """if True:
        import json, sys, time
        import torch
        before = set(sys.modules)
        start = time.process_time()  # of this process, however busy the machine is
        import mmqc
        seconds = time.process_time() - start
        print(json.dumps({"seconds": seconds, "new": sorted(set(sys.modules) - before)}))
    """
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    heavy = ("transformers", "triton", "torch._inductor", "torchao", "torch._dynamo", "matplotlib", "sklearn")
    assert not [m for m in result["new"] if any(is_below(m, h) for h in heavy)]
    assert result["seconds"] < 0.5, f"import mmqc took {result['seconds']:.2f} s over import torch"


# --- layout and size --------------------------------------------------------------------------------------------------


def test_layout__only_one_directory_is_called_kernels():
    hidden = {".venv", ".git", "site", "build", "out"}
    folders = [p for p in ROOT.rglob("kernels") if p.is_dir() and not hidden & set(p.relative_to(ROOT).parts)]
    assert [relative(p) for p in folders if p != PACKAGE / "kernels"] == []


def test_layout__tests_are_not_a_package():
    assert not list(TESTS.rglob("__init__.py"))


def test_layout__no_vague_file_names():
    assert [relative(p) for p in sources(PACKAGE) if p.stem in VAGUE] == []


def test_layout__rooms_stay_rooms():
    files: dict[str, int] = {}
    for path in sources(PACKAGE):
        files[relative(path.parent)] = files.get(relative(path.parent), 0) + 1
    assert files["mmqc"] <= ROOT_FILES, "the root has the doors, the config and the order; the rest goes into a room"
    assert {f: n for f, n in files.items() if f not in ONE_KIND and n > ROOM_FILES} == {}


def test_size__files():
    long = {relative(p): n for p in sources(PACKAGE, TESTS) if (n := p.read_text().count("\n")) > FILE_LINES}
    assert not long, f"more than {FILE_LINES} lines"


def test_size__functions():
    long = {}
    for path in sources(PACKAGE, TESTS):
        limit = KERNEL_FUNCTION_LINES if relative(path).startswith("mmqc/kernels/") else FUNCTION_LINES
        for function in functions(path):
            length = (function.end_lineno or 0) - function.lineno + 1
            if length > limit:
                long[f"{relative(path)}:{function.lineno} {function.name}"] = length
    assert not long, f"more than {FUNCTION_LINES} lines ({KERNEL_FUNCTION_LINES} in kernels)"


# --- passes, ops ------------------------------------------------------------------------------------------------------


def pass_classes() -> list[tuple[Path, ast.ClassDef]]:
    """Classes of mmqc/passes that match and rewrite."""
    found = []
    for path in sources(PACKAGE / "passes"):
        for node in parse(path).body:
            methods = {n.name for n in getattr(node, "body", []) if isinstance(n, ast.FunctionDef)}
            if isinstance(node, ast.ClassDef) and {"match", "rewrite"} <= methods:
                found.append((path, node))
    return found


def pass_name(node: ast.ClassDef) -> str | None:
    for item in node.body:
        targets = item.targets if isinstance(item, ast.Assign) else [getattr(item, "target", None)]
        if any(dotted(t) == "name" for t in targets if t) and isinstance(item.value, ast.Constant):
            return str(item.value.value)
    return None


def test_pass__file_class_and_name_agree():
    wrong = []
    for path, node in pass_classes():
        camel = "".join(word.capitalize() for word in path.stem.split("_"))
        if node.name != camel or pass_name(node) != path.stem or path.stem.split("_")[0] not in VERBS:
            wrong.append(f"{relative(path)}: class {node.name}, name {pass_name(node)!r}")
    assert not wrong, f"a pass file is verb_object.py, verb from {sorted(VERBS)}; its class and name follow from it"


def test_pass__no_name_is_part_of_another():
    names = sorted({path.stem for path, _ in pass_classes()})
    assert [(a, b) for a in names for b in names if a != b and a in b] == []


def test_pass__has_tests_and_a_row_in_the_reference():
    table = (ROOT / "docs/reference/passes.md").read_text(encoding="utf-8")
    stems = sorted({path.stem for path, _ in pass_classes()})
    assert [s for s in stems if not (TESTS / f"passes_tests/test_{s}.py").exists()] == []
    assert [s for s in stems if f"| `{s}` |" not in table] == []


def test_pass__order_is_in_the_pipeline_alone():
    """Nobody else makes a pass, or lists two of their classes."""
    classes = {node.name for _, node in pass_classes()}
    found = []
    for path in sources(PACKAGE):
        if path.parent == PACKAGE / "passes" or path == PACKAGE / "pipeline.py":
            continue
        for node in ast.walk(parse(path)):
            called = isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in classes
            listed = isinstance(node, ast.List | ast.Tuple | ast.Set) and len([n for n in node.elts if dotted(n) in classes]) > 1
            if called or listed:
                found.append(f"{relative(path)}:{node.lineno} {ast.unparse(node)}")
    assert not found, "mmqc/pipeline.py has functions that give passes in their order"


def test_op__has_tests():
    defines = re.compile(r"^define\(", re.MULTILINE)
    stems = [p.stem for p in sources(PACKAGE / "ops") if defines.search(p.read_text())]
    assert stems or not (PACKAGE / "ops").exists()
    assert [s for s in stems if not (TESTS / f"ops_tests/test_{s}.py").exists()] == []


def test_names__passes_and_graph_never_match_on_model_names():
    found = [
        f"{relative(path)}:{line} {text!r}"
        for path in sources(PACKAGE / "passes", PACKAGE / "graph")
        if path.stem != KEEP_READER
        for line, text in strings(parse(path))
        if MODEL_NAMES.search(text)
    ]
    assert not found, "layers are found by graph position, never by name"


def test_names__patterns_only_where_keep_is_read():
    found = [
        f"{relative(path)}:{line} imports {module}"
        for path in sources(PACKAGE / "passes")
        if path.stem != KEEP_READER
        for module, line in imports(path)
        if module.split(".")[0] in {"re", "fnmatch"}
    ]
    assert not found


# --- a module's test is found by its path -----------------------------------------------------------------------------

COVERS: dict[str, str] = {
    "aot_tests/test_cpp_runner.py": "aot/static_cache",
    "aot_tests/test_exportable.py": "aot/index_draw",
    "aot_tests/test_packed_programs.py": "aot/step_batches",
    "benchmarks_tests/test_kv_throughput.py": "cli/bench_kv cli/bench_kv_model cli/bench_kv_plot",
    "calibration_tests/test_calibrate.py": "calibration/moments",
    "calibration_tests/test_sequential.py": (
        "calibration/blocks calibration/spool calibration/stream quantization/memory_error report/account"
    ),
    "checkpoint_tests/test_hf.py": (
        "checkpoint/checksum checkpoint/data_free checkpoint/hf_hook checkpoint/module_spec checkpoint/torchao_handler"
    ),
    "checkpoint_tests/test_load.py": "checkpoint/foreign_weights",
    "cli_tests/test_app.py": "cli/checks cli/config cli/demo cli/doctor",
    "cli_tests/test_jobs.py": "cli/bench report/read",
    "compiler_tests/test_compiled_loop.py": "compiler/record",
    "compiler_tests/test_run_time.py": "compiler/graph_content compiler/options graph/capture",
    "compiler_tests/test_self_quantize.py": "compiler/torchao_graph",
    "front_tests/test_front.py": "explain front/find graph/tracing",
    "front_tests/test_observe.py": "front/handover",
    "gpu_tests/test_launches.py": "kernels/mixed_on_cuda kernels/per_token_on_cuda",
    "gpu_tests/test_mixed.py": "lowering/mixed_on_cuda lowering/per_token_on_cuda",
    "graph_tests/spaces/test_spaces.py": (
        "graph/spaces/coordinate_rules graph/spaces/coordinates graph/spaces/factors graph/spaces/towers graph/spaces/uses"
    ),
    "graph_tests/test_plan.py": "graph/spaces/boundary",
    "graph_tests/test_program.py": "graph/text",
    "graph_tests/test_record.py": "graph/spaces/text",
    "graph_tests/tokens/test_rules.py": "graph/memory graph/meta graph/sizes graph/tokens/tokens graph/tokens/uses",
    "kernels_tests/hadamard/test_basis_quantize_per_token.py": "kernels/shared/gluon_tiles kernels/shared/quantize_codes",
    "kernels_tests/hadamard/test_hadamard_wgmma.py": "kernels/hadamard/hadamard_plan kernels/hadamard/hadamard_tiles",
    "kernels_tests/kv/test_kv_attention.py": "kernels/kv/kv_words",
    "kernels_tests/kv/test_kv_round_keys.py": "kernels/kv_on_cuda",
    "kernels_tests/matmul/test_group_scaled_matmul.py": "kernels/matmul/unpack_weight",
    "kernels_tests/matmul/test_grouped_matmul.py": "lowering/grouped_matmul",
    "kernels_tests/matmul/test_packed_matmul.py": (
        "kernels/matmul/activation_tiles kernels/matmul/epilogue_tiles kernels/matmul/gated_matmul_tiles "
        "kernels/matmul/linears kernels/matmul/packed_tiles kernels/shared/int4_codes kernels/shared/launch "
        "kernels/shared/load_tile kernels/shared/program_order kernels/shared/row_scale lowering/launch"
    ),
    "kernels_tests/matmul/test_pingpong_matmul.py": "kernels/matmul/pingpong_tiles",
    "kernels_tests/matmul/test_pingpong_ring.py": "kernels/matmul/pingpong_mixed_tiles",
    "kernels_tests/matmul/test_scaled_matmul.py": "kernels/shared/split_k",
    "kernels_tests/matmul/test_scaled_matmul_epilogue.py": (
        "kernels/rows/silu_multiply kernels/shared/device_facts lowering/scaled_matmul_epilogue"
    ),
    "kernels_tests/rows/test_norm_quantize.py": "lowering/norm_quantize",
    "kernels_tests/rows/test_norm_quantize_per_token.py": "graph/tokens/moves",
    "kernels_tests/rows/test_quantize_per_token.py": "lowering/quantize_per_token",
    "kernels_tests/test_on_cuda.py": "lowering/on_cuda",
    "kv_tests/test_cache_loop.py": "kv/generate",
    "kv_tests/test_cache_offload.py": "kv/layer",
    "kv_tests/test_cache_sliding.py": "kv/attention",
    "kv_tests/test_rounded.py": "ops/kv_rows",
    "kv_tests/test_scores.py": "report/score_histogram",
    "lowering_tests/test_fused_per_token.py": "lowering/known_transforms",
    "lowering_tests/test_lowering.py": (
        "lowering/hadamard lowering/pack lowering/quantize lowering/rotate lowering/scaled_matmul lowering/tag_modality "
        "lowering/weight_only_matmul"
    ),
    "methods_tests/test_calibquant.py": "kernels/kv/kv_combine kv/calibrate kv/query_moment quantization/kv",
    "methods_tests/test_experts.py": "experts/call experts/find experts/modules experts/statistics",
    "methods_tests/test_resq.py": "kv/rounding quantization/pca_bases",
    "nn_tests/test_linear.py": "nn/hooks nn/integer_weight nn/online_hadamard",
    "nn_tests/test_rotated_norm.py": "nn/norm",
    "nn_tests/test_simulated.py": "nn/mixed_linear",
    "ops_tests/test_causal_mask.py": "lowering/causal_mask",
    "ops_tests/test_gather_rows.py": "lowering/gather_rows",
    "ops_tests/test_gather_tokens.py": "lowering/gather_tokens",
    "ops_tests/test_hadamard.py": "ops/define",
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
    "quantization_tests/test_channel_scales.py": "calibration/block_loss quantization/options",
    "quantization_tests/test_progress.py": "calibration/measure",
    "quantization_tests/test_resume.py": (
        "checkpoint/save quantization/channel_peaks quantization/job quantization/measured_rewrites"
    ),
    "report_tests/test_report.py": "report/html report/plots report/scores report/style",
    "samples_tests/test_samples.py": (
        "samples/checkpoint samples/handwriting samples/processor samples/questions samples/sample samples/scoring samples/stress"
    ),
    "solvers_tests/test_awq.py": "solvers/awq_clip solvers/second_moment",
    "solvers_tests/test_gptq.py": "solvers/quantized",
    "solvers_tests/test_mse_clip.py": "solvers/clip",
    "solvers_tests/test_rtn.py": "solvers/grid",
    "test_backend.py": "compiler/discovery",
    "test_config.py": "recipes specs",
    "test_export.py": "aot/index_find aot/programs aot/variants quantization/weights_only",
    "test_plan.py": "pipeline",
    "test_quantize_errors.py": "errors",
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
    assert not wrong, "COVERS, at the top of this part:\n" + "\n".join(wrong)


# --- the tests themselves ---------------------------------------------------------------------------------------------


def checks_something(function: ast.AST) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call) and re.search(r"raises|warns|check|assert", dotted(node.func)):
            return True
        if isinstance(node, ast.keyword) and node.arg == "check" and ast.unparse(node.value) == "True":
            return True  # a subprocess that has to succeed
    return False


def test_tests__every_test_asserts():
    empty = [
        f"{relative(path)}:{function.lineno} {function.name}"
        for path in sources(TESTS)
        for function in functions(path)
        if function.name.startswith("test_") and not checks_something(function)
    ]
    assert not empty


def test_tests__tolerances_come_from_the_table():
    literal = [
        f"{relative(path)}:{node.lineno} {keyword.arg}="
        for path in sources(TESTS)
        if path.name != "tolerance.py"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg in {"atol", "rtol"} and isinstance(keyword.value, ast.Constant) and keyword.value.value != 0
    ]
    assert not literal, "take rtol and atol from tests/support/tolerance.py (docs/adr/0006)"
