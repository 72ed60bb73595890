#!/usr/bin/env python3
"""Mistakes put into the sources, one at a time, to see whether the suite notices.

    python tests/mutations.py [NUMBER ...]     all, or some: rows of README.md's table on stdout
    python tests/mutations.py --tests DIR      with the tests of another checkout
    python tests/mutations.py --short          a few that need no build, as the tests do
    python tests/mutations.py --check          only that each mistake has its place still

A mutation is a text that stands once in ``csrc/`` or ``kvedge/``, whichever file that is, and what
takes its place. It is made in a copy of this checkout, built there in place, and the tests named
with it run until one fails. Half an hour of a core with ``CC="ccache gcc"``. Exit code 1: one was
not noticed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPY = Path(os.environ.get("KVEDGE_MUTATIONS", ROOT / "build" / "mutations"))
SOURCES = {".c", ".h", ".py", ".pyx", ".pxi"}
MINUTES = 10  # that a mutation may take: one that hangs is noticed


class Mutation(NamedTuple):
    """A text, what takes its place, what that breaks, and the tests that should notice."""

    what: str
    old: str
    new: str
    tests: str
    backend: str = "native"


OPTIONS = "contract/test_attend_options.py contract/test_attend_grid.py"
GRID = "contract/test_attend_grid.py contract/test_attend_heads.py contract/test_attend_prompts.py"
PAGED = "contract/test_paged_attend.py contract/test_paged.py contract/test_paged_prefix.py"
POOLS = f"{PAGED} contract/test_paged_running.py contract/test_paged_properties.py"
BYTES = "contract/test_storage_bytes.py contract/test_int4_layer.py contract/test_golden.py"
CACHE = "contract/test_cache.py contract/test_cache_snapshots.py contract/test_cache_properties.py"
LAYER = "contract/test_layer_errors.py contract/test_layer_editing.py"
PARTS = "contract/test_parts.py contract/test_recent.py contract/test_runs.py"
FILES = "session/test_session.py session/test_session_forged.py session/test_session_c.py"
C_FILES = "session/test_session_forged.py session/test_session.py c/test_session"
KINDS = "contract/test_kinds.py"

MUTATIONS = [
    # ---- attention
    Mutation(
        "a row sees the token after it",
        "within(position + 1 - token, num_tokens)",
        "within(position + 2 - token, num_tokens)",
        OPTIONS,
    ),
    Mutation(
        "a window is one token too wide",
        "within(position - o->window + 1 - token, s.stop)",
        "within(position - o->window - token, s.stop)",
        OPTIONS,
    ),
    Mutation(
        "one first token too many beside the window",
        "within(o->sink_tokens - token, s.first)",
        "within(o->sink_tokens + 1 - token, s.first)",
        OPTIONS,
    ),
    Mutation(
        "a window begins with the tile after its first token's",
        "(position - o->window + 1) / a->tile * a->tile",
        "(position - o->window + a->tile) / a->tile * a->tile",
        OPTIONS,
    ),
    Mutation(
        "the last tile of a prompt's rows is not masked",
        "if (o->causal && end - 1 > first) return 1;",
        "if (o->causal && end - 1 > last) return 1;",
        GRID,
    ),
    Mutation(
        "blocks of a second segment are read from too far on",
        "side->first_row + kvedge_row_of(side->format, token) * side->row_stride",
        "side->first_row + kvedge_row_of(side->format, token + had) * side->row_stride",
        PAGED,
    ),
    Mutation(
        "every segment is read from the first one's first row on",
        "offset + (index == 0 ? side->first : 0)",
        "offset + side->first",
        f"{PAGED} contract/test_paged_recent.py",
    ),
    Mutation(
        "each chunk of a context lacks its last token",
        "cursor.stop = tokens_before_chunk(a, total, of->chunk + 1);",
        "cursor.stop = tokens_before_chunk(a, total, of->chunk + 1)"
        " - (of->chunk + 1 < a->chunks_per_block);",
        GRID,
    ),
    Mutation(
        "partial results are merged without the rescale",
        "else add = exp2f(risen * q->log2_scale[state]);",
        "else add = 1.0f;",
        GRID,
    ),
    Mutation(
        "a learned sink forgets the maximum",
        "exp(*log_sum - larger) + exp(sink - larger)",
        "exp(*log_sum - larger) + exp(sink)",
        OPTIONS,
    ),
    Mutation(
        "softcap loses the sign of a large logit",
        "((kvedge_bits_of_float(large) | sign) & ~all_if_small)",
        "(kvedge_bits_of_float(large) & ~all_if_small)",
        OPTIONS,
    ),
    Mutation(
        "ALiBi counts from one position further",
        "(float)(token - (a->first_position + row))",
        "(float)(token - (a->first_position + row + 1))",
        OPTIONS,
    ),
    Mutation(
        "a mask's elements lie side by side whatever its strides",
        "h->mask_room[t] = h->mask[t * stride];",
        "h->mask_room[t] = h->mask[t];",
        OPTIONS,
    ),
    Mutation(
        "huge scales are not brought into range",
        "if (exponent > LARGEST) return ldexpf(1.0f, LARGEST - exponent);",
        "if (exponent > LARGEST) return 1.0f;",
        "contract/test_attend_range.py contract/test_attend_extremes.py",
    ),
    Mutation(
        "learned sinks count in every part",
        "if (!is_first) room->options->sink_logits = NULL;",
        "",
        PARTS,
    ),
    Mutation(
        "a part that begins behind start has wrong positions",
        "len - call->num_rows - part->position - start",
        "len - call->num_rows - part->position",
        f"{PARTS} contract/test_attend_range.py contract/test_batch.py",
    ),
    Mutation(
        "the last block of a tile is not kept for further queries (AVX-512)",
        "if (source == ROWS_KEPT) kept[c] = value[c];",
        "if (source == ROWS_KEPT && t + BLOCK < v->num_tokens) kept[c] = value[c];",
        GRID,
    ),
    # ---- stored rows
    Mutation(
        "int8 codes up to 126", "inverse = 127.0f / largest", "inverse = 126.0f / largest", BYTES
    ),
    Mutation(
        "an odd row of int4 ends with a code",
        "room[shape->dim] = 0;",
        "room[shape->dim] = 1;",
        BYTES,
    ),
    Mutation(
        "kivi's steps are rounded to nearest, so the largest element has no code",
        "*step = kvedge_float_to_half_up(range / most);",
        "*step = kvedge_half_of_float(range / most);",
        "contract/test_runs.py",
    ),
    Mutation(
        "an infinity is stored",
        "if (bits >= KVEDGE_NOT_FINITE) return KVEDGE_ERROR_NONFINITE;\n  *bound",
        "if (bits > KVEDGE_NOT_FINITE) return KVEDGE_ERROR_NONFINITE;\n"
        "  if (bits == KVEDGE_NOT_FINITE) return *bound = 1.0f, KVEDGE_OK;\n  *bound",
        LAYER,
    ),
    Mutation(
        "a refused append leaves its first tokens over others",
        "overwrites ? num_tokens : 2 * CHUNK_VALUES / token + 1",
        "2 * CHUNK_VALUES / token + 1",
        f"{LAYER} {CACHE}",
    ),
    Mutation(
        "of neighbours that are kept only the first is moved",
        "kvedge_copy_tokens(layer, row + tokens[i], layer, row + i, num);",
        "kvedge_copy_tokens(layer, row + tokens[i], layer, row + i, 1);",
        LAYER,
    ),
    Mutation(
        "keys are turned the other way in one half",
        "*second = products[2] + products[3];",
        "*second = products[2] - products[3];",
        f"{LAYER} contract/test_shifts.py",
    ),
    # ---- session files in C
    Mutation(
        "a damaged file is loaded",
        "if (memcmp(digest, reader->digest, KVEDGE_DIGEST)) fault",
        "if (0) fault",
        C_FILES,
    ),
    Mutation(
        "a file may be longer than its tensors",
        "if (offset != head->tensor_bytes) return",
        "if (offset > head->tensor_bytes) return",
        C_FILES,
    ),
    Mutation(
        "a file may hold a code that int8 has not",
        "return lowest >= -127 &&",
        "return lowest >= -128 &&",
        C_FILES,
    ),
    # ---- Python: arguments
    Mutation(
        "the position after the last is one",
        "if not 0 <= number < length:",
        "if not 0 <= number <= length:",
        LAYER,
    ),
    Mutation(
        "a position may be kept twice",
        "np.any(array[1:] <= array[:-1])",
        "np.any(array[1:] < array[:-1])",
        LAYER,
        "numpy",
    ),
    Mutation(
        "a key scale may be 0",
        "if not (key_scale > 0).all():",
        "if not (key_scale >= 0).all():",
        "contract/test_key_scale.py contract/test_layer_errors.py",
    ),
    Mutation(
        "a sliding layer goes back one token too far",
        "n >= config.window - 1:",
        "n >= config.window - 2:",
        "contract/test_layer_window.py contract/test_cache_windows.py",
    ),
    Mutation(
        "a sliding layer drops a token that is still read",
        "n - (window - 1)",
        "n - (window - 2)",
        "contract/test_layer_window.py contract/test_cache_windows.py",
    ),
    # ---- Python: caches
    Mutation(
        "a snapshot survives an overwrite of its last token",
        "positions[after] < length",
        "positions[after] < length - 1",
        CACHE,
    ),
    Mutation(
        "a snapshot survives the shift of one token",
        "if delta and start < stop:",
        "if delta and start + 1 < stop:",
        f"{CACHE} contract/test_shifts.py",
    ),
    Mutation(
        "a run that was cut counts as whole",
        "return whole if last <= whole else end",
        "return whole",
        PARTS,
    ),
    Mutation(
        "merged parts are not divided by what they weigh together",
        "weights /= np.where(sums == 0.0, 1.0, sums)",
        "weights /= 1.0",
        "contract/test_merge.py contract/test_merge_properties.py",
    ),
    Mutation(
        "the NumPy backend keeps what it summed under an older maximum",
        "summed *= decay[..., np.newaxis]\n        summed +=",
        "summed += 0\n        summed +=",
        GRID,
        "numpy",
    ),
    # ---- Python: session files
    Mutation(
        "a file may hold a token more than its limit",
        "if length > most:",
        "if length > most + 1:",
        FILES,
    ),
    Mutation(
        "tensors of a file may overlap",
        "if offset != at:",
        "if offset > at:",
        FILES,
    ),
    Mutation(
        "a file may lack runs",
        "if not least <= count <= most:",
        "if not count <= most:",
        FILES,
    ),
    # ---- Python: paged caches
    Mutation(
        "a registered block is written to",
        "blocks.references[block] > 1 or blocks.prefixes.rows(block) > written",
        "blocks.references[block] > 1",
        POOLS,
    ),
    Mutation(
        "a shared beginning is one block too long",
        "most if same.all() else int(np.argmin(same))",
        "most if same.all() else int(np.argmin(same)) + 1",
        POOLS,
    ),
    Mutation("a block is freed twice", "lent[block] < 1:", "self._lent[block] < 0:", POOLS),
    # ---- above
    Mutation(
        "a model refuses the last token of its context",
        "if len(cache) + n > limit:",
        "if len(cache) + n >= limit:",
        "llama/test_llama_generate.py llama/test_llama_model.py cli/test_cli_generate.py",
    ),
    Mutation(
        "top-p leaves out the token that reaches it",
        "self.top_p * cumulative[-1])) + 1",
        "self.top_p * cumulative[-1]))",
        "llama/test_sampling.py",
    ),
    Mutation(
        "kvedge plan lists groups as wide as the row",
        "if group is not None and group >= shape.widest:",
        "if group is not None and group > shape.widest:",
        "cli/test_cli_plan.py",
    ),
    Mutation(
        "a rank takes a token more than its block has",
        "self.pattern[position // self.block_size % len(self.pattern)]",
        "self.pattern[position // (self.block_size + 1) % len(self.pattern)]",
        "distributed",
    ),
    Mutation(
        "transformers: a sliding layer keeps a token too few",
        "return min(self.padded_length, self.sliding_window - 1 + new)",
        "return min(self.padded_length, self.sliding_window - 2 + new)",
        "transformers",
    ),
    # ---- Python: each kind of storage, copied and saved
    Mutation(
        "a copy's key scale is not taken from its first tokens",
        "    keys.store_as(store, store.key_map, rule)\n\n\ndef copy_of",
        "    keys.store_as(store, store.key_map, KeyRule(False, False))\n\n\ndef copy_of",
        KINDS,
    ),
    Mutation(
        "a copy has dropped nothing",
        "store.holding(num_tokens, num_dropped, own, key_map=key_map)",
        "store.holding(num_tokens, 0, own, key_map=key_map)",
        KINDS,
    ),
    Mutation(
        "a file forgets that values are rotated",
        '"value_rotation": own["value_rotation"],',
        '"value_rotation": "",',
        KINDS,
    ),
    Mutation(
        "a file forgets what a window has dropped",
        '"dropped": 0 if config.window is None else dropped,',
        '"dropped": 0,',
        KINDS,
    ),
    Mutation(
        "a pool's file forgets that values are rotated",
        'fields["value_rotation"] = HADAMARD',
        "pass",
        KINDS,
    ),
    Mutation(
        "a pool's file has no key scale",
        "if store.key_map.scale is not None:\n            tensors[",
        "if False:\n            tensors[",
        KINDS,
    ),
    Mutation(
        "a file forgets that its key scale is still open",
        '"key_scale": AUTO if cache.key_rule.auto_scale else "",',
        '"key_scale": "",',
        KINDS,
    ),
    Mutation(
        "a pickle has the key map of no layer",
        "return config, tokens, store.key_map, store.key_rule, *more",
        "return config, tokens, KeyMap(None, None), store.key_rule, *more",
        KINDS,
    ),
]


#: Of several areas, without a build, noticed by the first tests that are run.
SHORT = (
    "a position may be kept twice",
    "merged parts are not divided by what they weigh together",
    "a block is freed twice",
    "a file forgets that values are rotated",
)


def place_of(mutation: Mutation, root: Path) -> Path:
    """The one file that has the text of a mutation, and has it once."""
    found = [
        (path, count)
        for folder in ("csrc", "kvedge")
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in SOURCES and path.name != "native.c" and path.parent.name != "include"
        if (count := path.read_text().count(mutation.old))
    ]
    if len(found) != 1 or found[0][1] != 1:
        places = ", ".join(f"{path.relative_to(root)} ({n})" for path, n in found) or "nowhere"
        raise SystemExit(f"{mutation.what!r} stands in {places}, not once: {mutation.old}")
    return found[0][0]


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "PYTHONPATH": str(COPY), "KVEDGE_REQUIRE_EXT": "1", **variables}
    limits = {"timeout": 60 * MINUTES, "check": False}
    return subprocess.run(command, cwd=COPY, env=given, capture_output=True, text=True, **limits)


def build() -> None:
    done = run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"])
    if done.returncode:
        raise SystemExit(f"it does not build:\n{done.stderr[-2000:]}")


def first_failure(mutation: Mutation) -> str:
    """The test that notices; "" if none does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no"]
    tests = [f"tests/{each}" for each in mutation.tests.split()]
    programs = [Path(each).name for each in tests if each.startswith("tests/c/")]
    tests = [each for each in tests if not each.startswith("tests/c/")]
    try:
        done = run([*command, *tests], KVEDGE_BACKEND=mutation.backend)
        for program in programs if done.returncode == 0 else ():
            if run(["tests/c/run.sh", "native", program]).returncode:
                return f"c/{program}"
    except subprocess.TimeoutExpired:
        return f"(no end after {MINUTES} minutes)"
    if done.returncode == 0:
        return ""
    named = re.search(r"^(?:FAILED|ERROR) tests/(\S+?)(?:\[| |$)", done.stdout, re.MULTILINE)
    return named[1] if named else f"(pytest ended with {done.returncode})"


def copy_checkout(tests: Path) -> None:
    built = (".git", ".venv*", ".arm-env", "build", "__pycache__", "*.egg-info")
    leave = shutil.ignore_patterns(*built, "tests")
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(ROOT, COPY, ignore=leave, symlinks=True)
    shutil.copytree(tests, COPY / "tests", ignore=shutil.ignore_patterns("__pycache__"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", metavar="DIR")
    parser.add_argument("--short", action="store_true", help="a few that need no build")
    parser.add_argument("--check", action="store_true", help="only look for the texts")
    given = parser.parse_args()
    for mutation in MUTATIONS:
        place_of(mutation, ROOT)
    if given.check:
        print(f"{len(MUTATIONS)} mutations, each in one place")
        return
    copy_checkout(given.tests.resolve())
    was_built = False  # with a mistake
    missed = 0
    for number, mutation in enumerate(MUTATIONS, 1):
        if given.numbers and number not in given.numbers:
            continue
        if given.short and mutation.what not in SHORT:
            continue
        path = place_of(mutation, COPY)
        text, start = path.read_text(), time.monotonic()
        path.write_text(text.replace(mutation.old, mutation.new))
        if was_built or path.suffix != ".py":
            build()
        was_built = path.suffix != ".py"
        noticed = first_failure(mutation)
        missed += not noticed
        path.write_text(text)
        name = path.relative_to(COPY)
        seconds = round(time.monotonic() - start)
        row = (number, f"`{name}`", mutation.what, noticed or "**no**", seconds)
        print("|", " | ".join(map(str, row)), "|", flush=True)
    raise SystemExit(missed > 0)


if __name__ == "__main__":
    main()
