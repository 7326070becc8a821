// Checks whether the processes of a job run the same step: finds the first line that
// differs.
#include <string.h>

#include "base/null.h"
#include "jaxpp/job.h"

// "label<TAB>text", within the text of a process. At the end, the label is NULL.
typedef struct line {
  const char *label, *text;
  int label_size, text_size;
} line_t;

// A line without a tab is a text without a label.
static line_t next_line(const char** rest) {
  if (!**rest) return (line_t){0};
  size_t size = strcspn(*rest, "\n");
  const char* tab = memchr(*rest, '\t', size);
  const char* text = tab ? tab + 1 : *rest;
  const line_t line = {.label = *rest,
                       .label_size = tab ? (int)(tab - *rest) : 0,
                       .text = text,
                       .text_size = (int)(*rest + size - text)};
  *rest += size + ((*rest)[size] == '\n');
  return line;
}

static bool is_equal(const char* a, int a_size, const char* b, int b_size) {
  return a_size == b_size && (!a_size || !memcmp(a, b, (size_t)a_size));
}

static bool has_equal_texts(const line_t* mine, const line_t* theirs) {
  return !mine->label == !theirs->label &&
         is_equal(mine->text, mine->text_size, theirs->text, theirs->text_size);
}

static line_t missing(const char* text) {
  return (line_t){.text = text, .text_size = (int)strlen(text)};
}

#define EXPECTED "; expected the same script, versions and arguments in all"

jpp_status_t* jpp_job_compare_facts(uint32_t process, const char* mine, uint32_t other,
                                    const char* theirs) {
  JPP_RETURN_IF_NULL(mine, theirs);
  line_t here, there;
  bool same_names = false;
  do {
    here = next_line(&mine);
    there = next_line(&theirs);
    if (!here.label && !there.label) return NULL;
    same_names = is_equal(here.label, here.label_size, there.label, there.label_size);
  } while (same_names && has_equal_texts(&here, &there));
  const line_t name = here.label ? here : there;
  if (!here.label) {
    here = missing("missing");
  } else if (!same_names) {
    there = missing("missing");
  }
  return jpp_status_make(
      JPP_MESH_ERROR,
      "process %u and process %u do not run the same step: the %.*s is "
      "%.*s in process %u and %.*s in process %u" EXPECTED,
      process, other, name.label_size, name.label, here.text_size, here.text, process,
      there.text_size, there.text, other);
}

// Drops the name of the result in "c:f32[4] = mul 0.1:f32[] b", which means nothing to
// the user.
static void drop_result(line_t* line) {
  for (int i = line->text_size - 3; i >= 0; --i) {
    if (memcmp(line->text + i, " = ", 3) != 0) continue;
    line->text += i + 3;
    line->text_size -= i + 3;
    return;
  }
}

jpp_status_t* jpp_job_compare_programs(uint32_t process, const char* mine, uint32_t other,
                                       const char* theirs) {
  JPP_RETURN_IF_NULL(mine, theirs);
  line_t here, there;
  do {
    here = next_line(&mine);
    there = next_line(&theirs);
    if (!here.label && !there.label) return NULL;
  } while (has_equal_texts(&here, &there));
  const line_t place = here.label_size ? here : there;
  if (!here.label) here = missing("the end of the step");
  if (!there.label) there = missing("the end of the step");
  drop_result(&here);
  drop_result(&there);
  return jpp_status_make(JPP_MESH_ERROR,
                         "process %u and process %u do not run the same step: "
                         "%s%.*s%sprocess %u has `%.*s`, "
                         "and process %u has `%.*s`" EXPECTED,
                         process, other, place.label_size ? "at " : "", place.label_size,
                         place.label ? place.label : "", place.label_size ? ", " : "",
                         process, here.text_size, here.text, other, there.text_size,
                         there.text);
}
