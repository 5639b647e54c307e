"""The W3C trace context of spans, as text; nothing of OpenTelemetry is imported for it."""

import sys
from typing import Any

SAMPLED = 0x01


def current_traceparent() -> str:
    """The trace context of the caller's span; empty unless it is recorded and sampled.

    A program that has not imported OpenTelemetry has no span: this costs one dictionary look-up.
    """
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return ""
    span = api.get_current_span()
    return traceparent_of(span) if span.is_recording() else ""


def traceparent_of(span: Any) -> str:
    """The trace context of a span; empty unless it is sampled."""
    context = span.get_span_context()
    if not context.trace_flags & SAMPLED:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"
