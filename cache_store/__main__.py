import sys

from cache_store.cli import main

sys.exit(main())
