"""The circuit breaker: when it opens, when it tries again."""

from support.manual_clock import ManualClock

from fastinfer.server.cache.breaker import CircuitBreaker


def test_a_service_that_fails_is_left_alone_and_tried_again() -> None:
    clock = ManualClock()
    breaker = CircuitBreaker(3, 5.0, clock)
    for _ in range(2):
        assert breaker.allows_call()
        breaker.failed()
    breaker.succeeded()
    for _ in range(3):
        assert breaker.allows_call(), "failures with a success in between do not add up"
        breaker.failed()
    assert breaker.is_open
    assert not breaker.allows_call()
    clock.now += 4.9
    assert not breaker.allows_call()
    clock.now += 0.2
    assert breaker.allows_call()
    assert not breaker.allows_call(), "one call tries, the others wait for its outcome"
    breaker.failed()
    clock.now += 4.9
    assert not breaker.allows_call()
    clock.now += 0.2
    assert breaker.allows_call()
    breaker.succeeded()
    assert breaker.allows_call()
    assert breaker.allows_call()


def test_a_trial_that_nobody_reports_is_repeated() -> None:
    """The request that tried may have been cancelled."""
    clock = ManualClock()
    breaker = CircuitBreaker(1, 5.0, clock)
    breaker.failed()
    clock.now += 5.0
    assert breaker.allows_call()
    clock.now += 5.0
    assert breaker.allows_call()
