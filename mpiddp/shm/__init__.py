"""Memory that a node's ranks share: segments, the scratch, eager buffers for short arrays, copies between processes."""
