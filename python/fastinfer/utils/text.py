"""Other programs' messages, shortened to one line, and strings that are no text."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's class if the message is empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def one_line(problem: object) -> str:
    """Return the whole text in one line, cut after 200 characters."""
    return " ".join(str(problem).split())[:200]


def is_text(string: str) -> bool:
    """Return whether a string has no lone surrogate, which no encoding of text can hold."""
    try:
        string.encode()
    except UnicodeEncodeError:
        return False
    return True
