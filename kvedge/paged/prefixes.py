"""Which full blocks hold the keys and values of which token ids: a tree of blocks.

A block's rows depend on its own tokens and on all before them, so a block is known by the path of
token ids that leads to it. Each node is one full block, and its children are found by the bytes of
their token ids in a dict, which hashes them and then compares them exactly: two different prefixes
can never be taken for one another. A namespace (of a tenant, an adapter, an image) stands before
the first block's ids, so that prefixes of different namespaces have no block in common. (vLLM's
automatic prefix caching chains hashes instead; SGLang's radix tree,
https://arxiv.org/abs/2312.07104, is this one with nodes of any length.)

Of a block whose tokens agree only at first, these can be had as a copy; and a sequence's last
block, partly filled, can be made known for that: a tail, which hangs on a node beside its children.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

import numpy as np

from kvedge.errors import InvalidArgumentError, ShapeMismatchError

__all__ = ["PrefixTree", "as_namespace", "as_token_ids"]

MAX_TOKEN_ID = 2**63 - 1


class _Node:
    """A full block that can be found, or a tail."""

    __slots__ = ("block", "children", "ids", "namespace", "parent", "tails")

    def __init__(
        self, parent: _Node | None, ids: bytes, block: int, namespace: bytes | None = None
    ) -> None:
        self.parent = parent  # None: the root, or taken out of the tree
        self.ids = ids
        self.block = block
        self.namespace = namespace  # of a tail: what would stand before its ids; else None
        self.children: dict[bytes, _Node] = {}
        self.tails: dict[tuple[bytes, bytes], _Node] = {}  # by namespace and ids

    def take_out(self) -> None:
        """Let the parent have this one no more."""
        assert self.parent is not None
        if self.namespace is None:
            del self.parent.children[self.ids]
        else:
            del self.parent.tails[self.namespace, self.ids]


class PrefixTree:
    """The full blocks of a pool that can be found by token ids.

    Parameters
    ----------
    block_size : int
        Tokens of a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._root = _Node(None, b"", -1)
        self._nodes: dict[int, _Node] = {}  # by block
        self.hits = 0  # prompts that a prefix of was found
        self.misses = 0

    def emptied(self) -> PrefixTree:
        """One in which nothing is known, for blocks of the same size."""
        return PrefixTree(self._block_size)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block: int) -> bool:
        return block in self._nodes

    def find(self, token_ids: np.ndarray, namespace: bytes) -> list[int]:
        """The blocks of the longest known prefix of `token_ids`, int64 (n,), in a namespace."""
        node, blocks = self._root, []
        for ids in self._split(token_ids, namespace):
            child = node.children.get(ids)
            if child is None:
                break
            blocks.append(child.block)
            node = child
        return blocks

    def match(
        self, token_ids: np.ndarray, namespace: bytes, *, partial: bool = False
    ) -> tuple[list[int], int, int]:
        """As :meth:`find`, counted as a hit or a miss.

        Returns
        -------
        blocks : list of int
        source, n : int
            If `partial`: the block whose first `n` tokens come next, as many as any has; or -1, 0.
        """
        blocks = self.find(token_ids, namespace)
        source, n = self._begun(token_ids, namespace, blocks) if partial else (-1, 0)
        if blocks or n:
            self.hits += 1
        else:
            self.misses += 1
        return blocks, source, n

    def _begun(
        self, token_ids: np.ndarray, namespace: bytes, blocks: Sequence[int]
    ) -> tuple[int, int]:
        """The block after full ones that shares most tokens with what comes next, and how many."""
        node = self._nodes[blocks[-1]] if blocks else self._root
        start = len(blocks) * self._block_size
        wanted = token_ids[start : start + self._block_size]
        space = b"" if blocks else namespace
        full = len(space) + 8 * self._block_size
        candidates = [
            (child.block, child.ids[len(space) :])
            for child in node.children.values()
            if len(child.ids) == full and child.ids.startswith(space)
        ]
        candidates += [
            (tail.block, tail.ids) for tail in node.tails.values() if tail.namespace == space
        ]
        best = (-1, 0)
        for block, ids in candidates:
            known = np.frombuffer(ids, np.int64)[: len(wanted)]
            other = np.flatnonzero(known != wanted[: len(known)])
            n = int(other[0]) if len(other) else len(known)
            if n > best[1]:
                best = (block, n)
        return best

    def rows(self, block: int) -> int:
        """So many first rows of a block can be found; 0: it is not known."""
        node = self._nodes.get(block)
        if node is None:
            return 0
        return self._block_size if node.namespace is None else len(node.ids) // 8

    def add(
        self,
        token_ids: np.ndarray,
        namespace: bytes,
        blocks: Sequence[int],
        *,
        partial: bool = False,
    ) -> None:
        """Make full blocks known.

        Where another block is known by the same prefix already, that one stays.

        Parameters
        ----------
        token_ids : numpy.ndarray
            int64 (n,).
        namespace : bytes
            Of :func:`as_namespace`.
        blocks : sequence of int
            At least n // block_size, the blocks of the tokens in order.
        partial : bool
            Make the tokens after the last full block known too, as a tail.

        Raises
        ------
        InvalidArgumentError
            One of them is known by other token ids, or in another namespace.
        """
        path = list(self._split(token_ids, namespace))
        rest = token_ids[len(path) * self._block_size :].tobytes() if partial else b""
        space = b"" if path else namespace
        node: _Node | None = self._root
        for i, ids in enumerate(path):  # all checks before the first change
            before, node = node, None if node is None else node.children.get(ids)
            known = self._nodes.get(blocks[i])
            if known is not None and known is not node and not _grows(known, before, ids):
                self._refuse(i, known, namespace)
        child = self._nodes.get(blocks[len(path)]) if rest else None
        if child is not None and not _grows(child, node, space + rest):
            if child.namespace == space and child.parent is node and child.ids.startswith(rest):
                rest = b""  # more of it is known already
            else:
                self._refuse(len(path), child, namespace)
        node = self._root
        for ids, block in zip(path, blocks, strict=False):
            child = node.children.get(ids)
            if child is None:
                child = _Node(node, ids, block)
                if block in self._nodes:  # a tail that has been filled
                    self._nodes[block].take_out()
                node.children[ids] = self._nodes[block] = child
            node = child
        if rest and (space, rest) not in node.tails:
            block = blocks[len(path)]
            if block in self._nodes:  # a shorter one
                self._nodes[block].take_out()
            node.tails[space, rest] = self._nodes[block] = _Node(node, rest, block, space)

    def _refuse(self, index: int, known: _Node, namespace: bytes) -> NoReturn:
        first, last = index * self._block_size, (index + 1) * self._block_size - 1
        of_known = self._namespace_of(known)
        why = "under other token ids than these or after other tokens"
        if of_known != namespace:
            why = f"in {_described(of_known)}, and these are of {_described(namespace)}"
        raise InvalidArgumentError(f"tokens {first} to {last} are registered already, {why}")

    def _namespace_of(self, node: _Node) -> bytes:
        """The namespace that the first block of a prefix stands in."""
        while node.parent is not None and node.parent is not self._root:
            node = node.parent
        return node.ids[: -8 * self._block_size] if node.namespace is None else node.namespace

    def remove(self, block: int) -> list[int]:
        """Forget a block and all that come after it, which cannot be reached without it.

        Returns
        -------
        list of int
            The blocks that were forgotten.
        """
        node = self._nodes[block]
        node.take_out()
        gone, waiting = [], [node]
        while waiting:
            node = waiting.pop()
            waiting.extend((*node.children.values(), *node.tails.values()))
            node.parent = None  # no cycles are left for the garbage collector
            del self._nodes[node.block]
            gone.append(node.block)
        return gone

    def nodes(self) -> list[tuple[int, int, bytes]]:
        """All full blocks: (block, the block before it or -1, token ids), parents first.

        The ids of a first block begin with its namespace.
        """
        found, waiting = [], [self._root]
        while waiting:
            node = waiting.pop()
            for child in node.children.values():
                found.append((child.block, node.block, child.ids))
                waiting.append(child)
        return found

    def add_block(self, parent: int, ids: bytes, block: int) -> bool:
        """Make one more block known, after `parent` (-1: none); False if such a one is there."""
        node = self._root if parent < 0 else self._nodes[parent]
        if ids in node.children:
            return False
        node.children[ids] = self._nodes[block] = _Node(node, ids, block)
        return True

    def _split(self, token_ids: np.ndarray, namespace: bytes) -> Iterator[bytes]:
        """The token ids of each full block, as bytes, the first behind the namespace."""
        size = self._block_size
        for stop in range(size, len(token_ids) + 1, size):
            yield namespace + token_ids[stop - size : stop].tobytes()
            namespace = b""


def _grows(known: _Node, before: _Node | None, ids: bytes) -> bool:
    """Whether a block is known as a tail after a node, which such ids begin with."""
    space = known.namespace
    return space is not None and known.parent is before and ids.startswith(space + known.ids)


def _described(namespace: bytes) -> str:
    text = namespace.decode("utf-8", "surrogatepass")
    return f"the namespace {text!r}" if text else "no namespace"


def as_namespace(namespace: object) -> bytes:
    """A namespace as it stands before token ids; none: no bytes."""
    if namespace is None:
        return b""
    if not isinstance(namespace, str) or not namespace:
        raise InvalidArgumentError(f"namespace must be a text that is not empty, not {namespace!r}")
    return namespace.encode("utf-8", "surrogatepass")


def as_token_ids(token_ids: object) -> np.ndarray:
    """Token ids as int64 (n,)."""
    try:
        ids = np.asarray(token_ids)
    except Exception as error:  # ragged lists, foreign __array__
        raise InvalidArgumentError("token_ids must be a sequence of integers") from error
    if ids.ndim != 1:
        raise ShapeMismatchError(f"token_ids must have one dimension, not shape {ids.shape}")
    if ids.size and ids.dtype.kind not in "iu":
        raise InvalidArgumentError(f"token_ids must be integers, not {ids.dtype}")
    if ids.dtype.kind == "u" and ids.size and int(ids.max()) > MAX_TOKEN_ID:
        raise InvalidArgumentError(f"token_ids must be at most 2^63 - 1, not {ids.max()}")
    return ids.astype(np.int64)
