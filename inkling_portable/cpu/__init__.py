"""The operations of few tokens on a CPU, compiled by numba: what decoding is made of.

torch spends most of a decoded token between its operations; here each operation of the model is one call. The modules
hold kernels and, below them, the functions that the dispatch table names; those keep to the reference (`*_ref`) what is
no matter of few tokens: long prompts, whose time is in torch's matrix products, and gradients.
"""
