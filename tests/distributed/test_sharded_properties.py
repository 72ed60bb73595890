"""Any trace of calls on a context over ranks gives what one cache gives, and stores its bytes."""

from hypothesis import given, settings
from sharded import check_trace, run_sharded
from sharded_traces import traces
from thread_group import run_ranks


@settings(max_examples=settings.default.max_examples * 4)
@given(traces())
def test_any_trace_is_that_of_one_cache(trace):
    check_trace(trace, run_ranks(trace["ranks"], lambda group: run_sharded(group, trace)))
