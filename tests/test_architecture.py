"""The rules of CONTRIBUTING.md that a machine can check, read off the source: nothing here runs a model."""

from __future__ import annotations

import ast
import graphlib
import json
import logging.config
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from source_tree import (
    PACKAGE,
    ROOT,
    TESTS,
    dotted,
    functions,
    imports,
    is_below,
    module_name,
    parse,
    relative,
    sources,
    strings,
)

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
        "mmqc/compiler/kept_cache.py",
        "mmqc/compiler/step_inputs.py",
        "mmqc/compiler/step_mask.py",
        "mmqc/compiler/step_scores.py",
        "mmqc/compiler/step_stops.py",
        "mmqc/compiler/warm.py",
        "mmqc/front/attention.py",
    ),
    "peft": ("mmqc/adapters/peft_layers.py",),
    "kernels": (),
}
VERBS = {"raise", "fold", "fuse", "insert", "reorder", "rewrite", "assign", "quantize", "suppress", "share", "split"}
VAGUE = {"utils", "util", "common", "helpers", "base", "manager", "registry", "factory", "misc"}
MODEL_NAMES = re.compile(
    r"\b[a-z_]*_proj\b|\bfc[12]\b|\blm_head\b|\bself_attn\b|\binput_layernorm\b|\bln_q\b|\bmerger\b|\bvision_tower\b"
    r"|\blanguage_model\b|\bembed_tokens\b|\bpatch_embed\b"
)
KEEP_READER = "assign_scheme"  # the one pass that reads names: those that the user put into `keep`
FILE_LINES, FUNCTION_LINES, KERNEL_FUNCTION_LINES = 500, 60, 120
PLUG_INS = {("mmqc.config", "mmqc.checkpoint.torchao_handler")}  # loaded by name when torchao calls it
ROOT_FILES, ROOM_FILES = 13, 25
ONE_KIND = {"mmqc/ops", "mmqc/passes", "mmqc/lowering"}  # folders of one kind of file, one of the kind a file


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


def test_import__layers_hold(monkeypatch):
    cli = pytest.importorskip("importlinter.cli")
    # It configures logging anew, which disables every logger that is there: the next tests' messages would be lost.
    monkeypatch.setattr(logging.config, "dictConfig", lambda _: None)
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


def on_import(tree):
    """Nodes that run when a module is imported: no bodies of functions, of ``if TYPE_CHECKING``, or of ``try``."""
    for child in ast.iter_child_nodes(tree):
        unread = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Try)
        if unread or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            continue
        yield child
        yield from on_import(child)


def test_import__a_graph_is_lowered_where_there_is_no_triton():
    """Builds of torch for the CPU come without: what the backend imports to compile a graph does, too."""
    files = {module_name(path): path for path in sources(PACKAGE)}
    waiting, chains = ["mmqc.backend", "mmqc.lowering", "mmqc.lowering.early_compiler"], {}
    while waiting:
        name = waiting.pop()
        for module, line in imports(files[name], on_import):
            assert not is_below(module, "triton"), f"{name}:{line} imports triton, by way of {chains.get(name, 'nothing')}"
            known = next((m for m in (module, module.rpartition(".")[0]) if m in files), None)
            if known is not None and known not in chains:
                chains[known] = f"{chains.get(name, '')} > {name}"
                waiting.append(known)
    assert "mmqc.kernels.hadamard.hadamard_plan" in chains


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
    hidden = re.compile(r"(\.|site$|build$|out$)")
    folders = [p for p in ROOT.rglob("kernels") if p.is_dir() and not any(map(hidden.match, p.relative_to(ROOT).parts))]
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


# --- the tests themselves ---------------------------------------------------------------------------------------------


def test_kernels__every_launch_says_whether_sums_are_fused():
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            launched = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) else None
            if isinstance(launched, ast.Name) and launched.id.endswith("_kernel"):
                said = {keyword.arg for keyword in node.keywords}
                assert "enable_fp_fusion" in said, f"{path}:{node.lineno}: Triton's default would decide, which differs by version"


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
