"""python -m slideformer"""

import sys

from slideformer.cli import main

if __name__ == "__main__":
    sys.exit(main())
