"""`python -m engine.manager --root DIR --run DIR`: the manager's process. Started by the daemon."""

import sys

from engine.manager.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
