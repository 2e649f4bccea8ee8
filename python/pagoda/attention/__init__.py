"""Attention in plain NumPy: what every backend is checked against."""
