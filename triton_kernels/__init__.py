"""Inkling's Triton kernels: imported as `inkling_kernels`, whatever the folder is called.

Each module documents one operation: formula, layouts, rounding points, source. The package depends on torch and
Triton alone, and importing it loads neither: import the module that is needed.
"""

# Triton's own kernel collection is also called `triton_kernels`, and vLLM and SGLang take the first one on the path.
# With the root of this repository on it, that would be this folder: it refuses the name, and they go on to their copy.
if __name__ == "triton_kernels":
    raise ImportError(
        "this folder of inkling-portable is not Triton's package `triton_kernels`: import it as `inkling_kernels` "
        "(`pip install inkling-portable`, or `pip install -e .` in the checkout), and for Triton's package take the "
        "root of inkling-portable off sys.path",
        name=__name__,
        path=__file__,
    )
