"""`python -m draftproof`: the command, for whoever starts programs by module (`accelerate launch -m draftproof train …`)."""

from .cli import main

main()
