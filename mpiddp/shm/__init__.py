"""Memory that the ranks of a node share: segments, staging, short arrays, and the kernel's copies between processes."""
