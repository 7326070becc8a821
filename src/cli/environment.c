// jaxpp options: the table of environment variables, and warnings about misspelt ones.
#include <stdio.h>

#include "base/json.h"
#include "cli/cli.h"
#include "jaxpp/option.h"

static jpp_status_t* options_json(jpp_str_t* out) {
  json_t* list = json_array();
  for (int i = 0; i < JPP_OPTION_COUNT; ++i) {
    const jpp_option_info_t* info = jpp_option_info((jpp_option_t)i);
    jpp__json_append(&list, json_pack("{s:s, s:s, s:s, s:s}", "name", info->name,
                                      "values", info->values, "default",
                                      info->default_value, "help", info->help));
  }
  jpp__json_take(list, JSON_INDENT(1), out);
  jpp_str_append(out, "\n");
  return NULL;
}

jpp_status_t* jpp_cli_environment(const jpp_cli_options_t* options, jpp_str_t* out) {
  if (options->json) return options_json(out);
  for (int i = 0; i < JPP_OPTION_COUNT; ++i) {
    const jpp_option_info_t* info = jpp_option_info((jpp_option_t)i);
    jpp_str_appendf(out, "%s=%s\n    %s; default: %s\n", info->name, info->values,
                    info->help, info->default_value);
  }
  return NULL;
}

jpp_status_t* jpp_cli_warn_of_options(void) {
  char* text = NULL;
  JPP_RETURN_IF_ERROR(jpp_options_misspelt(&text));
  if (text) fprintf(stderr, "jaxpp: warning: %s\n", text);
  jpp_text_free(text);
  return NULL;
}
