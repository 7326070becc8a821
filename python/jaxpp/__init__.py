"""JaxPP in C: pipeline-parallel (MPMD) training for JAX.

An independent implementation of JaxPP's published design (arXiv 2412.14374).
"""

from jaxpp import _core, errors
from jaxpp._core import __version__ as __version__
from jaxpp.api import *  # noqa: F403
from jaxpp.api import __all__  # noqa: F401
from jaxpp.client.plugins import share_memory_with_jax

if _misspelt := _core.misspelt_options():
    errors.warn(_misspelt)
share_memory_with_jax()
