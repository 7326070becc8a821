"""Writes a C test that calls every public function which returns a status with a NULL in the
place of each pointer that it needs, as the headers declare them.

    null_calls.py INCLUDE OUT.c OUT.d

The other pointers lead to zeros: a function that looks behind one before it has compared all
of them with NULL fails in its own way. Functions that free are called with NULLs alone.
"""

from __future__ import annotations

import pathlib
import re
import sys

STATUS = re.compile(
    r"JPP_API jpp_status_t\* (\w+)\(\s*([^;]*?)\)\s*(?:JPP_MUST_USE|JPP_PRINTF)"
)
FREE = re.compile(r"JPP_API void (\w+_(?:destroy|free|release|close))\(([^;]*?)\);")
CALLBACK = re.compile(r"typedef [^;{]*?\(\*(\w+)\)\(")
STRUCT = re.compile(r"typedef struct \w+ \{[^}]*\} (\w+);")
# What makes and hands on statuses: their rule is their own.
OWN_RULE = {"jpp_status_make", "jpp_status_annotate", "jpp_status_clone"} | {
    "jpp_plan_explain_memory"
}
# Slots and handles of a thing that must be there.
NOT_OF_NULL = {"jpp_channel_release"}

START = """\
// Written by null_calls.py.
#include <stdio.h>

#include "jaxpp/jaxpp.h"
#include "test_util.h"

static char g_zeros[65536];

static void called(void) { fail_msg("a callback was called"); }

// `function` has been called with NULL as `name`.
static void expect_refused(jpp_status_t* status, const char* function, const char* name) {
  char expected[256];
  snprintf(expected, sizeof(expected), "%s: expected a pointer as %s, found NULL", function,
           name);
  ASSERT_FAILS(status, JPP_INVALID_ARGUMENT, expected);
}
"""


def split_params(text: str) -> list[str]:
    parts = re.split(r",(?![^()]*\))", " ".join(text.split()))
    return [part.strip() for part in parts if part.strip() not in ("", "void")]


class Param:
    def __init__(self, text: str, callbacks: set[str], structs: set[str]) -> None:
        self.optional = text.startswith("JPP_OPTIONAL ")
        text = text.removeprefix("JPP_OPTIONAL ")
        inline = re.match(r"(.*?\(\*)(\w+)(\)\(.*)", text)
        self.type, _, self.name = text.rpartition(" ")
        if inline:
            self.type, self.name = inline[1] + inline[3], inline[2]
        self.callback = bool(inline) or self.type in callbacks
        self.pointer = self.callback or "*" in self.type
        self.struct = self.type in structs

    def value(self) -> str:
        if self.callback:
            return f"({self.type})called"
        if self.struct:
            return f"({self.type}){{0}}"
        return "(void*)g_zeros" if self.pointer else f"({self.type})1"


def main() -> int:
    headers = sorted(pathlib.Path(sys.argv[1]).glob("*.h"))
    text = "\n".join(re.sub(r"//.*", "", header.read_text()) for header in headers)
    callbacks, structs = set(CALLBACK.findall(text)), set(STRUCT.findall(text))
    calls, frees = [], []
    for function, params_text in STATUS.findall(text):
        params = [Param(p, callbacks, structs) for p in split_params(params_text)]
        for null in params:
            if function in OWN_RULE or not null.pointer or null.optional:
                continue
            values = ", ".join("NULL" if p is null else p.value() for p in params)
            calls.append(
                f'  expect_refused({function}({values}), "{function}", "{null.name}");'
            )
    for function, params_text in FREE.findall(text):
        if function not in NOT_OF_NULL:
            values = ", ".join("NULL" for _ in split_params(params_text))
            frees.append(f"  {function}({values});")
    tests = {"every_needed_pointer_is_missed": calls, "nothing_is_freed": frees}
    parts = [START]
    for name, lines in tests.items():
        body = "\n".join(["  (void)state;", *lines])
        parts.append(f"static void test_{name}(void** state) {{\n{body}\n}}\n")
    names = "".join(f"      cmocka_unit_test(test_{name}),\n" for name in tests)
    parts.append(
        f"int main(void) {{\n  const struct CMUnitTest tests[] = {{\n{names}  }};\n"
        '  return cmocka_run_group_tests_name("null", tests, NULL, NULL);\n}\n'
    )
    pathlib.Path(sys.argv[2]).write_text("\n".join(parts))
    read = " ".join(str(header) for header in headers)
    pathlib.Path(sys.argv[3]).write_text(f"{pathlib.Path(sys.argv[2]).name}: {read}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
