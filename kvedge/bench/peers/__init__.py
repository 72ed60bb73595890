"""The competitors: kvedge itself, and what else computes attention on a CPU from Python.

One module per library. Each competitor is used the way its own documentation says and in its own
layout, with the options that make it fastest where a user would find them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvedge.bench.peers.base import Competitor
from kvedge.bench.peers.ggml_flash import GgmlFlashAttention
from kvedge.bench.peers.kvedge_layer import LOGIT_OPTIONS, KvedgeLayer, filled_layers
from kvedge.bench.peers.ort_gqa import OrtGroupQueryAttention
from kvedge.bench.peers.torch_sdpa import TorchSdpa

__all__ = [
    "LOGIT_OPTIONS",
    "PEER_NAMES",
    "VARIANT_NAMES",
    "Competitor",
    "KvedgeLayer",
    "filled_layers",
    "installed_peers",
    "make_peers",
]

#: kvedge itself with other ``precision_bits``: for those who ask.
VARIANT_NAMES = ("kvedge-8", "kvedge-16", "kvedge-24")

#: Names of all peers, in the order of the tables.
PEER_NAMES = (
    "torch-fp32",
    "torch-bf16",
    "ort-fp32",
    "ort-int8",
    "ggml-f16",
    "ggml-q8_0",
    "ggml-q4_0",
)


def make_peers(names: Iterable[str]) -> list[Competitor]:
    """Return one new competitor for each of the ``names``, in the order of the tables."""
    wanted = set(names)
    return [_make(name) for name in (*VARIANT_NAMES, *PEER_NAMES) if name in wanted]


def _make(name: str) -> Competitor:
    library, _, kind = name.partition("-")
    classes: dict[str, Callable[[str], Competitor]] = {
        "kvedge": lambda bits: KvedgeLayer(bits, attend_options={"precision_bits": int(bits)}),
        "torch": TorchSdpa,
        "ort": OrtGroupQueryAttention,
        "ggml": GgmlFlashAttention,
    }
    return classes[library](kind)


def installed_peers(names: Sequence[str]) -> tuple[list[Competitor], list[str]]:
    """Return the peers that can run here, and a note for each library that is missing."""
    present: list[Competitor] = []
    reasons: dict[str, list[str]] = {}
    for peer in make_peers(names):
        reason = peer.unavailable()
        if reason is None:
            present.append(peer)
        else:
            reasons.setdefault(reason, []).append(peer.name)
    notes = [f"{', '.join(peers)} left out: {reason}" for reason, peers in reasons.items()]
    return present, notes
