"""The CUDA backend: CuPy streams, events and memory, and the driver's stream memory operations."""
