"""Who may come in, and what they may do: tokens, certificates, limits, and the book of what administrators did."""
