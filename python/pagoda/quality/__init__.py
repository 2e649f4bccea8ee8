"""Measures what a cache does to quality, without a large model: heads with closed forms, and the shipped language model."""
