"""Schedule of the learning rate in a training that ends after a given time."""

import math

WARM_UP = 0.05  # share of the time in which the rate grows
LAST = 0.1  # the last rate over the largest one


def learning_rate(largest: float, share: float) -> float:
    """Return the learning rate after a share of the time: a linear warm-up, times half a wave of a cosine.

    Args:
        largest: the largest rate.
        share: share of the time that has passed, 0 to 1.
    """
    return largest * min(share / WARM_UP, 1.0) * (LAST + (1 - LAST) * (1 + math.cos(math.pi * share)) / 2)
