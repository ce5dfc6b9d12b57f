"""slideformer doctor"""


def doctor() -> None:
    """Not yet."""
