"""`python -m engine.monitor --run DIR`: the monitor process. Started by the daemon's client, or by
hand for debugging."""

import sys

from engine.monitor.monitor import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
