"""Every error that Draftproof raises on purpose.

    DraftproofError
    ├── UsageError                 the request cannot be right: exit code 2
    │   ├── OptionError            an option's value, or an option that the drafter, rule or model cannot honour
    │   ├── SpecError              a drafter spec that does not parse or names no drafter
    │   └── PromptError            an empty, undecodable or too long prompt
    ├── Failure                    the request was right, the work could not be done: exit code 1
    │   ├── LoadError              a model, tokenizer or weight file that cannot be used
    │   │   └── VocabularyMismatch two models whose tokens differ
    │   ├── CacheFull              no pages left for the keys of a sequence
    │   └── DrafterError           a drafter broke its contract or died
    └── ParityError                a check of exactness did not hold: exit code 3

A message says what was found, what was expected and what to do. `assert` is for our own invariants only.
"""


class DraftproofError(Exception):
    """The root; `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(DraftproofError):
    exit_code = 2


class OptionError(UsageError):
    pass


class SpecError(UsageError):
    pass


class PromptError(UsageError):
    pass


class Failure(DraftproofError):
    exit_code = 1


class LoadError(Failure):
    pass


class VocabularyMismatch(LoadError):
    pass


class CacheFull(Failure):
    pass


class DrafterError(Failure):
    pass


class ParityError(DraftproofError):
    exit_code = 3


def first_line(error: BaseException) -> str:
    """What an error of somebody else's says, short enough for a message of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
