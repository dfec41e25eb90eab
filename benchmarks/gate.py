"""Why a benchmark writes no results."""


class GateError(Exception):
    """The results differ from the reference's: what was about to be measured is not what it should be."""


class MissingError(Exception):
    """Something that the case compares with or runs on is not here; the message says what to do."""
