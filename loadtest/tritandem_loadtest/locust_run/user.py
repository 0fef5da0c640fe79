"""The Locust user: a permit to have one stream in flight. The schedule, not the user, decides when to send.

Requests enter Locust's own statistics as one row that counts (end to end) and one row for each token-level metric,
which stays out of Locust's totals so that its requests/s and failure rate remain true.
"""

from __future__ import annotations

from locust import User, task
from locust.exception import StopUser

from ..metrics import METRICS, itl_per_chunk_ms, request_metrics_ms
from ..stamps import COMPLETED, RequestRecord
from .session import LoadSession

SESSION_ATTRIBUTE = "tritandem_session"


class StreamUser(User):  # type: ignore[misc]
    """Needs `environment.tritandem_session`, None when the test cannot start; idle once the schedule is used up."""

    @task  # type: ignore[untyped-decorator]
    def serve_next(self) -> None:
        session: LoadSession | None = getattr(self.environment, SESSION_ATTRIBUTE)
        if session is None:
            raise StopUser
        try:
            record = session.run_next()
        except Exception as error:  # a bug or a wrong setting of ours, never a failed request
            session.failure = session.failure or f"{type(error).__name__}: {error}"
            raise StopUser from error
        if record is None:
            # Users that left would look like a fading load on Locust's page.
            session.wait_for_stop()
            raise StopUser
        log_to_locust(self.environment, record)


def log_to_locust(environment, record: RequestRecord) -> None:  # type: ignore[no-untyped-def]
    """Fire Locust's request event and fill the token-level rows of its statistics table."""
    completed = record.outcome == COMPLETED
    environment.events.request.fire(
        request_type="stream",
        name="end to end",
        response_time=(record.end_ns - record.intended_ns) / 1e6,
        response_length=record.output_tokens,
        exception=None if completed else RuntimeError(record.error or record.outcome),
        context={"outcome": record.outcome},
    )
    if not completed:
        return
    entries = environment.stats.entries
    for metric, value_ms in request_metrics_ms(record).items():
        if metric != "e2e":  # that is the row of the request event
            entries[(METRICS[metric], "tokens")].log(value_ms, 0)
    for gap_ms in itl_per_chunk_ms(record):
        entries[(METRICS["itl_chunk"], "tokens")].log(gap_ms, 0)
