"""A page in a real browser, without a window: chromium, where it is installed."""

import shutil
import subprocess

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATH = next(filter(None, map(shutil.which, _NAMES)), None)

needs_browser = pytest.mark.skipif(PATH is None, reason="needs chromium")


def _run(page, folder, *arguments):
    command = [
        PATH,
        "--headless",
        "--no-sandbox",  # root in a container has none
        "--disable-gpu",
        "--disable-background-networking",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND",  # no network
        f"--user-data-dir={folder / 'profile'}",
        *arguments,
        page.resolve().as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


def screenshot(page, folder, width=1100, height=3000):
    """The picture of a page, uint8 (height, width, channels)."""
    image = pytest.importorskip("matplotlib.image")
    path = folder / "page.png"
    _run(page, folder, f"--window-size={width},{height}", f"--screenshot={path}")
    return (image.imread(path) * 255).astype("uint8")


def document(page, folder):
    """The HTML of a page once it has been shown, what scripts added to it included."""
    return _run(page, folder, "--virtual-time-budget=2000", "--dump-dom")
