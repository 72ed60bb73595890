"""The recurrences of states in float64, token by token, as their papers write them."""

import numpy as np


def delta(state, query, key, value, gate, beta, *, normalize=False, scale=None):
    """The state after tokens (batch, tokens, ...) of a gated delta rule, and their results."""
    S = np.array(state, np.float64)
    q, k, v, g, b = (np.asarray(a, np.float64) for a in (query, key, value, gate, beta))
    if normalize:
        q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    heads, key_dim = S.shape[1:3]
    shared = heads // q.shape[2]
    scale = key_dim**-0.5 if scale is None else scale
    out = np.empty(v.shape)
    for n, t, h in np.ndindex(v.shape[:3]):
        at = S[n, h]
        at *= np.exp(np.broadcast_to(g[n, t, h], key_dim))[:, None]
        k_t, q_t = k[n, t, h // shared], q[n, t, h // shared]
        at += b[n, t, h] * np.outer(k_t, v[n, t, h] - k_t @ at)
        out[n, t, h] = scale * (q_t @ at)
    return S, out


def mamba(state, x, dt, A, B, C, D=None):
    """The state after tokens (batch, tokens, ...) of SSD, and their results."""
    S = np.array(state, np.float64)
    x, dt, A, B, C = (np.asarray(a, np.float64) for a in (x, dt, A, B, C))
    shared = S.shape[1] // B.shape[2]
    out = np.empty(x.shape)
    for n, t, h in np.ndindex(x.shape[:3]):
        at = S[n, h]
        at *= np.exp(dt[n, t, h] * A[h])
        at += np.outer(dt[n, t, h] * x[n, t, h], B[n, t, h // shared])
        out[n, t, h] = at @ C[n, t, h // shared]
    return S, out if D is None else out + np.asarray(D, np.float64)[:, None] * x


def conv(state, x, weight, bias=None, activation=None):
    """The state after tokens (batch, tokens, channels) of a causal convolution, and results."""
    state, x, w = (np.asarray(a, np.float64) for a in (state, x, weight))
    inputs = np.concatenate([state.swapaxes(1, 2), x], axis=1)
    held, width = state.shape[2], w.shape[1]
    out = np.empty(x.shape)
    for t in range(x.shape[1]):
        out[:, t] = (inputs[:, t + held - width + 1 : t + held + 1] * w.T).sum(axis=1)
    if bias is not None:
        out += np.asarray(bias, np.float64)
    if activation == "silu":
        out = out * 0.5 * (1 + np.tanh(out / 2))
    return inputs[:, x.shape[1] :].swapaxes(1, 2), out
