"""A layer that grows, drops, truncates and moves, against a list of its tokens."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import content

import kvedge.layer.room
from kvedge import errors
from kvedge.core.formats import FORMATS
from kvedge.core.registry import layer_types
from kvedge.layer.layer import store_of

H, D = 2, 8


class LayerRoom(RuleBasedStateMachine):
    """Tokens are numbered as they are appended; row t is made of its number."""

    @initialize(
        dtype=st.sampled_from(list(FORMATS)),
        capacity=st.none() | st.integers(1, 40),
        window=st.none() | st.integers(1, 20),
        first_rows=st.sampled_from([1, 4, 256]),
    )
    def make(self, dtype, capacity, window, first_rows):
        capacity = None if window else capacity
        kvedge.layer.room.FIRST_ROWS, self.before = first_rows, kvedge.layer.room.FIRST_ROWS
        self.kind = layer_types[dtype]
        self.capacity = capacity
        self.window = window
        self.layer = self.kind(capacity, H, D, window=window)
        self.tokens, self.next, self.dropped = [], 0, 0

    def teardown(self):
        if hasattr(self, "before"):
            kvedge.layer.room.FIRST_ROWS = self.before

    @staticmethod
    def rows(numbers):
        t = np.asarray(numbers, np.float32).reshape(-1, 1, 1)
        channel = np.arange(H * D, dtype=np.float32).reshape(H, D)
        return np.cos(t + channel), np.sin(3 * t + channel)

    @rule(n=st.integers(0, 30))
    def extend(self, n):
        numbers = list(range(self.next, self.next + n))
        if self.capacity is not None and len(self.tokens) + n > self.capacity:
            try:
                self.layer.extend(*self.rows(numbers))
            except IndexError:
                return
            raise AssertionError("more than the capacity was taken")
        self.layer.extend(*self.rows(numbers))
        self.append(numbers)

    def append(self, numbers):
        if self.window and numbers:
            unseen = max(0, len(self.tokens) - (self.window - 1))
            del self.tokens[:unseen]
            self.dropped += unseen
        self.tokens += numbers
        self.next += len(numbers)

    @rule()
    def push(self):
        if self.capacity is None or len(self.tokens) < self.capacity:
            self.layer.push(*(row[0] for row in self.rows([self.next])))
            self.append([self.next])

    @precondition(lambda self: not self.window)
    @rule(share=st.floats(0, 1))
    def drop_first(self, share):
        n = round(share * len(self.tokens))
        self.layer.drop_first(n)
        del self.tokens[:n]
        self.dropped += n

    @rule(share=st.floats(0, 1))
    def truncate(self, share):
        n = round(share * len(self.tokens))
        if self.window and self.dropped and n < self.window - 1:
            with pytest.raises(errors.PositionOutOfRangeError):
                self.layer.truncate(n)
            return
        self.layer.truncate(n)
        del self.tokens[n:]

    @precondition(lambda self: not self.window)
    @rule(data=st.data())
    def keep(self, data):
        mask = data.draw(
            st.lists(st.booleans(), min_size=len(self.tokens), max_size=len(self.tokens))
        )
        self.layer.keep(np.array(mask, bool))
        self.tokens = [t for t, kept in zip(self.tokens, mask, strict=True) if kept]

    @rule(n=st.integers(0, 60))
    def reserve(self, n):
        if self.capacity is None or len(self.tokens) + n <= self.capacity:
            self.layer.reserve(n)

    @rule()
    def clear(self):
        self.layer.clear()
        self.tokens, self.dropped = [], 0

    @rule()
    def copy(self):
        self.layer = self.layer.copy()

    @invariant()
    def holds_the_tokens(self):
        if not hasattr(self, "layer"):
            return
        layer = self.layer
        assert len(layer) == len(self.tokens) and layer.num_dropped == self.dropped
        other = self.kind(max(1, len(self.tokens)), H, D)
        other.extend(*self.rows(self.tokens))
        assert content(layer) == content(other)
        np.testing.assert_array_equal(layer.values(), other.values())
        if self.tokens:
            query = np.cos(np.arange(2 * H * D, dtype=np.float32)).reshape(2 * H, D)
            if self.dropped and self.window is not None and len(self.tokens) < self.window:
                # It went back: the next token sees all that it may, the last one does not.
                with pytest.raises(errors.InvalidArgumentError, match="dropped"):
                    layer.attend(query)
                return
            expected = other.attend(query, window=self.window)
            np.testing.assert_allclose(layer.attend(query), expected, atol=1e-5)
        if self.capacity is not None:
            assert store_of(layer).config.capacity <= 2 * self.capacity


TestLayerRoom = LayerRoom.TestCase
