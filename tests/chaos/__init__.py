"""Chaos: real kills, a history of what the clients saw, and a checker that knows nothing of the product."""
