"""`python -m palestra.rl` is the command `palestra`."""

from palestra.rl.cli import main

main()
