"""Rate limits of tenants and keys on one replica: what passes, what is told, what is given back."""

import pytest

from controlplane.admission.rate_limit import Meter
from controlplane.domain.catalog import Limits, Principal, Tenant
from controlplane.runtime.rate_limits import (
    HOLDERS_MAX,
    UNLIMITED,
    Grant,
    Limit,
    Limited,
    RateLimits,
)


def principal(tenant="acme", key="key-1", **key_limits):
    return Principal(
        key_id=key,
        tenant=Tenant(
            id=tenant, name="A", tenant_class="gold", slo_class="s", is_disabled=False,
            cache_salt="",
        ),
        key_limits=Limits(**key_limits),
    )  # fmt: skip


def test_without_limits_nothing_is_kept():
    limits = RateLimits()
    grant = limits.take(principal(), Limits(), 100, 0)
    assert grant is UNLIMITED
    limits.correct(grant, 50, 0)
    limits.release(grant)
    assert limits.headers(grant, 0) == ()
    assert limits.headers_for(principal(), Limits(), 0) == ()
    assert len(limits) == 0


def test_requests_pass_up_to_a_minutes_worth_and_then_at_the_rate():
    limits, rate = RateLimits(), Limits(requests_per_minute=60)
    for _ in range(60):
        assert isinstance(limits.take(principal(), rate, 1, 0), Grant)
    limited = limits.take(principal(), rate, 1, 0)
    assert limited == Limited(
        Limit.REQUESTS, "tenant", 60, 1_000,
        "this tenant is limited to 60 requests a minute; send fewer",
    )  # fmt: skip
    assert isinstance(limits.take(principal(), rate, 1, 999), Limited)
    assert isinstance(limits.take(principal(), rate, 1, 1_000), Grant)
    assert isinstance(limits.take(principal(), rate, 1, 1_000), Limited)


def test_tokens_are_counted_as_thought_and_corrected_once():
    limits, rate = RateLimits(), Limits(tokens_per_minute=6_000)
    grant = limits.take(principal(), rate, 6_000, 0)
    limited = limits.take(principal(), rate, 1_000, 0)
    assert isinstance(limited, Limited)
    assert (limited.which, limited.retry_after_ms) == (Limit.TOKENS, 10_000)
    limits.correct(grant, 4_000, 0)
    limits.correct(grant, 0, 0)
    assert isinstance(limits.take(principal(), rate, 2_000, 0), Grant)
    assert isinstance(limits.take(principal(), rate, 1, 0), Limited)


def test_more_than_was_thought_is_a_debt():
    limits, rate = RateLimits(), Limits(tokens_per_minute=6_000)
    grant = limits.take(principal(), rate, 100, 0)
    limits.correct(grant, 12_000, 0)
    limited = limits.take(principal(), rate, 1_000, 0)
    assert limited.retry_after_ms == 70_000


def test_a_call_larger_than_the_limit_passes_when_nothing_is_owed_and_is_paid_off():
    limits, rate = RateLimits(), Limits(tokens_per_minute=600)
    assert isinstance(limits.take(principal(), rate, 1_200, 0), Grant)
    assert isinstance(limits.take(principal(), rate, 1_200, 119_999), Limited)
    assert isinstance(limits.take(principal(), rate, 1_200, 120_000), Grant)


def test_calls_in_flight_are_released_once():
    limits, rate = RateLimits(), Limits(calls_in_flight_max=2)
    first = limits.take(principal(), rate, 1, 0)
    limits.take(principal(), rate, 1, 0)
    limited = limits.take(principal(), rate, 1, 0)
    assert (limited.which, limited.limit, limited.retry_after_ms) == (
        Limit.CALLS_IN_FLIGHT, 2, 1_000,
    )  # fmt: skip
    limits.release(first)
    limits.release(first)
    assert isinstance(limits.take(principal(), rate, 1, 0), Grant)
    assert isinstance(limits.take(principal(), rate, 1, 0), Limited)
    assert limits.headers(first, 0) == ()


def test_a_key_has_limits_of_its_own_and_one_that_refuses_takes_nothing_of_the_other():
    limits, rate = RateLimits(), Limits(requests_per_minute=3)
    narrow = principal(key="narrow", requests_per_minute=1)
    assert isinstance(limits.take(narrow, rate, 1, 0), Grant)
    for _ in range(5):
        limited = limits.take(narrow, rate, 1, 0)
        assert (limited.scope, limited.limit) == ("key", 1)
    wide = principal(key="wide")
    assert isinstance(limits.take(wide, rate, 1, 0), Grant)
    assert isinstance(limits.take(wide, rate, 1, 0), Grant)
    assert limits.take(wide, rate, 1, 0).scope == "tenant"
    assert isinstance(limits.take(principal(tenant="other"), rate, 1, 0), Grant)


def test_headers_tell_the_tighter_of_tenant_and_key():
    limits, rate = RateLimits(), Limits(requests_per_minute=600, tokens_per_minute=120_000)
    who = principal(requests_per_minute=10)
    grant = limits.take(who, rate, 30_000, 0)
    assert limits.headers(grant, 0) == (
        (b"x-ratelimit-limit-requests", b"10"),
        (b"x-ratelimit-remaining-requests", b"9"),
        (b"x-ratelimit-reset-requests", b"6s"),
        (b"x-ratelimit-limit-tokens", b"120000"),
        (b"x-ratelimit-remaining-tokens", b"90000"),
        (b"x-ratelimit-reset-tokens", b"15s"),
    )
    told = dict(limits.headers_for(who, rate, 14_750))
    assert told[b"x-ratelimit-reset-requests"] == b"0s"
    assert told[b"x-ratelimit-reset-tokens"] == b"250ms"
    limits.take(who, rate, 200_000, 15_000)
    told = dict(limits.headers_for(who, rate, 15_000))
    assert told[b"x-ratelimit-remaining-tokens"] == b"0"
    assert told[b"x-ratelimit-reset-tokens"] == b"1m40s"


def test_replicas_share_a_limit():
    rate = Limits(requests_per_minute=7, calls_in_flight_max=5)
    replicas = [RateLimits() for _ in range(3)]
    for limits in replicas:
        limits.use_replicas(3)
    passed = [
        sum(isinstance(limits.take(principal(key=str(n)), rate, 1, 0), Grant) for n in range(9))
        for limits in replicas
    ]
    assert sum(passed) <= 5
    alone = RateLimits()
    alone.use_replicas(0)
    assert sum(isinstance(alone.take(principal(), rate, 1, 0), Grant) for _ in range(9)) == 5


def test_a_share_of_less_than_one_still_passes_now_and_then():
    limits, rate = RateLimits(), Limits(requests_per_minute=1)
    limits.use_replicas(3)
    assert isinstance(limits.take(principal(), rate, 1, 0), Grant)
    wait_ms = limits.take(principal(), rate, 1, 0).retry_after_ms
    assert wait_ms == pytest.approx(180_000, rel=0.01)
    assert isinstance(limits.take(principal(), rate, 1, wait_ms), Grant)


def test_a_limit_that_changes_is_used_at_once():
    limits = RateLimits()
    for _ in range(60):
        limits.take(principal(), Limits(requests_per_minute=60), 1, 0)
    assert isinstance(limits.take(principal(), Limits(requests_per_minute=60), 1, 0), Limited)
    assert isinstance(limits.take(principal(), Limits(requests_per_minute=61), 1, 0), Grant)


def test_holders_are_bounded_and_those_with_calls_in_flight_stay():
    limits, rate = RateLimits(), Limits(requests_per_minute=60, calls_in_flight_max=1)
    limits.take(principal(tenant="busy"), rate, 1, 0)
    for number in range(HOLDERS_MAX + 50):
        grant = limits.take(principal(tenant=f"t{number}"), rate, 1, number)
        limits.release(grant)
    assert len(limits) <= HOLDERS_MAX + 1
    assert isinstance(limits.take(principal(tenant="busy"), rate, 1, 10**6), Limited)


def test_a_clock_that_stands_still_or_steps_back_pays_nothing_off():
    meter = Meter()
    meter.take(60, 60, 1, 5_000)
    assert meter.wait_ms(1, 60, 1, 5_000) == 1_000
    assert meter.wait_ms(1, 60, 1, 1_000) == 1_000
    meter.take(1, 60, 1, 1_000)
    assert meter.wait_ms(1, 60, 1, 5_000) == 2_000


def test_what_would_be_refused_is_told_without_counting_anything():
    limits, rate = RateLimits(), Limits(requests_per_minute=2, calls_in_flight_max=3)
    caller = principal(tokens_per_minute=600)
    for number in range(6):
        before = limits.left(caller, rate, number)
        expected = limits.would_limit(caller, rate, 400, number)
        assert limits.left(caller, rate, number) == before
        assert limits.would_limit(caller, rate, 400, number) == expected
        taken = limits.take(caller, rate, 400, number)
        assert expected == (taken if isinstance(taken, Limited) else None)
    assert isinstance(expected, Limited)
    assert [(each.scope, each.which, each.limit) for each in before] == [
        ("tenant", Limit.REQUESTS, 2),
        ("tenant", Limit.CALLS_IN_FLIGHT, 3),
        ("key", Limit.TOKENS, 600),
    ]
    assert [each.remaining for each in before] == [1, 2, 200]
    assert limits.left(principal(), Limits(), 0) == []
    assert limits.would_limit(principal(), Limits(), 10**9, 0) is None
