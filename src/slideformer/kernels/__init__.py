"""GPU kernels, one op a file, each with its reference in torch."""
