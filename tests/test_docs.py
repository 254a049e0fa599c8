"""What the documentation tells people to type works: commands and code of the README and the tutorial, and every page's links."""

import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from commands import invoke

import mmqc
from mmqc.cli import app as cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/tutorial/first_model.md", "docs/howto/command_line.md")
EXECUTED = PAGES[:2]
QUICK = ("--dry-run", "--calibration 0", "eval out/digits-w8")  # commands of some seconds
GROUP = typer.main.get_command(cli.app)


def blocks(page, language):
    """The fenced blocks of a page in one language ("" for shell)."""
    found, current = [], None
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            if current is None:
                current = (line.removeprefix("```"), [])
            else:
                found.append((current[0], "\n".join(current[1])))
                current = None
        elif current is not None:
            current[1].append(line)
    return [text for kind, text in found if kind == language]


def commands(page):
    """Every command line in shell blocks, comments removed."""
    lines = [line.split(" #")[0].strip() for block in blocks(page, "") for line in block.splitlines()]
    return [line for line in lines if line.startswith(("mmqc ", "make ", "python "))]


def all_commands(*prefixes):
    return [(page, line) for page in PAGES for line in commands(page) if line.startswith(prefixes)]


@pytest.mark.parametrize(("page", "line"), all_commands("mmqc "))
def test_mmqc_commands__have_the_options_that_pages_use(page, line):
    words = shlex.split(line)[1:]
    options = {flag for p in GROUP.params for flag in p.opts} | {"--help"}
    name, *arguments = [*itertools.dropwhile(lambda word: word in options, words)] or ["--help"]
    if name == "--help":
        return
    assert name in GROUP.commands, page
    known = {flag for p in GROUP.commands[name].params for flag in (*p.opts, *p.secondary_opts)}
    assert {a for a in arguments if a.startswith("-")} <= known


@pytest.mark.parametrize(("page", "line"), all_commands("make "))
def test_make_commands__are_targets(page, line):
    done = subprocess.run([*shlex.split(line), "-n", f"PY={sys.executable}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (page, done.stderr)


def test_mmqc_commands__the_quick_ones_run_in_their_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [c for page in EXECUTED for c in commands(page) if c.startswith("mmqc ") and any(q in c for q in QUICK)]
    assert len(lines) == 3
    for line in lines:
        result = invoke(*shlex.split(line)[1:])
        assert result.exit_code == 0, (line, result.output)


def test_readme__names_every_command_of_the_program():
    row = next(line for line in (ROOT / "README.md").read_text().splitlines() if "from a shell" in line)
    assert {name.removeprefix("mmqc ") for name in re.findall(r"`([^`]+)`", row)} <= set(GROUP.commands)


@pytest.mark.slow
@pytest.mark.parametrize("page", EXECUTED)
def test_code__runs_from_top_to_bottom(page, tmp_path):
    code = "\n".join(blocks(page, "python"))
    assert code
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_make_demo__writes_its_page(tmp_path):
    line = ["make", "demo", f"PY={sys.executable}", "-f", str(ROOT / "Makefile")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "out" / "report.html").stat().st_size > 100_000


# --- generated pages --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages():
    spec = importlib.util.spec_from_file_location("generate_reference", ROOT / "docs/generate_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.pages()


def test_reference__has_every_public_name_command_op_and_kernel(pages):
    modules = set(mmqc._MODULES)
    assert [n for n in mmqc.__all__ if n not in modules and f"## `{n}`" not in pages["reference/api.md"]] == []
    assert [n for n in GROUP.commands if f"## `mmqc {n}`" not in pages["reference/cli.md"]] == []
    defined = [p.stem for p in (ROOT / "mmqc/ops").glob("*.py") if re.search(r"^define\(", p.read_text(), re.MULTILINE)]
    assert [stem for stem in defined if f"## `{stem}`" not in pages["reference/ops.md"]] == []
    assert all(f"## `{name}`" in pages["reference/recipes.md"] for name in ("mquant", "calibquant"))
    assert "## `scaled_matmul`" in pages["reference/kernels.md"]


def test_reference__says_what_arguments_mean(pages):
    assert "**Raises**" in pages["reference/api.md"]
    assert "* `weight_bits`: " in pages["reference/recipes.md"]
    assert "int weight_bits" in pages["reference/ops.md"]
    assert "| `--dry-run` |" in pages["reference/cli.md"]


def test_results__lists_every_file_of_measurements(pages):
    files = [path.name for path in (ROOT / "benchmarks/results").glob("*.json")]
    assert files
    assert all(f"| `{name}` |" in pages["results/index.md"] for name in files)


def test_results__commands_name_what_there_is():
    """In measurements and on pages: modules that were moved since are called by their new names."""
    files = [*(ROOT / "benchmarks/results").glob("*.json*"), *(ROOT / "docs").rglob("*.json"), *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in [*files, ROOT / "README.md"])
    modules = set(re.findall(r"python -m ((?:benchmarks|examples)\.[\w.]*\w)", text))
    scripts = set(re.findall(r"python (?:-m pytest (?:-m slow )?)?((?:benchmarks|examples|tests)/[\w./]*\w)", text))
    assert len(modules) > 30
    paths = [*(Path(*name.split(".")).with_suffix(".py") for name in modules), *map(Path, scripts)]
    assert not [str(path) for path in paths if not (ROOT / path).exists()]


def test_links__between_pages_hold(pages):
    docs = ROOT / "docs"
    broken = []
    for page in [ROOT / "README.md", *docs.rglob("*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8")):
            target = (page.parent / link).resolve()
            generated = target.is_relative_to(docs) and target.relative_to(docs).as_posix() in pages
            if not target.exists() and not generated:
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken


def test_site__builds_strictly(tmp_path):
    pytest.importorskip("mkdocs", reason="make docs installs mkdocs")
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "reference/api/index.html").exists()
