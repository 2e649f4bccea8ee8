"""Attention in plain NumPy: the reference that every backend is checked against."""
