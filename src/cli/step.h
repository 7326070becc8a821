// A plan file whose tasks are compiled, for the commands that run it or list its
// collectives.
#ifndef JPP_CLI_STEP_H_
#define JPP_CLI_STEP_H_

#include "base/json.h"
#include "cli/cli.h"
#include "jaxpp/planfile.h"

typedef struct jpp_cli_step {
  jpp_planfile_t* file;
  jpp_client_t* client;
  jpp_planfile_step_t* step;
  jpp_plan_costs_t* costs;  // with the collectives of the compiled tasks
  double compile_ms;
} jpp_cli_step_t;

// Loads words[0], opens the plugin of --plugin, and compiles. Close `step`, which is zero
// before, also after a failure.
jpp_status_t* jpp_cli_step_open(const jpp_cli_options_t* options,
                                jpp_cli_step_t* step) JPP_MUST_USE;
void jpp_cli_step_close(jpp_cli_step_t* step);

// A list with an object for each row of the table of collectives.
json_t* jpp_cli_collectives_json(const jpp_plan_costs_t* costs);

#endif  // JPP_CLI_STEP_H_
