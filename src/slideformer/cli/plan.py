"""slideformer plan"""


def plan() -> None:
    """Not yet."""
