"""The three ways a command ends badly. A message says what was found, what is allowed, and what to do."""


class BadInput(ValueError):
    """The user's config, model or data cannot be used as given. Exit code 2."""


class DoesNotFit(RuntimeError):
    """The plan needs more memory than there is. Exit code 3."""


class RunFailed(RuntimeError):
    """Training started and could not go on. Exit code 1."""
