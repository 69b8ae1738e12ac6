"""`python -m engine.shipper --root ROOT --run RUN`: the shipper process, which the monitor
starts."""

import sys

from engine.shipper.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
