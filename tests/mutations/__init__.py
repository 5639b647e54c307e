"""Mutation tests: each breaks one rule of the product, and a checker must fail."""
