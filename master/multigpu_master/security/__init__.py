"""Authentication and authorization: listeners, certificates, tokens and their limits, and the audit log."""
