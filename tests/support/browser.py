"""A page in a real browser, where the machine has one: how wide its parts are, and what it looks like.

A window of 400 pixels is a frame of that width in a wider page, for browsers have a smallest window.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
HEIGHT = 30_000  # of the frame: everything is laid out
SCRIPT = """
const frame = document.querySelector('iframe');
frame.onload = () => {
  const inside = frame.contentDocument;
  inside.querySelectorAll('details').forEach(fold => { fold.open = true; });
  const root = inside.documentElement, width = root.clientWidth, cut = [];
  const tell = (one, why) => cut.push(one.tagName.toLowerCase() + ' ' + why + ': ' + one.textContent.trim().slice(0, 60));
  if (root.scrollWidth > width) tell(root, 'is ' + root.scrollWidth + ' wide in ' + width);
  for (const one of inside.body.querySelectorAll('*')) {
    const box = one.getBoundingClientRect();
    if (!box.width || !box.height) continue;
    if (one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).display !== 'inline') tell(one, 'cuts what is in it');
    if (box.right > width + 1 || box.left < -1) tell(one, 'ends at ' + Math.round(box.right) + ' of ' + width);
  }
  const found = { width, height: inside.body.scrollHeight, text: inside.body.innerText, cut };
  document.body.appendChild(document.createElement('pre')).textContent = JSON.stringify(found);
};
"""


def browser() -> str | None:
    """The path of one that runs without a screen."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def _run(binary: str, folder: Path, *arguments: str) -> str:
    line = [binary, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    line += [f"--user-data-dir={folder / 'profile'}", "--allow-file-access-from-files", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=True).stdout


def layout(binary: str, page: Path, width: int, folder: Path) -> dict:
    """Of a page in a window so wide, its folds open: "width", "height", "text", and "cut", a line for all that does not fit."""
    outer = folder / f"outer{width}.html"
    frame = f'<iframe src="{page.resolve().as_uri()}" style="border: 0; width: {width}px; height: {HEIGHT}px"></iframe>'
    outer.write_text(f"<!doctype html><body style='margin: 0'>{frame}<script>{SCRIPT}</script></body>")
    dump = _run(binary, folder, "--window-size=1600,1200", "--virtual-time-budget=20000", "--dump-dom", outer.as_uri())
    found = re.search(r"<pre>(.*?)</pre>", dump, re.DOTALL)
    assert found, f"the browser said nothing about {page}"
    return json.loads(html.unescape(found[1]))


def screenshot(binary: str, page: Path, width: int, height: int, image: Path, folder: Path) -> Path:
    """The page's first ``height`` pixels as a PNG, in a window so wide."""
    outer = folder / f"picture{width}.html"
    frame = f'<iframe src="{page.resolve().as_uri()}" style="border: 0; width: {width}px; height: {height}px"></iframe>'
    outer.write_text(f"<!doctype html><body style='margin: 0'>{frame}</body>")
    _run(binary, folder, f"--window-size={max(width, 500)},{height}", f"--screenshot={image}", outer.as_uri())
    return image
