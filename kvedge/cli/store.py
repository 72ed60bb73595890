"""``kvedge store``: what a folder of prefixes holds."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

from kvedge.console.exits import FAILED, OK, CommandError
from kvedge.console.output import Output, print_json
from kvedge.console.sizes import format_size, parse_size
from kvedge.store.index import INDEX, Node
from kvedge.store.prefix_store import PrefixStore

NAME = "store"
SUMMARY = "list, verify and prune a folder of stored prefixes"
DESCRIPTION = """\
The sequences of tokens that a kvedge.PrefixStore holds, as of 'kvedge generate --prompt-store DIR':
where each ends, how many tokens it shares with others, its bytes, how often it was of use.
"""
EXAMPLES = """\
  kvedge store ~/prompts                    # a row for each sequence
  kvedge store ~/prompts --verify           # compute all digests; what is damaged goes
  kvedge store ~/prompts --prune 2G         # what was used longest ago goes
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("folder", metavar="DIR", help="folder of the store")
    parser.add_argument("--verify", action="store_true", help="remove files that are damaged")
    parser.add_argument(
        "--prune", type=parse_size, metavar="SIZE", help="remove files until they take SIZE"
    )


def run(options: argparse.Namespace, output: Output) -> int:
    """Look after the store, and print what it holds then."""
    if not os.path.exists(os.path.join(options.folder, INDEX)):
        raise CommandError(f"{options.folder}: there is no store in it (no file {INDEX})")
    store = PrefixStore(options.folder)
    damaged = []
    with output.status("reading"):
        if options.verify:
            damaged = store.verify()
        if options.prune is not None:
            store.prune(options.prune)
    sequences = _sequences(store.nodes())
    if options.json:
        facts = {"folder": store.folder, "bytes": store.nbytes, "damaged": damaged}
        print_json({**facts, "sequences": sequences})
    else:
        columns = ("ends in", ">tokens", ">shared", ">bytes", ">hits", "?last used")
        rows = [
            (
                str(found["file"])[:12],
                str(found["tokens"]),
                str(found["shared"]),
                format_size(found["bytes"]),
                str(found["hits"]),
                str(found["used"]),
            )
            for found in sequences
        ]
        output.table(f"{store.folder}: {format_size(store.nbytes)}", columns, rows)
        if damaged:
            print(f"{len(damaged)} damaged files were removed")
    return FAILED if damaged else OK


def _sequences(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """A row for each node that none is behind, those that were used last first."""
    by_id: Mapping[int, Node] = {node.id: node for node in nodes}
    children: dict[int, int] = {}
    for node in nodes:
        children[node.parent] = children.get(node.parent, 0) + 1
    found = []
    for node in nodes:
        if node.id in children:
            continue
        own, at = node.nbytes, node
        while at.parent in by_id and children[at.parent] == 1:
            at = by_id[at.parent]
            own += at.nbytes
        found.append(
            {
                "file": node.name,
                "tokens": node.stop,
                "shared": at.start,
                "bytes": own,
                "hits": node.hits,
                "used": node.used,
            }
        )
    return sorted(found, key=lambda row: -int(row["used"]))
