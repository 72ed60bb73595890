"""Draws docs/architecture.svg from the boxes and arrows below: python tools/draw_architecture.py.

A test compares the file with what this writes (tests/house/test_docs.py).
"""

from html import escape
from pathlib import Path

OUT = Path(__file__).parents[1] / "docs" / "architecture.svg"
WIDTH, HEIGHT = 900, 640

PYTHON, C, SHARED = "#e3eefb", "#fdebd3", "#e8f3e1"

# name: (x, y, width, height, colour, title, lines)
BOXES = {
    "programs": (20, 56, 400, 76, PYTHON, "cli/  llama/  evaluation/  bench/  console/",
                 ["programs over the public classes;", "nothing imports them"]),
    "backends": (20, 176, 400, 100, PYTHON, "backends/",
                 ["select.py     picks one of the two, once",
                  "native.pyx    classes over csrc/, no algorithm",
                  "numpy/        the same names, without a compiler"]),
    "public": (20, 320, 400, 118, PYTHON, "layer.py  cache.py  paged/",
               ["what the classes of both backends share",
                "snapshot.py  session.py   snapshots, files",
                "merge.py  rope.py         public functions",
                "threads.py  system.py     settings, isa_info()"]),
    "core": (20, 482, 400, 118, PYTHON, "core/   (and errors.py)",
             ["checks.py      arrays in: checked here, once",
              "options.py     options of a call",
              "formats.py     the table of storage formats",
              "memory.py      slabs   registry.py   classes"]),
    "header": (480, 56, 400, 76, SHARED, "csrc/kvedge.h",
               ["the public C API and its manual;", "the only header an embedder includes"]),
    "attention": (480, 176, 400, 100, C, "attention/",
                  ["one call: plan, queries, slices, merge",
                   "attention.c call.c plan.c slice.c step.c",
                   "logits.c prefetch.c merge.c range.c"]),
    "store": (480, 320, 190, 118, C, "store/",
              ["a layer: slabs,", "append, truncate,", "read back"]),
    "kernels": (690, 320, 190, 118, C, "kernels/",
                ["scalar  avx256", "avx512vnni  neon", "a folder per path,", "cells per format"]),
    "formats": (480, 482, 190, 118, C, "formats/",
                ["a file per format:", "rows to bytes", "and back"]),
    "system": (690, 482, 190, 118, C, "system/",
               ["dispatch: which CPU", "parallel: threads", "limits: measuring"]),
}  # fmt: skip

# (points, label, where the label starts)
ARROWS = [
    ([(220, 132), (220, 176)], "import kvedge", (230, 159)),
    ([(220, 276), (220, 320)], "inherit", (230, 303)),
    ([(220, 438), (220, 482)], "ask", (230, 465)),
    ([(420, 222), (450, 222), (450, 94), (480, 94)], "", None),
    ([(600, 132), (600, 176)], "kvedge_attend   (..._append: to store/)", (612, 159)),
    ([(575, 276), (575, 320)], "reads a view", (585, 303)),
    ([(785, 276), (785, 320)], "cells", (795, 303)),
    ([(575, 438), (575, 482)], "rows", (585, 465)),
    ([(785, 438), (785, 482)], "small headers", (795, 465)),
    ([(690, 424), (660, 482)], "", None),
    ([(670, 545), (690, 545)], "", None),
]


def text(x, y, content, size, weight="normal", family="monospace", colour="#222"):
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" font-family="{family}" '
        f'fill="{colour}" xml:space="preserve">{escape(content)}</text>'
    )


def box(x, y, width, height, colour, title, lines):
    yield (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" '
        'stroke="#555"/>'
    )
    yield text(x + 12, y + 24, title, 15, "bold")
    for i, line in enumerate(lines):
        yield text(x + 12, y + 46 + 19 * i, line, 13)


def arrow(points, label, at):
    path = " ".join(f"{x},{y}" for x, y in points)
    yield (
        f'<polyline points="{path}" fill="none" stroke="#555" stroke-width="1.5" '
        'marker-end="url(#head)"/>'
    )
    if label:
        yield text(*at, label, 12, family="sans-serif", colour="#555")


def draw():
    """Return the picture."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}">',
        "<title>kvedge: folders, and which may use which</title>",
        '<defs><marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
        '<path d="M0,0 L9,4 L0,8 z" fill="#555"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(20, 36, "Python: kvedge/", 17, "bold", "sans-serif"),
        text(480, 36, "C: csrc/", 17, "bold", "sans-serif"),
        text(
            20,
            625,
            "An arrow: may import, include or call. Upwards only two: system.py names the backend; "
            "dispatch.c names the kernel tables.",
            13,
            family="sans-serif",
        ),
    ]
    for each in BOXES.values():
        parts += box(*each)
    for each in ARROWS:
        parts += arrow(*each)
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    OUT.write_text(draw())
    print(f"wrote {OUT}")
