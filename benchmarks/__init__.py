"""What is measured of the library; planning is measured without what was compiled before."""

import os

os.environ.setdefault("JAX_HREMAT_CACHE_DIR", "")
