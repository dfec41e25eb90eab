"""The commands of `inkling`, one module each.

A command is a function whose parameters are its options, declared for typer; it returns its exit code, None for 0.
Help imports every module here, so each imports at its top no more than typer and the standard library, and the rest
inside the function. What the user did wrong is raised as ValueError or OSError with one clear sentence, which
`inkling_portable.cli` prints.
"""
