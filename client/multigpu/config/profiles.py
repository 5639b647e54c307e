"""What a worker's profile means: values for settings that nobody has set. "balanced" is the defaults themselves."""

# Larger batches are worth a short wait, and the worker holds more, so that they can be had.
THROUGHPUT = {"batch_tasks_max": 1024, "batch_tokens_max": 65_536, "batch_delay_s": 0.005, "window_tasks": 4096}
# A task waits for no other to join it, and never long for a batch before it.
LATENCY = {"batch_tasks_max": 32, "batch_tokens_max": 2048, "batch_delay_s": 0.0, "window_tasks": 256}
PROFILES: dict[str, dict[str, int | float]] = {"throughput": THROUGHPUT, "balanced": {}, "latency": LATENCY}
