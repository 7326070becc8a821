"""Print the folder of pjrt_c_api.h, as the PyPI package xla-cpu-pjrt ships it."""

import importlib.util
import pathlib
import sys


def main() -> int:
    spec = importlib.util.find_spec("xla_plugins")
    for root in spec.submodule_search_locations if spec else []:
        for header in pathlib.Path(root).glob("*/include/pjrt_c_api.h"):
            print(header.parent)
            return 0
    print("pjrt_c_api.h not found: pip install xla-cpu-pjrt", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
