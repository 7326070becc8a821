"""Print the folder of a header that a PyPI package ships.

find_headers.py pjrt    pjrt_c_api.h, from xla-cpu-pjrt
find_headers.py ffi     xla/ffi/api/c_api.h, from jaxlib
find_headers.py ucx     ucp/api/ucp.h, from libucx-cu13 or libucx-cu12
"""

import importlib.util
import pathlib
import sys

# What to look for, where in which module, and the package that has it.
HEADERS = {
    "pjrt": ("pjrt_c_api.h", "xla_plugins", "*/include", "xla-cpu-pjrt==0.0.1"),
    "ucx": ("ucp/api/ucp.h", "libucx", "include", "libucx-cu13"),
    "ffi": ("xla/ffi/api/c_api.h", "jaxlib", "include", "jaxlib"),
}


def main() -> int:
    header, module, folder, package = HEADERS[sys.argv[1]]
    spec = importlib.util.find_spec(module)
    for root in spec.submodule_search_locations if spec else []:
        for include in pathlib.Path(root).glob(folder):
            if (include / header).exists():
                print(include)
                return 0
    print(f"{header} not found: pip install {package}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
