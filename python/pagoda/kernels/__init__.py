"""Device kernels: which instances there are, what they take, and how they are compiled. The code itself is in cuda/."""
