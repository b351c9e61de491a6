"""The kernels inside other libraries."""
