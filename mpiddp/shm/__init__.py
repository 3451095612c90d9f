"""Memory that the ranks of a node share: segments, staging, buffers for short arrays, copies between processes."""
