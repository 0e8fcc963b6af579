"""The table of outcomes: complete, and each entry as a client sees it."""

import json

import pytest

from controlplane.domain.decision import Reason, Refuse
from controlplane.wire.outcomes import OUTCOMES, Retry, error_response, stream_error_event


def test_every_reason_has_exactly_one_outcome() -> None:
    assert set(OUTCOMES) == set(Reason)


@pytest.mark.parametrize("reason", list(Reason))
def test_every_outcome_as_a_client_sees_it(reason: Reason) -> None:
    refuse = Refuse(reason, "do this", 1_501)
    status, headers, body = error_response(refuse, "req-9", "a_member")
    sent = dict(headers)
    outcome = OUTCOMES[reason]
    assert status == outcome.status
    assert json.loads(body) == {
        "error": {
            "message": "do this",
            "type": outcome.error_type,
            "param": "a_member",
            "code": str(reason),
        }
    }
    assert sent["content-type"] == "application/json"
    assert sent["x-headway-reason"] == str(reason)
    assert sent["x-headway-decision"] == sent["x-request-id"] == "req-9"
    # The official SDK retries these by status alone; the header overrules it both ways.
    is_final = {Reason.INSUFFICIENT_QUOTA, Reason.POLICY_ERROR}
    is_worth_a_retry = reason is Reason.IDEMPOTENCY_IN_PROGRESS or (
        status in {429, 500, 502, 503, 504} and reason not in is_final
    )
    assert (sent["x-should-retry"] == "true") is is_worth_a_retry
    if outcome.retry is Retry.LATER:
        assert (sent["retry-after"], sent["retry-after-ms"]) == ("2", "1501")
    else:
        assert not {"retry-after", "retry-after-ms"} & sent.keys()


def test_a_final_refusal_names_its_rule_and_no_time() -> None:
    refuse = Refuse(Reason.SHED_OVERLOAD, "x", 1_000, rule="ladder/last", is_final=True)
    sent = dict(error_response(refuse, None)[1])
    assert sent["x-should-retry"] == "false"
    assert sent["x-headway-rule"] == "ladder/last"
    assert "retry-after" not in sent


def test_no_estimate_no_retry_after() -> None:
    _, headers, _ = error_response(Refuse(Reason.NO_CAPACITY, "x"), None)
    assert not {"retry-after", "x-headway-decision"} & dict(headers).keys()


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (Reason.INVALID_API_KEY, 401),
        (Reason.FORBIDDEN_BY_POLICY, 403),
        (Reason.INVALID_REQUEST, 400),
        (Reason.REQUEST_TOO_LARGE, 413),
        (Reason.MODEL_NOT_FOUND, 404),
        (Reason.INSUFFICIENT_QUOTA, 429),
        (Reason.QUEUE_FULL, 429),
        (Reason.DEADLINE_UNREACHABLE, 429),
        (Reason.NO_CAPACITY, 503),
        (Reason.WARMING, 503),
        (Reason.STATE_UNAVAILABLE, 503),
        (Reason.UPSTREAM_ERROR, 502),
        (Reason.UPSTREAM_TIMEOUT, 504),
        (Reason.INTERNAL_ERROR, 500),
    ],
)
def test_statuses_that_clients_rely_on(reason: Reason, status: int) -> None:
    assert OUTCOMES[reason].status == status


def test_a_stream_ends_with_one_event_in_the_envelope() -> None:
    event = stream_error_event(Refuse(Reason.STREAM_INTERRUPTED, 'a "quoted"\nword'))
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert json.loads(event[6:])["error"]["code"] == "stream_interrupted"
