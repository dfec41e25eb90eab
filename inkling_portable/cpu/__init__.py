"""The operations of few tokens on a CPU, compiled by numba: what decoding is made of.

torch spends most of a decoded token between its operations; here each operation of the model is one call. The modules
hold kernels and, below them, the functions that the dispatch table names. These give the reference (`*_ref`) what the
kernels are not made for: many rows, whose time is in torch's matrix products; gradients; layouts that the model never
makes; and wrong arguments, for its errors.
"""
