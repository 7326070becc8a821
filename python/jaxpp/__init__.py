"""JaxPP in C: pipeline-parallel (MPMD) training for JAX.

An independent implementation of JaxPP's published design (arXiv 2412.14374).
"""

import os

from jaxpp import _core, errors
from jaxpp._core import __version__ as __version__
from jaxpp.api import *  # noqa: F403
from jaxpp.api import __all__  # noqa: F401
from jaxpp.run.plugins import share_memory_with_jax

if _misspelt := _core.misspelt_options():
    errors.warn(_misspelt)
if _foreign := sorted(name for name in os.environ if name.startswith("JAXPP_")):
    errors.warn(
        f"{', '.join(_foreign)} in the environment: this implementation has no variables "
        "JAXPP_...; docs/options.md lists its own, which begin with JPP_"
    )
share_memory_with_jax()
