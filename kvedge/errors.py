"""Every exception that kvedge raises on purpose.

Each class is a :class:`KvedgeError` and also the builtin that a Python user would expect in its
place, so both ``except kvedge.KvedgeError`` and ``except IndexError`` work. Each message says what
was expected and what came. A call that raises has changed nothing.
"""

__all__ = [
    "BackendUnavailableError",
    "BlockNotHeldError",
    "CapacityExceededError",
    "CorruptFileError",
    "DtypeMismatchError",
    "GroupMismatchError",
    "HeadOutOfRangeError",
    "InvalidArgumentError",
    "KvedgeError",
    "LayerOutOfRangeError",
    "LayersOutOfStepError",
    "LayoutError",
    "MissingExtraError",
    "NonFiniteInputError",
    "OutOfMemoryError",
    "PositionOutOfRangeError",
    "RankLostError",
    "ReadOnlyLayerError",
    "ScaleRangeError",
    "ShapeMismatchError",
    "StaleSnapshotError",
    "UnknownSequenceError",
    "UnsupportedIsaError",
    "UnsupportedModelError",
]


class KvedgeError(Exception):
    """Root of all errors of this package.

    Attributes
    ----------
    expected, got : object
        What was wanted and what came, where that is a shape, a dtype or a number; else None.
    layer : int or None
        The layer of a cache that it is about.
    """

    expected: object = None
    got: object = None
    layer: int | None = None

    def __init__(
        self,
        *args: object,
        expected: object = None,
        got: object = None,
        layer: int | None = None,
    ) -> None:
        super().__init__(*args)
        for name, value in (("expected", expected), ("got", got), ("layer", layer)):
            if value is not None:
                setattr(self, name, value)


class CapacityExceededError(KvedgeError, IndexError):
    """More tokens than the layer or cache was reserved for, or more blocks than a pool has free."""


class ShapeMismatchError(KvedgeError, ValueError):
    """An array has the right type but not the shape that this layer needs."""


class DtypeMismatchError(KvedgeError, TypeError):
    """An array of the wrong dtype, or an object that is not an array at all."""


class LayoutError(KvedgeError, ValueError):
    """An array that is not C-contiguous, aligned, writable or in native byte order as needed."""


class NonFiniteInputError(KvedgeError, ValueError):
    """A NaN or an infinity in keys, values, a query or a parameter."""


class InvalidArgumentError(KvedgeError, ValueError):
    """An argument, or a combination of arguments, that makes no sense."""


class UnsupportedModelError(InvalidArgumentError):
    """A model file is sound, but of a kind that :mod:`kvedge.llama` does not run."""


class PositionOutOfRangeError(KvedgeError, IndexError):
    """A token position outside what is stored."""


class HeadOutOfRangeError(KvedgeError, IndexError):
    """A KV head that the layer does not have."""


class LayerOutOfRangeError(KvedgeError, IndexError):
    """A layer that the cache does not have."""


class LayersOutOfStepError(KvedgeError, ValueError):
    """The position was advanced while some layer has not been given its tokens."""


class CorruptFileError(KvedgeError, ValueError):
    """A file that is damaged, truncated, or not what it says it is."""


class StaleSnapshotError(KvedgeError, ValueError):
    """A snapshot whose tokens have been overwritten since it was taken."""


class UnknownSequenceError(KvedgeError, LookupError):
    """A sequence that was dropped, or belongs to another cache."""


class BlockNotHeldError(KvedgeError, ValueError):
    """A block was given back that the caller does not hold: freed twice, or another's."""


class ScaleRangeError(KvedgeError, ValueError):
    """A row too large for float16 scales."""


class ReadOnlyLayerError(KvedgeError, ValueError):
    """A layer that belongs to a cache was to be changed behind the cache's back."""


class UnsupportedIsaError(KvedgeError, RuntimeError):
    """KVEDGE_ISA names an instruction set that this CPU or build does not have."""


class BackendUnavailableError(KvedgeError, ImportError):
    """The backend asked for with KVEDGE_BACKEND cannot be used."""


class MissingExtraError(KvedgeError, ImportError):
    """An optional dependency is not installed; the message names the pip extra that brings it."""


class OutOfMemoryError(KvedgeError, MemoryError):
    """The system refused to reserve the memory for a cache."""


class GroupMismatchError(KvedgeError, ValueError):
    """Processes that share a context do not fit together, or are not doing the same."""


class RankLostError(KvedgeError, ConnectionError):
    """A process that shares the context has died, or did not answer in time.

    Attributes
    ----------
    rank : int
        Its number in the group, as the process that raises sees it.
    """

    def __init__(self, *args: object, rank: int = -1) -> None:
        super().__init__(*args)
        self.rank = rank
