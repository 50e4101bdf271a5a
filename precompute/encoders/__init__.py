"""Frozen image encoders: found, hashed, folded."""
