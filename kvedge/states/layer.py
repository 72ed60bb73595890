"""A layer whose past is a state: arrays of one size, written over at each step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvedge.core import arrays as foreign
from kvedge.core import checks, half
from kvedge.core.memory import aligned_copy, aligned_zeros, memory_for
from kvedge.errors import (
    DtypeMismatchError,
    InvalidArgumentError,
    LayoutError,
    ReadOnlyLayerError,
    ShapeMismatchError,
)

if TYPE_CHECKING:
    from typing_extensions import Self  # type checkers bring it along

__all__ = [
    "MAX_ARRAYS",
    "MAX_AXES",
    "STATE_TYPES",
    "StateConfig",
    "StateLayer",
    "StateSnapshot",
    "bits_of",
    "check_finite",
    "check_name",
    "config_of",
    "empty_state",
    "is_owned",
    "own",
    "put",
    "reset",
]

#: NumPy's type of a state's elements; it has no bfloat16, whose bits are uint16.
STATE_TYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}
MAX_ARRAYS = 8
MAX_AXES = 8
MAX_NAME = 32  # characters


class StateConfig(NamedTuple):
    """What must be equal for the bytes of one state to mean the same in another."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        items = (STATE_TYPES[dtype].itemsize for dtype in self.dtypes)
        return sum(n * math.prod(shape) for n, shape in zip(items, self.shapes, strict=True))

    def __str__(self) -> str:
        arrays = zip(self.names, self.shapes, self.dtypes, strict=True)
        return ", ".join(f"{name} {shape} {dtype}" for name, shape, dtype in arrays)


@dataclass(frozen=True, eq=False, repr=False)
class StateSnapshot:
    """What a state was at one moment: :meth:`StateLayer.restore` puts it back."""

    config: StateConfig
    arrays: tuple[np.ndarray, ...]
    position: int

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return self.config.num_bytes

    def __repr__(self) -> str:
        return f"<StateSnapshot of {self.config} at position {self.position}>"


class StateLayer:
    """What a layer without keys and values keeps of the past: arrays that each step writes over.

    Recurrent states of linear attention and Mamba, the last inputs of convolutions. There is no row
    per token, so nothing can be appended to it or cut from it: a step replaces the arrays, and
    going back is putting a :meth:`snapshot` back. In ``KVCache(layers=[...])`` it stands beside
    layers of keys and values.

    Parameters
    ----------
    arrays : mapping of str to array
        1 to 8 of them, of any shape with 1 to 8 axes, C-contiguous, writable, finite. They are
        taken without a copy: whoever writes to them changes the state. Names are identifiers of up
        to 32 characters. float32, float16 or bfloat16 (of ml_dtypes or torch, or its bits in uint16
        with `dtype`).
    dtype : {"float32", "float16", "bfloat16"} or mapping of str to such, optional
        Type of the elements, of all arrays or by their names; by default what each array is of.
        uint16 are bits of bfloat16, and it has to be said.

    Raises
    ------
    InvalidArgumentError, DtypeMismatchError, ShapeMismatchError, LayoutError, NonFiniteInputError

    Examples
    --------
    >>> import numpy as np
    >>> layer = StateLayer({"recurrent": np.zeros((16, 128, 128), np.float32)})
    >>> before = layer.snapshot()
    >>> layer.replace(recurrent=np.ones((16, 128, 128), np.float32))
    >>> layer.advance()
    >>> layer.position, layer.nbytes
    (1, 1048576)
    >>> layer.restore(before)
    >>> layer.position, float(layer.arrays["recurrent"].max())
    (0, 0.0)
    """

    _arrays: dict[str, np.ndarray]
    _config: StateConfig
    _position: int
    _owned: bool  # it belongs to a cache, which keeps the positions of its layers

    def __init__(
        self,
        arrays: Mapping[str, Any],
        *,
        dtype: str | Mapping[str, str] | None = None,
    ) -> None:
        if not isinstance(arrays, Mapping) or not 1 <= len(arrays) <= MAX_ARRAYS:
            what = len(arrays) if isinstance(arrays, Mapping) else checks.describe(arrays)
            raise InvalidArgumentError(
                f"arrays must be a mapping of 1 to {MAX_ARRAYS} names to arrays, not {what}"
            )
        for name in arrays:
            check_name(name)
        dtypes = _dtypes(arrays, dtype)
        taken: dict[str, np.ndarray] = {}
        found = []
        for name in sorted(arrays):
            memory, kind = _memory_of(arrays[name], name, dtypes[name])
            _check_own(memory, name)
            for other, known in taken.items():
                if np.may_share_memory(memory, known):
                    raise LayoutError(f"{name} and {other} share memory: pass a copy of one")
            check_finite(memory, name, kind)
            taken[name] = memory
            found.append(kind)
        shapes = tuple(memory.shape for memory in taken.values())
        self._arrays = taken
        self._config = StateConfig(tuple(taken), tuple(found), shapes)
        self._position, self._owned = 0, False

    # ---- the state -------------------------------------------------------------------------------

    @property
    def arrays(self) -> Mapping[str, np.ndarray]:
        """The arrays themselves by their names, bfloat16 as its bits in uint16."""
        return MappingProxyType(self._arrays)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays, in order of the alphabet."""
        return self._config.names

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What each array is of: "float32", "float16" or "bfloat16"."""
        return self._config.dtypes

    @property
    def position(self) -> int:
        """Tokens that the state has seen."""
        return self._position

    def replace(self, **arrays: Any) -> None:
        """Write over the arrays that are named, with others of the same shape and type.

        Parameters
        ----------
        **arrays : array
            Of any strides; all are checked before one is written. Those left out stay. What is
            written to :attr:`arrays` directly is checked by nobody.

        Raises
        ------
        InvalidArgumentError
            There is no array of that name.
        DtypeMismatchError, ShapeMismatchError, NonFiniteInputError
            Nothing has changed.
        """
        copies = {}
        for name, array in arrays.items():
            if name not in self._arrays:
                raise InvalidArgumentError(
                    f"this state has no array {name[:40]!r}: it has {', '.join(self.names)}"
                )
            own = self._arrays[name]
            kind = self._config.dtypes[self._config.names.index(name)]
            memory, _ = _memory_of(array, name, kind)
            if memory.shape != own.shape:
                raise ShapeMismatchError(
                    f"{name} must have shape {own.shape}, not {memory.shape}",
                    expected=own.shape,
                    got=memory.shape,
                )
            check_finite(memory, name, kind)
            # It may be a view of an array that is written before it.
            shares = any(np.may_share_memory(memory, kept) for kept in self._arrays.values())
            copies[name] = memory.copy() if shares else memory
        for name, memory in copies.items():
            np.copyto(self._arrays[name], memory)

    def advance(self, n: int = 1) -> None:
        """Count `n` tokens more that the state has seen.

        Raises
        ------
        InvalidArgumentError
            `n` is negative or no integer.
        """
        number = checks.as_int(n, "n")
        if number < 0:
            raise InvalidArgumentError(f"n must be at least 0, not {number}: restore() goes back")
        self._position += number

    def reset(self) -> None:
        """Set all elements to zero, and the position too.

        Raises
        ------
        ReadOnlyLayerError
            It belongs to a cache: ``clear`` that.
        """
        self._check_free("clear()")
        reset(self)

    # ---- moments ---------------------------------------------------------------------------------

    @memory_for("a snapshot of a state")
    def snapshot(self) -> StateSnapshot:
        """Copy the arrays as they are now.

        Returns
        -------
        StateSnapshot
            With ``nbytes`` and ``position``; it can be pickled.
        """
        copies = tuple(array.copy() for array in self._arrays.values())
        return StateSnapshot(self._config, copies, self._position)

    def restore(self, snapshot: StateSnapshot) -> None:
        """Be as at a snapshot, of this state or of one with arrays of the same names and shapes.

        Parameters
        ----------
        snapshot : StateSnapshot

        Raises
        ------
        InvalidArgumentError, ShapeMismatchError
            It is none, or of another state.
        ReadOnlyLayerError
            The layer belongs to a cache: ``restore`` a snapshot of that.
        """
        if not isinstance(snapshot, StateSnapshot):
            raise InvalidArgumentError(
                f"snapshot must be a StateSnapshot, not {checks.describe(snapshot)}"
            )
        self._check_free("restore() a snapshot of")
        if snapshot.config != self._config:
            raise ShapeMismatchError(
                f"the snapshot is of {snapshot.config}, this state is {self._config}",
                expected=self._config,
                got=snapshot.config,
            )
        put(self, snapshot.arrays, snapshot.position)

    def _check_free(self, instead: str) -> None:
        if self._owned:
            raise ReadOnlyLayerError(
                f"this layer belongs to a KVCache: {instead} the cache, or take a copy()"
            )

    @memory_for("a copy of a state")
    def copy(self) -> Self:
        """Return an independent layer with the same state."""
        other = type(self).__new__(type(self))
        vars(other).update(vars(self))
        other._arrays = {name: aligned_copy(array) for name, array in self._arrays.items()}
        other._owned = False
        return other

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self.copy()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_owned": False}

    def __eq__(self, other: object) -> bool:
        """Whether two have the same bits at the same position."""
        if not isinstance(other, StateLayer):
            return NotImplemented
        if (self._config, self._position) != (other._config, other._position):
            return False
        pairs = zip(self._arrays.values(), other._arrays.values(), strict=True)
        return all(np.array_equal(bits_of(mine), bits_of(two)) for mine, two in pairs)

    __hash__ = None  # type: ignore[assignment]

    # ---- sizes -----------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self._config.num_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes reserved: those of the arrays."""
        return self.nbytes

    @property
    def resident_bytes(self) -> int:
        """Bytes that the system has committed: those of the arrays."""
        return self.nbytes

    @property
    def fp32_memory_bytes(self) -> int:
        """Bytes that the same elements take in float32."""
        return 4 * sum(math.prod(shape) for shape in self._config.shapes)

    @property
    def compression_ratio(self) -> float:
        """How many times smaller than float32: fp32_memory_bytes / memory_bytes."""
        return self.fp32_memory_bytes / self.memory_bytes

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._config} at position {self._position}>"


def config_of(layer: StateLayer) -> StateConfig:
    """What must be equal for the bytes of one state to mean the same in another."""
    return layer._config


def is_owned(layer: StateLayer) -> bool:
    """Whether a layer belongs to a cache."""
    return layer._owned


def own(layer: StateLayer) -> None:
    """Let a layer belong to a cache, through which alone it goes back from now on."""
    layer._owned = True


def put(layer: StateLayer, arrays: Iterable[np.ndarray], position: int) -> None:
    """Let a layer hold what arrays of its config do. Its own stay where they are."""
    for own_array, array in zip(layer._arrays.values(), arrays, strict=True):
        np.copyto(own_array, array)
    layer._position = position


def empty_state(config: StateConfig) -> StateLayer:
    """A layer of zeros."""
    arrays = {
        name: aligned_zeros(shape, STATE_TYPES[dtype])
        for name, dtype, shape in zip(config.names, config.dtypes, config.shapes, strict=True)
    }
    return StateLayer(arrays, dtype=dict(zip(config.names, config.dtypes, strict=True)))


def reset(layer: StateLayer) -> None:
    """Set all elements to zero, and the position too."""
    for array in layer._arrays.values():
        array[...] = 0
    layer._position = 0


def bits_of(array: np.ndarray) -> np.ndarray:
    """The bytes of an array of a state, in one axis."""
    return array.reshape(-1).view(np.uint8)


def check_name(name: object) -> str:
    """The name of an array, or InvalidArgumentError."""
    good = isinstance(name, str) and name.isascii() and name.isidentifier()
    if not good or len(str(name)) > MAX_NAME:
        raise InvalidArgumentError(
            f"names of arrays must be identifiers of up to {MAX_NAME} characters, not "
            f"{checks.describe(name)}"
        )
    return str(name)


def check_finite(array: np.ndarray, name: str, dtype: str) -> None:
    """NonFiniteInputError unless all elements of an array of a state are finite."""
    if dtype == "bfloat16":
        if half.fault_of_bfloat16(array) is not None:
            checks.check_finite(half.decode_bfloat16(array), name)
    else:
        checks.check_finite(array, name)


def _dtypes(arrays: Mapping[str, Any], dtype: object) -> dict[str, str | None]:
    """What is said of the type of each array."""
    kinds: Mapping[str, object] = (
        dtype if isinstance(dtype, Mapping) else dict.fromkeys(arrays, dtype)
    )
    for name, kind in kinds.items():
        if name not in arrays:
            raise InvalidArgumentError(f"dtype names {checks.describe(name)}, which is no array")
        if kind is not None and (not isinstance(kind, str) or kind not in STATE_TYPES):
            raise InvalidArgumentError(
                f"dtype of {name} must be one of {', '.join(STATE_TYPES)}, not "
                f"{checks.describe(kind)}"
            )
    return {name: kinds.get(name) for name in arrays}  # type: ignore[misc]


def _memory_of(array: Any, name: str, dtype: str | None) -> tuple[np.ndarray, str]:
    """The memory of an array, bfloat16 as its bits, and what it is of, which is `dtype` if said."""
    if isinstance(array, np.ma.MaskedArray):
        raise DtypeMismatchError(f"{name} is a masked array: convert with .filled(value)")
    torch = foreign.torch_if_loaded()
    memory: np.ndarray
    if foreign.is_tensor(array):
        memory = foreign.memory_of(array, name)
        of_bits = array.dtype is torch.bfloat16
    elif isinstance(array, np.ndarray):
        memory = np.asarray(array)
        of_bits = memory.dtype == np.uint16 and dtype == "bfloat16"
        if foreign.is_bfloat16(memory):
            memory, of_bits = memory.view(np.uint16), True
    else:
        raise DtypeMismatchError(f"{name} must be a NumPy array, not {checks.describe(array)}")
    found = "bfloat16" if of_bits else memory.dtype.name
    if found not in STATE_TYPES or not memory.dtype.isnative:
        said = ': uint16 are bits of bfloat16 where dtype="bfloat16" says so'
        raise DtypeMismatchError(
            f"{name} must be float32, float16 or bfloat16, not {memory.dtype}"
            + (said if found == "uint16" else ""),
            expected=dtype or "float32",
            got=str(memory.dtype),
        )
    if dtype is not None and found != dtype:
        raise DtypeMismatchError(
            f"{name} must be {dtype}, not {found}: convert it", expected=dtype, got=found
        )
    return memory, found


def _check_own(memory: np.ndarray, name: str) -> None:
    """Raise unless a state can have an array as its own."""
    if not memory.size or not 1 <= memory.ndim <= MAX_AXES:
        raise ShapeMismatchError(
            f"{name} must have elements and 1 to {MAX_AXES} axes, not shape {memory.shape}"
        )
    if not memory.flags.c_contiguous or not memory.flags.aligned:
        raise LayoutError(
            f"{name} must be C-contiguous and aligned (shape {memory.shape}, strides "
            f"{memory.strides}): pass numpy.array({name})"
        )
    if not memory.flags.writeable:
        raise LayoutError(f"{name} is read-only: pass a copy of it")
