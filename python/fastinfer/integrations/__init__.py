"""Integration of the kernels into other libraries."""
