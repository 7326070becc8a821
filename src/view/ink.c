// The one table of colours and characters that distinguish tasks in pictures.
#include "view/ink.h"

static const jpp_ink_t kInks[] = {
    [JPP_INK_FORWARD] = {"forward",
                         90,
                         {"#a9cdf2", "#7fb2e6", "#5795d4", "#3579ba"},
                         "\x1b[34m",
                         '0',
                         "forward"},
    [JPP_INK_BACKWARD] = {"backward (of inputs)",
                          155,
                          {"#b0dfb4", "#86c98d", "#5cb067", "#3b9148"},
                          "\x1b[32m",
                          'a',
                          "backward"},
    [JPP_INK_WEIGHT] = {"weight gradient",
                        125,
                        {"#fbd09a", "#f5b566", "#e99a3c", "#cf7f1e"},
                        "\x1b[33m",
                        'A',
                        "backward"},
    [JPP_INK_OTHER] = {"outside the loops",
                       130,
                       {"#d5d0cd", "#bab0ac", "#9c918c", "#7d736f"},
                       "\x1b[36m",
                       '#',
                       "outer"},
};
_Static_assert(sizeof(kInks) / sizeof(*kInks) == JPP_INK_COUNT, "a row for each ink");

const jpp_ink_t* jpp__ink(jpp_ink_name_t name) { return &kInks[name]; }

jpp_ink_name_t jpp__ink_of(jpp_task_kind_t kind) {
  switch (kind) {
    case JPP_TASK_FWD:
      return JPP_INK_FORWARD;
    case JPP_TASK_BWD:
    case JPP_TASK_BWD_I:
      return JPP_INK_BACKWARD;
    case JPP_TASK_BWD_W:
      return JPP_INK_WEIGHT;
    case JPP_TASK_IDLE:
    case JPP_TASK_OUTER:
    case JPP_TASK_KIND_COUNT:
      break;
  }
  return JPP_INK_OTHER;
}
