"""JaxPP in C: pipeline-parallel (MPMD) training for JAX.

An independent implementation of JaxPP's published design (arXiv 2412.14374).
"""

from jaxpp.api import *  # noqa: F403
from jaxpp.api import __all__  # noqa: F401
