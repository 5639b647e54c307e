"""Tokens, certificates, limits of callers, and the audit log of administrative calls."""
