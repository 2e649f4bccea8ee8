"""What this machine carries, and what measurements of that and of caches stand on. No cache needs any of it."""
