"""Takes a picture of a run's page, or of an episode's, as the README shows them.

    python scripts/page_picture.py output/agentic_sokoban/renders/index.html docs/images/run_page.png --height 1372

Chromium or Chrome must be installed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

WIDTH = 1280
COLOURS = 128


def picture(browser: str, page: Path, height: int) -> Image.Image:
    """The top of the page in a window of ``WIDTH`` pixels, in few colours."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        shot = Path(folder) / "shot.png"
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
        ]
        flags += [f"--window-size={WIDTH},{height}", f"--screenshot={shot}"]
        subprocess.run([browser, *flags, page.resolve().as_uri()], check=True, capture_output=True, timeout=120)
        return Image.open(shot).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--height", type=int, default=800, help="of the window, in pixels (default: %(default)s)")
    options = parser.parse_args()
    if not options.page.is_file():
        parser.error(f"page: {options.page} is no file")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        parser.error("neither chromium nor google-chrome is on the PATH")
    picture(browser, options.page, options.height).save(options.out, optimize=True)


if __name__ == "__main__":
    main()
