"""The gRPC services: thin adapters that convert, validate and wait. Decisions are the core's."""
