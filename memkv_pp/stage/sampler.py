"""Drawing tokens: greedy, or by a counter-based generator that repeats any draw exactly.

The generator is Philox-4x64 (Salmon et al., 2011; ``numpy.random.Philox``): key = (seed, prompt
index), counter = (position, draw, 0, 0). A draw depends on nothing else, so it is the same in any
batch, on any number of stages, and when it is repeated.
"""

import numpy as np
import torch

from memkv_pp.wire import NO_TOKEN, Sampling

_MASK_64 = (1 << 64) - 1


def uniform(sampling: Sampling, position: int, draw: int = 0) -> float:
    """A number in [0, 1): the ``draw``-th at ``position`` of this request."""
    key = np.array([sampling.seed & _MASK_64, sampling.prompt_index & _MASK_64], dtype=np.uint64)
    counter = np.array([position, draw, 0, 0], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())


def draw_token(logits_V: torch.Tensor, sampling: Sampling, position: int) -> int:
    """The token that follows ``position``, from f32 logits of the vocabulary; NO_TOKEN for NaN.

    Temperature 0 takes the largest logit (the first of equals). Otherwise softmax at the
    temperature in f64, cut to the smallest set of most likely tokens whose mass reaches ``top_p``
    (ties by token id), and the inverse of the cumulative distribution at ``uniform``.
    """
    if bool(torch.isnan(logits_V).any()):
        return NO_TOKEN
    if sampling.temperature <= 0.0:
        return int(torch.argmax(logits_V))
    logits = logits_V.double().cpu().numpy()
    # The largest comes off first: at any temperature the quotients are at most 0, or -inf.
    with np.errstate(over="ignore"):
        weights = np.exp((logits - logits.max()) / sampling.temperature)
    order = np.argsort(-weights, kind="stable")
    mass = np.cumsum(weights[order])
    kept = int(np.searchsorted(mass, sampling.top_p * mass[-1])) + 1
    kept = min(kept, len(order))
    target = uniform(sampling, position) * mass[kept - 1]
    return int(order[min(int(np.searchsorted(mass[:kept], target, side="right")), kept - 1)])
