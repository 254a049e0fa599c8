"""Every Python block of the how-to pages runs as it is pasted: in a process of its own, behind the page's preambles.

A comment in front of a block says what is special about it:

    <!-- block: preamble -->            the page's later blocks begin with it
    <!-- block: after 1 -->             begins with that block too, and what that one begins with; the page's first one is 0
    <!-- block: asks a server -->       runs beside `mmqc serve`
    <!-- block: needs several GPUs -->  and <!-- block: part of a file --> are not run
"""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs/howto").glob("*.md"))
BLOCK = re.compile(r"(?:<!-- block: ([^\n]*) -->\n\n)?^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_RUN = ("needs several GPUs", "part of a file")
ENVIRONMENT = os.environ | {
    "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "passive",  # read when torch is imported; see Makefile
}


@dataclass(frozen=True)
class Block:
    """One of a page: its number there, what the comment says, and its code."""

    page: str
    number: int
    how: str
    code: str


def blocks(page: Path) -> list[Block]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [Block(page.stem, number, how, code) for number, (how, code) in enumerate(found)]


def program(block: Block, page: list[Block]) -> str:
    """The code in front of a block, and its own."""
    chain = [block]
    while chain[-1].how.startswith("after "):
        chain.append(page[int(chain[-1].how.removeprefix("after "))])
    return "\n".join(each.code for each in page[: block.number + 1] if each.how == "preamble" or each in chain)


ALL = [(block, program(block, page)) for page in map(blocks, PAGES) for block in page if block.how not in NOT_RUN]


def error(code: str, folder: Path) -> str:
    """What a process of its own says if it fails, else nothing."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    return done.stderr[-3000:] if done.returncode else ""


def test_blocks__every_one_is_found_and_its_comment_means_something():
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    found = [block for page in PAGES for block in blocks(page)]
    assert len(found) == sum(len(re.findall(r"^```python", text, re.MULTILINE)) for text in texts) > 30
    assert sum(text.count("<!-- block:") for text in texts) == sum(bool(block.how) for block in found)
    odd = [b for b in found if not re.fullmatch(r"|preamble|after \d+|asks a server|" + "|".join(NOT_RUN), b.how)]
    assert not odd


def test_program__begins_with_preambles_and_what_its_block_is_after():
    page = [Block("page", i, how, f"{i}") for i, how in enumerate(["preamble", "", "after 1", "", "preamble", "after 2"])]
    assert [program(block, page).split() for block in page[1:]] == [list(n) for n in ("01", "012", "03", "04", "01245")]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # an export on a busy machine
@pytest.mark.parametrize(
    ("block", "code"),
    [pair for pair in ALL if pair[0].how not in ("preamble", "asks a server")],
    ids=lambda value: f"{value.page}-{value.number}" if isinstance(value, Block) else "",
)
def test_block__runs_as_pasted(block, code, tmp_path):
    assert not error(code, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("code", [code for block, code in ALL if block.how == "asks a server"])
def test_block__runs_beside_the_server_of_its_page(code, tmp_path):
    Image.new("L", (64, 64), 128).save(tmp_path / "a.png")
    line = [sys.executable, "-m", "mmqc", "serve", "digits-vqa", "--name", "result", "--no-compile"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(line, cwd=tmp_path, env=ENVIRONMENT, stderr=log, stdout=log) as server,
    ):
        try:
            while "127.0.0.1:8000" not in (tmp_path / "log").read_text():
                assert server.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.2)
            assert not error(code, tmp_path)
        finally:
            server.terminate()
