"""One file per command. Options become settings in options.py; torch is imported inside a command's body, after parsing."""
