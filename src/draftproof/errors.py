"""Every error that Draftproof raises on purpose.

    DraftproofError
    ├── UsageError                 exit code 2
    │   ├── OptionError
    │   ├── SpecError
    │   └── PromptError
    ├── Failure                    exit code 1
    │   ├── LoadError
    │   │   └── VocabularyMismatch
    │   ├── CacheFull
    │   └── DrafterError
    └── ParityError                exit code 3

A message says what was found, what was expected and what to do. `assert` is for our own invariants only.
"""


class DraftproofError(Exception):
    """The root; `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(DraftproofError):
    """The request cannot be right."""

    exit_code = 2


class OptionError(UsageError):
    """An option's value, or an option that the drafter, rule or model cannot honour."""


class SpecError(UsageError):
    """A drafter spec that does not parse, or names no drafter."""


class PromptError(UsageError):
    """An empty, undecodable or too long prompt."""


class Failure(DraftproofError):
    """The request was right, the work could not be done."""

    exit_code = 1


class LoadError(Failure):
    """A model, tokenizer or weight file that cannot be used."""


class VocabularyMismatch(LoadError):
    """Two models whose tokens differ."""


class CacheFull(Failure):
    """No pages left for the keys of a sequence."""


class DrafterError(Failure):
    """A drafter broke its contract, or died."""


class ParityError(DraftproofError):
    """A check of exactness did not hold."""

    exit_code = 3


def first_line(error: BaseException) -> str:
    """What an error of somebody else's says, short enough for a message of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
