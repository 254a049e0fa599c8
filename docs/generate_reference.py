"""Reference pages from docstrings, and the index of the results: an mkdocs hook, also callable as a script.

    python docs/generate_reference.py [FOLDER]     writes the pages there, to look at

Docstrings are read from the source; only the list of public names and the command line's options are asked of mmqc itself.
A page per kind of reader: the public API, the recipes, the ops between passes and kernels, the kernels, the command line.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mmqc"
SECTIONS = ("Args", "Returns", "Raises", "Attributes", "Yields")


def pages() -> dict[str, str]:
    """Markdown by path under docs/."""
    return {
        "reference/api.md": api(),
        "reference/recipes.md": module_page("Recipes", PACKAGE / "recipes/__init__.py", PACKAGE / "recipes/cache.py"),
        "reference/ops.md": folder_page("Ops", PACKAGE / "ops", defined=True),
        "reference/kernels.md": folder_page("Kernels", PACKAGE / "kernels", defined=False),
        "reference/cli.md": command_line(),
        "results/index.md": results(),
    }


# --- docstrings -------------------------------------------------------------------------------------------------------


def parsed(path: Path) -> ast.Module:
    """The source's tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


def definitions(tree: ast.Module) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """Functions and classes of a module, by name."""
    return {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}


def signature(node: ast.FunctionDef) -> str:
    """E.g. ``rtn(weight_bits: int = 8) -> QuantConfig``, without self."""
    arguments = ast.unparse(node.args)
    arguments = re.sub(r"^(self|cls)(, )?", "", arguments)
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({arguments}){result}"


def described(docstring: str | None) -> str:
    """A Google-style docstring as Markdown: its sections as lists, indented blocks as they are."""
    lines = (docstring or "").splitlines()
    out: list[str] = []
    section = ""
    for line in lines:
        heading = line.strip().removesuffix(":")
        if heading in SECTIONS and line.rstrip() == f"{heading}:":
            section = heading
            out += ["", f"**{heading}**", ""]
        elif section and line.startswith("    ") and not line.startswith("     "):
            name, colon, text = line.strip().partition(": ")
            named = colon and re.fullmatch(r"[\w., *]+", name)
            out.append(f"* `{name}`: {text}" if named else f"* {line.strip()}")
        elif section and line.startswith("     "):
            out.append(f"  {line.strip()}")
        else:
            if line.strip() and not line.startswith(" "):
                section = ""
            noted = re.match(r"([A-Z][a-z]{2,10}):  *(\S.*)", line)  # Shapes:  x [M, K] ...
            out += ["", f"*{noted[1]}*: {noted[2]}"] if noted else [line]
    return "\n".join(out).replace("``", "`")


def entry(node: ast.FunctionDef | ast.ClassDef, level: int = 2) -> Iterator[str]:
    """A heading, the signature, the docstring; for a class its public methods too."""
    yield f"{'#' * level} `{node.name}`"
    if isinstance(node, ast.FunctionDef):
        yield f"```python\n{signature(node)}\n```"
    yield described(ast.get_docstring(node))
    for method in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and ast.get_docstring(method):
            first = (ast.get_docstring(method) or "").splitlines()[0].replace("``", "`")
            is_property = any("property" in ast.unparse(d) for d in method.decorator_list)
            yield f"* `.{method.name if is_property else signature(method)}`: {first}"


def module_page(title: str, *paths: Path) -> str:
    """The first module's docstring, and every public function and class of all."""
    trees = list(map(parsed, paths))
    nodes = [n for tree in trees for name, n in definitions(tree).items() if not name.startswith("_")]
    body = [part for node in nodes for part in entry(node)]
    return "\n\n".join([f"# {title}", described(ast.get_docstring(trees[0])), *body]) + "\n"


def folder_page(title: str, folder: Path, *, defined: bool) -> str:
    """The docstring of every module of a folder; only of those that define an op, if so asked."""
    parts = [f"# {title}", described(ast.get_docstring(parsed(folder / "__init__.py")))]
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        schemas = re.findall(r'^define\(\s*"([^"]+)"(?:\s*"([^"]+)")?', source, re.MULTILINE)
        if path.stem == "__init__" or (defined and not schemas):
            continue
        parts.append(f"## `{path.stem}`")
        parts += [f"```\n{''.join(schema)}\n```" for schema in schemas]
        parts.append(described(ast.get_docstring(ast.parse(source))))
    return "\n\n".join(parts) + "\n"


def api() -> str:
    """Every name in ``mmqc.__all__``, from the module that it lives in."""
    import mmqc

    names = sorted(mmqc.__all__, key=str.lower)
    homes = {name: definitions(parsed(PACKAGE / f"{home.replace('.', '/')}.py")) for name, home in mmqc._HOMES.items()}
    found = {name: homes[name][name] for name in names if name in homes}
    intro = "What `import mmqc` offers; names are loaded when they are first used. [Recipes](recipes.md) have their own page."
    parts = ["# API", intro]
    for name in names:
        if name in found:
            parts += entry(found[name])
    return "\n\n".join(parts) + "\n"


def command_line() -> str:
    """Every command, its arguments and options, as typer has them."""
    import typer.main

    from mmqc.cli import app as cli

    group: Any = typer.main.get_command(cli.app)
    parts = ["# Command line", cli.EXIT_CODES]
    for name, command in group.commands.items():
        rows = ["| | | default |", "|---|---|---|"]
        for p in command.params:
            option = p.param_type_name == "option"
            flags = ", ".join(f"`{flag}`" for flag in (*p.opts, *p.secondary_opts)) if option else f"`{p.name.upper()}`"
            absent = p.default is None or callable(p.default) or "Sentinel" in str(p.default)
            default = "" if absent else f"`{p.default}`"
            rows.append(f"| {flags} | {getattr(p, 'help', None) or ''} | {default} |")
        parts += [f"## `mmqc {name}`", (command.help or "").strip(), "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


# --- results ----------------------------------------------------------------------------------------------------------


def results() -> str:
    """The result pages, and every file of measurements with its device, versions and command."""
    rows = ["| measurements | device | versions | command |", "|---|---|---|---|"]
    for path in sorted((ROOT / "benchmarks/results").glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        device = next((str(data[k]) for k in ("gpu", "device", "machine", "cpu") if data.get(k)), "")
        device = device.upper().replace("_", " ") if device.startswith("nvidia_") else device
        versions = ", ".join(f"{k} {data[k]}" for k in ("torch", "triton", "transformers", "python") if data.get(k))
        script = ROOT / "benchmarks" / f"{path.stem}.py"
        command = data.get("command") or (f"python benchmarks/{script.name}" if script.exists() else "")
        rows.append(f"| `{path.name}` | {device or '–'} | {versions or '–'} | {f'`{command}`' if command else ''} |")
    titles = []
    for page in sorted((ROOT / "docs/results").glob("*.md")):
        lines = page.read_text(encoding="utf-8").splitlines()
        title = next(line.removeprefix("# ") for line in lines if line.startswith("# "))
        titles.append(f"* [{title}]({page.name})")
    files = "The files in `benchmarks/results`:"
    intro = "Every figure in these pages was measured by a script in `benchmarks/` or `examples/`."
    return "\n\n".join(["# Results", intro, "\n".join(titles), "## Measurements", files, "\n".join(rows)]) + "\n"


# --- mkdocs -----------------------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """The hook: adds the pages to the site as if they lay in docs/."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "out/reference")
    for path, text in pages().items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(text, encoding="utf-8")
    print(f"{len(pages())} pages in {target}")
