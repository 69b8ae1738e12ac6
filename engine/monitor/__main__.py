"""`python -m engine.monitor --run DIR`: the monitor process. Started by the daemon's client, and by hand when one looks for a fault."""

import sys

from engine.monitor.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
