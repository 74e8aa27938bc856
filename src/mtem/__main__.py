"""`python -m mtem`, as in ``accelerate launch -m mtem adapt ...``."""

from mtem.cli.start import main

if __name__ == "__main__":
    main()
