"""The front doors: thin adapters between gRPC and the driver. They convert, validate and wait; they decide nothing."""
