"""`python -m mtem.cli`: the command line without the installed script."""

from mtem.cli.start import main

main()
