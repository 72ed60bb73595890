#!/usr/bin/env python3
"""Writes the library as two files: amalgamation.py FOLDER makes FOLDER/kvedge.c and kvedge.h.

Each .c file becomes a section, with the private headers of its path pasted in; headers that all
share come once, before, and those of the system first. A static name that several sections define
gets its section's name by a macro, and every macro of a section ends with it.
"""

import re
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDERS = ("system", "formats", "store", "kernels", "attention", "index", "state", "session")
WORD = re.compile(r"[A-Za-z_]\w*")
INCLUDE = re.compile(r'#include (?:"(.+?)"|<(.+?)>)')
CONDITIONAL = re.compile(r"#(if|ifdef|ifndef|elif|else|endif)\b\s*(.*?)\s*(?:/\*.*)?$")
DEFINITION = re.compile(
    r"^[ ]*#define (\w+)(\([^)]*\))?((?:[^\n]*\\\n)*[^\n]*)", flags=re.MULTILINE
)

HEAD = """\
/* kvedge {version}, a quantized key/value cache and attention on it for CPUs, as one file.
 * Made by csrc/amalgamation.py: change csrc/, not this.
 *
 *   cc -O2 -c kvedge.c && cc program.c kvedge.o -lm -pthread
 *
 * gcc or clang, C11 or later; C++ programs include kvedge.h. No flag names instructions: every path
 * of the architecture is in here, and the CPU's is chosen when the program runs.
 *
 * Flags that change arithmetic are refused by an #error below; contraction of a * b + c is off by a
 * pragma. What neither sees, do not use: -frounding-math, clang's -ffp-contract=fast. Nor link the
 * program with -ffast-math: gcc and clang then set flush-to-zero for the whole process.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* madvise */
#endif
#define KVEDGE_EXPORTS /* the functions of kvedge.h alone are exported */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#pragma clang diagnostic ignored "-Wunused-function" /* sections use some of what they paste */
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif
#if defined(__clang__) && defined(__aarch64__) /* before version 16: see kernels/neon/neondot.c */
#if !defined(__ARM_FEATURE_MATMUL_INT8)
#define __ARM_FEATURE_MATMUL_INT8 1
#endif
#if !defined(__ARM_FEATURE_DOTPROD)
#define __ARM_FEATURE_DOTPROD 1
#endif
#endif
"""
HIDE = """
#include "kvedge.h"

#if defined(__GNUC__)
#pragma GCC visibility push(hidden)
#endif
"""
SHOW = """
#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
"""


def is_shared(header):
    """Whether a header holds nothing that is compiled for one path's instructions."""
    return not header.startswith("kernels/") or header.endswith(
        ("kernels.h", "floats_cells.h", "bytes_order.h")
    )


class Includes:
    """What sections have included so far: `shared` as text, `system` with its conditions."""

    def __init__(self):
        self.shared, self.system, self.done = [], [], {"kvedge.h"}

    def expand(self, name, conditions):
        """Return the lines of a file that stand in a section, under these conditions."""
        lines = []
        for line in (HERE / name).read_text().splitlines():
            if found := CONDITIONAL.match(line):
                follow(conditions, found[1], found[2])
            if not (found := INCLUDE.match(line)):
                lines += [line] if line != "#define _GNU_SOURCE" else []
            elif found[2]:
                self.include_system(found[2], conditions)
            elif not is_shared(found[1]):
                lines += self.expand(found[1], conditions)
            elif found[1] not in self.done:
                self.done.add(found[1])
                self.shared += self.expand(found[1], [])
        return lines

    def include_system(self, name, conditions):
        """At the top, under the same conditions but for guards of headers."""
        conditions = [c for c in conditions if not re.search(r"KVEDGE_\w*H\b", c)]
        text = "".join(f"#if {c}\n" for c in conditions) + f"#include <{name}>"
        text += "\n#endif" * len(conditions)
        if text not in self.system:
            self.system.append(text)


def follow(conditions, word, condition):
    """Keep the stack of conditions that a line stands under."""
    if word == "if":
        conditions.append(f"({condition})")
    elif word in ("ifdef", "ifndef"):
        conditions.append(f"{'!' * (word == 'ifndef')}defined({condition})")
    elif word == "endif":
        conditions.pop()
    else:
        conditions[-1] = f"!{conditions[-1]}" + (f" && ({condition})" if word == "elif" else "")


def without_comments(text):
    """Return C without comments and strings."""
    return re.sub(r"""/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])'""", " ", text, flags=re.DOTALL)


def made_by_macros(text, macros):
    """Return the static functions whose names macros make of their arguments at file scope."""
    names = set()
    for macro, (parameters, body) in macros.items():
        patterns = re.findall(r"\b(\w+(?:\s*##\s*\w+)*)\s*\(", body) if "static" in body else []
        for call in re.findall(rf"^{macro}\(([^;{{]*?)\)\s*;?\s*$", text, flags=re.MULTILINE):
            given = dict(zip(parameters, map(str.strip, call.split(",")), strict=False))
            for pattern in patterns:
                words = [word.strip() for word in pattern.split("##")]
                if any(word in given for word in words):
                    names.add("".join(given.get(word, word) for word in words))
    return set(filter(WORD.fullmatch, names))


def defined_in(text):
    """Return the static names, types and constants of a section, and its macros."""
    text = without_comments(text)
    macros = {m[1]: (WORD.findall(m[2] or ""), m[3]) for m in DEFINITION.finditer(text)}
    names = made_by_macros(text, macros)
    text = re.sub(r"^[ ]*#(?:[^\n]*\\\n)*[^\n]*", "", text, flags=re.MULTILINE)
    text = re.sub(r"__attribute__\s*\(\(.*?\)\)", "", text)
    enums = re.findall(r"^(?:typedef )?enum \w*\s*\{(.*?)\}", text, flags=re.MULTILINE | re.DOTALL)
    names.update(name for enum in enums for name in re.findall(r"(?:^|,)\s*(\w+)", enum))
    names.update(re.findall(r"^(?:typedef )?struct (\w+) \{", text, flags=re.MULTILINE))
    statics = ["static", "typedef", "KVEDGE_INLINE"]
    statics += [name for name, (_, body) in macros.items() if body.lstrip().startswith("static")]
    flat, depth = "", 0  # file scope alone, with {} for bodies
    for part in re.split(r"([{}])", text):
        depth += (part == "{") - (part == "}")
        flat += part if depth == 0 and part != "}" else "{}" if depth == 0 else ""
    for statement in re.split(r";|\{\}\s*(?=\n)", flat):
        start = re.search(rf"\b({'|'.join(statics)})\b.*", statement, flags=re.DOTALL)
        if start and "KVEDGE_NAME(" not in start[0]:
            head = start[0].split("(", 1)[0].split("=", 1)[0]
            for declarator in re.sub(r"\[.*?\]", "", head).split(","):
                names.update(WORD.findall(declarator)[-1:])
    return names, macros


def main(folder):
    """Write the two files."""
    header = (HERE / "kvedge.h").read_text()
    version = ".".join(re.findall(r"#define KVEDGE_VERSION_\w+ (\d+)", header))
    files = [path for name in FOLDERS for path in sorted((HERE / name).rglob("*.c"))]
    includes = Includes()
    sections = {path.relative_to(HERE).as_posix(): "" for path in files}
    for name in sections:
        sections[name] = "\n".join(includes.expand(name, []))
    found = {name: defined_in(text) for name, text in sections.items()}
    count = Counter(name for names, _ in found.values() for name in names)
    shared = "\n".join(includes.shared)
    in_headers = set(WORD.findall(without_comments(shared + header)))
    out = [HEAD.format(version=version), *includes.system, HIDE, shared]
    for file, text in sections.items():
        names, macros = found[file]
        twice = sorted(name for name in names if count[name] > 1)
        if wrong := in_headers.intersection(twice):
            sys.exit(f"{file}: rename {sorted(wrong)}, of several files and of shared headers")
        suffix = re.sub(r"\W", "_", file.removesuffix(".c"))
        out.append(f"\n/* ==== {file} ==== */\n")
        out += [f"#define {name} {name}__{suffix}" for name in twice]
        out.append(text)
        out += [f"#undef {name}" for name in sorted({*twice, *macros}) if name[:2] != "__"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kvedge.c").write_text("\n".join([*out, SHOW]))
    (folder / "kvedge.h").write_text(header)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
