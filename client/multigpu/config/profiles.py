"""The profiles of a worker: values for settings that are not set elsewhere. "balanced" has the defaults."""

# Waits shortly for larger batches, and holds more tasks to make them of.
THROUGHPUT = {"batch_tasks_max": 1024, "batch_tokens_max": 65_536, "batch_delay_s": 0.005, "window_tasks": 4096}
# No task waits for another, nor long for a batch before it.
LATENCY = {"batch_tasks_max": 32, "batch_tokens_max": 2048, "batch_delay_s": 0.0, "window_tasks": 256}
PROFILES: dict[str, dict[str, int | float]] = {"throughput": THROUGHPUT, "balanced": {}, "latency": LATENCY}
