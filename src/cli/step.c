// Opens a plan file and compiles its tasks.
#include "cli/step.h"

#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "jaxpp/option.h"

enum { kMostPath = 4096 };

// --- The plugin -----------------------------------------------------------------------

// Where pip puts packages, relative to the command's folder: `pattern` has room for
// kMostPath bytes.
static bool pattern_of_plugin(char* pattern) {
  static const char kBehind[] =
      "/lib/python3*/site-packages/lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so";
  char path[kMostPath - sizeof(kBehind)];
  ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 1);
  if (length < 0) return false;
  path[length] = 0;
  for (int up = 0; up < 2; ++up) {
    char* slash = strrchr(path, '/');
    if (slash) *slash = 0;
  }
  snprintf(pattern, kMostPath, "%s%s", path, kBehind);
  return true;
}

static jpp_status_t* find_plugin(const jpp_cli_options_t* options, jpp_str_t* path) {
  const char* named = options->plugin;
  char pattern[kMostPath] = "";
  glob_t found = {0};
  if (!named) named = jpp_option_get(JPP_OPTION_PLUGIN);
  if (!named && pattern_of_plugin(pattern) && glob(pattern, 0, NULL, &found) == 0) {
    named = found.gl_pathv[0];
  }
  if (named) jpp_str_append(path, named);
  globfree(&found);
  if (named) return NULL;
  return jpp_status_make(JPP_PLUGIN_ERROR,
                         "no PJRT plugin: neither --plugin nor JPP_PLUGIN names one, and "
                         "there is no %s; pip install lammps-jax-pjrt-cpu, or name "
                         ".venv/lib/python3*/site-packages/xla_plugins/xla_cpu_pjrt/"
                         "xla_cpu_pjrt.so of the folder in which make install was run",
                         pattern);
}

static jpp_status_t* create_client(jpp_cli_step_t* step, const char* plugin) {
  const jpp_planfile_contents_t* contents = &step->file->contents;
  const jpp_client_option_t on_cpu[] = {
      {.name = "cpu_device_count",
       .type = JPP_OPTION_INT64,
       .int64_value = (int64_t)contents->planned->ranks * contents->devices_per_rank},
      {.name = "asynchronous", .type = JPP_OPTION_BOOL, .bool_value = false}};
  jpp_pjrt_options_t options = {.struct_size = sizeof(options),
                                .plugin_path = plugin,
                                .options = on_cpu,
                                .option_count = 2};
  // See jpp_client_info_t.runs_in_call.
  if (contents->devices_per_rank > 1) options.option_count = 1;
  if (strcmp(contents->platform, "cpu") != 0) options.option_count = 0;
  setenv("TF_CPP_MIN_LOG_LEVEL", "2", 0);  // failures are reported as a status
  return jpp_client_create_pjrt(&options, &step->client);
}

static jpp_status_t* open_client(const jpp_cli_options_t* options, jpp_cli_step_t* step) {
  jpp_str_t path = {0};
  char* plugin = NULL;
  jpp_status_t* status = find_plugin(options, &path);
  if (!status) status = jpp_str_finish(&path, &plugin);
  jpp_str_deinit(&path);
  if (!status) status = create_client(step, plugin);
  jpp_text_free(plugin);
  return status;
}

// --- The step -------------------------------------------------------------------------

static jpp_status_t* compile_step(jpp_cli_step_t* step) {
  const jpp_planfile_contents_t* contents = &step->file->contents;
  uint32_t *devices = NULL, count = contents->planned->ranks * contents->devices_per_rank;
  double begin = jpp_cli_now_ms();
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(count, &devices));
  jpp_status_t* status = jpp_planfile_devices(step->file, step->client, count, devices);
  if (!status) {
    status = jpp_planfile_step_create(step->file, step->client, devices, &step->step);
  }
  jpp_free(devices);
  step->compile_ms = jpp_cli_now_ms() - begin;
  return status;
}

jpp_status_t* jpp_cli_step_open(const jpp_cli_options_t* options, jpp_cli_step_t* step) {
  JPP_RETURN_IF_ERROR(jpp_planfile_load(options->words[0], &step->file));
  JPP_RETURN_IF_ERROR(open_client(options, step));
  JPP_RETURN_IF_ERROR(compile_step(step));
  return jpp_planfile_step_costs(step->step, &step->costs);
}

void jpp_cli_step_close(jpp_cli_step_t* step) {
  jpp_plan_costs_destroy(step->costs);
  jpp_planfile_step_destroy(step->step);
  jpp_client_destroy(step->client);
  jpp_planfile_destroy(step->file);
}

json_t* jpp_cli_collectives_json(const jpp_plan_costs_t* costs) {
  json_t* list = json_array();
  for (uint32_t c = 0; c < costs->num_collectives; ++c) {
    const jpp_collective_costs_t* row = &costs->collectives[c];
    jpp__json_append(&list, json_pack("{sI so so so sI sI}",              //
                                      "rank", (json_int_t)row->rank,      //
                                      "task", jpp__json_text(row->task),  //
                                      "kind", jpp__json_text(row->kind),  //
                                      "axes", jpp__json_text(row->axes),  //
                                      "times", (json_int_t)row->times,    //
                                      "bytes", (json_int_t)row->bytes));
  }
  return list;
}
